"""Request rows in little memory: what a report needs of `requests.jsonl`, read fast enough for 100,000 rows.

The trap: these records hold arrays where the schema says tuples, and lack the prompt's tokens; never write them back.
"""

import gc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.records import REQUESTS_FILE, RequestKey, RequestRecord, read_records

_ALL_FIELDS = set(RequestRecord.model_fields)  # one set for all rows; each would have a set of its own
_LEFT_OUT: dict[str, Any] = {"prompt_token_ids": None, "chunk_tokens": (), "drafted_per_step": ()}


@contextmanager
def no_collection() -> Iterator[None]:
    """Leave cyclic garbage alone meanwhile: records make none, and looking for it among 100,000 takes half the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def read_packed(directory: Path) -> list[RequestRecord]:
    """The rows as `bench.records.read_records` gives them, packed.

    Raises:
        UserError: a line in the middle is not a record.
    """
    path = directory / REQUESTS_FILE
    if not path.exists():
        return []
    records: dict[RequestKey, RequestRecord] = {}
    names: dict[str, str] = {}
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break  # half written
            try:
                record = pack(RequestRecord.model_validate_json(line), names)
            except ValidationError:
                return read_records(directory)  # says which line is wrong
            records[record.key] = record
    return list(records.values())


def pack(record: RequestRecord, names: dict[str, str]) -> RequestRecord:
    """The record itself, with arrays for its long fields; `names` holds one copy of each name that rows share."""
    fields = record.__dict__  # the record is new and nobody else's, so that it may be changed here
    fields.update(_LEFT_OUT)
    for key in ("variant", "task", "point"):
        fields[key] = names.setdefault(fields[key], fields[key])
    fields["chunk_gaps_s"] = array("d", record.chunk_gaps_s)
    fields["accepted_per_step"] = array("H", record.accepted_per_step)
    if record.token_ids is not None:
        fields["token_ids"] = array("i", record.token_ids)
    object.__setattr__(record, "__pydantic_fields_set__", _ALL_FIELDS)
    return record
