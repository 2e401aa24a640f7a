"""Rows of data files, an object each: JSONL, JSON (a list) or parquet.

The trap: a line ends at a newline alone, never at U+2028.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from speculators.errors import UserError


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one data file, in order.

    Raises:
        UserError: the file is missing or not readable as its ending says; the line is named.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give JSONL, JSON (a list) or parquet files.")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".json" and _starts_with_list(path):
        yield from _json_list(path)
    elif path.suffix in (".jsonl", ".json"):
        yield from _jsonl_rows(path)
    else:
        raise UserError(f"{path}: files ending in {path.suffix!r} are not known; use .jsonl, .json or .parquet.")


def count_rows(path: Path) -> int:
    """How many rows `read_rows` gives, found out without parsing them where that can be; 0 for a file that is missing
    or unreadable, which reading it will tell."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(path).num_rows)
        if path.suffix == ".json" and _starts_with_list(path):
            return len(json.loads(path.read_bytes()))
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except (OSError, ValueError, ImportError):
        return 0


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _row(line, f"{path}, line {number}")


def _row(data: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(data)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({error}).") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} holds a JSON {type(row).__name__}; each row is an object.")
    return row


def _starts_with_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).lstrip().startswith(b"[")


def _json_list(path: Path) -> Iterator[dict[str, Any]]:
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise UserError(f"{path}, row {number} is a JSON {type(row).__name__}; each row is an object.")
        yield row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: parquet files need pyarrow; install it with `pip install pyarrow`.") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise UserError(f"{path} is not a readable parquet file ({str(error).splitlines()[0]}).") from None
