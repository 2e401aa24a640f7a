"""Options that are JSON objects: written as text on the command line, as mappings in a YAML file."""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator


def _parse(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError('not a JSON object; give one such as {"name": true}')
    return parsed


JsonObject = Annotated[dict[str, Any], BeforeValidator(_parse)]
"""A dict, or the JSON text of one."""
