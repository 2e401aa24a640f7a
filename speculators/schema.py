"""What all persisted types share: frozen, unknown keys refused, written atomically, read with a one-sentence error."""

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from speculators.errors import UserError


class Strict(BaseModel):
    """Base of every type that is read from or written to disk."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


StrictT = TypeVar("StrictT", bound=Strict)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that replaces it when the block ends well and vanishes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically: a reader sees the old file or the new one, never a half."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: BaseModel | dict[str, Any]) -> None:
    """Write a model or a plain dict as indented JSON, atomically."""
    data = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json_dict(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: the file is missing, unreadable, or not a JSON object; `what` names it in the sentence.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as {what} ({error}).") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON at line {error.lineno} ({error.msg}); expected {what}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a JSON {type(data).__name__}; expected {what}, a JSON object.")
    return data


def read_json(path: Path, model: type[StrictT], what: str) -> StrictT:
    """Read `path` as `model`.

    Raises:
        UserError: missing, unreadable or invalid; the sentence names the file, the key and the value seen.
    """
    return validate(model, read_json_dict(path, what), str(path))


def validate(model: type[StrictT], data: dict[str, Any], where: str) -> StrictT:
    """Build `model` from `data`, turning pydantic's report into one sentence about the first problem."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the whole"
        if first["type"] == "extra_forbidden":
            known = ", ".join(model.model_fields)
            raise UserError(f"{where}: unknown key {key!r}; known keys are {known}.") from None
        message = first["msg"].removeprefix("Value error, ")
        seen = "" if first["type"] == "missing" else f" (value seen: {first['input']!r})"
        raise UserError(f"{where}: {key}: {message}{seen}.") from None
