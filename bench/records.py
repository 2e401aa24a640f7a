"""What a bench run leaves on disk: `run.json` (conditions, variants, outcomes), `requests.jsonl` (one row a request).

Everything that a report says is computed from these two. Rows are appended as they come, so an interrupted run goes on;
a row cut in half by a crash loses that row only. Of rows with one key the last counts: failures are tried again.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

from pydantic import Field

from bench.conditions import DEFAULT_POINT, Conditions, Outcome, Point, TaskInfo, Variant
from speculators.acceptance import Acceptance
from speculators.errors import UserError
from speculators.provenance import Provenance
from speculators.schema import Strict, read_json, validate, write_json

RUN_FILE = "run.json"
REQUESTS_FILE = "requests.jsonl"
FORMAT_VERSION = 1
BASELINE = "baseline"


class RequestKey(NamedTuple):
    """Which request a row is about."""

    variant: str
    task: str
    prompt_id: str
    turn: int
    repeat: int
    point: str = DEFAULT_POINT
    pass_index: int = 0


class RequestRecord(Strict):
    """One request. Times are seconds of a monotonic clock; a failed request has an `error` and is never averaged.

    Attributes:
        point: the load: `c4` is four requests in flight, `r2.5` is 2.5 arrivals a second.
        pass_index: 0, or 1 for the baseline's second measurement at the end of the run, which tells of drift.
        skipped: the prompt does not fit the server's context; `error` says so, and it is not tried again.
        started_s: when it was sent, after the start of its variant's measurement. At a rate of arrivals: when it was
            due, which is what all latencies count from, so that a slow server is not flattered.
        late_s: at a rate of arrivals, how long after that it was sent.
        ttft_s: from there to the first chunk that carries a token.
        tpot_s: time per output token, (last token - first token) / (output_tokens - 1); None below two tokens.
        chunk_gaps_s: times between neighbouring chunks with tokens. Under speculation not the time per token.
        chunk_tokens: tokens in each of these chunks (one entry more than gaps); empty if the server does not tell.
        e2e_s: from there to the last token.
        token_ids, prompt_token_ids: of the output and of the prompt as templated; None if the server does not tell.
        acceptance: verification steps by accepted tokens; None without speculation or per-request metrics.
        accepted_per_step, drafted_per_step: the same steps in order, when the server gives them.
    """

    variant: str
    task: str
    prompt_id: str
    turn: int = 0
    repeat: int = 0
    point: str = DEFAULT_POINT
    pass_index: int = 0
    error: str | None = None
    skipped: bool = False
    started_s: float = 0.0
    late_s: float = 0.0
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    chunk_gaps_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    acceptance: Acceptance | None = None
    accepted_per_step: tuple[int, ...] = ()
    drafted_per_step: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the request ended well and may be averaged."""
        return self.error is None

    @property
    def key(self) -> RequestKey:
        """Which request this row is about."""
        return RequestKey(self.variant, self.task, self.prompt_id, self.turn, self.repeat, self.point, self.pass_index)


class BenchRun(Strict):
    """`run.json`."""

    format_version: int = FORMAT_VERSION
    conditions: Conditions
    tasks: tuple[TaskInfo, ...]
    variants: tuple[Variant, ...]
    outcomes: dict[str, Outcome] = Field(default_factory=dict)
    margin: float = 0.03
    points: tuple[Point, ...] = ()
    provenance: Provenance

    def write(self, directory: Path) -> None:
        """Write `run.json`, atomically."""
        write_json(directory / RUN_FILE, self)

    @classmethod
    def read(cls, directory: Path) -> "BenchRun":
        """Read the run of a bench directory.

        Raises:
            UserError: no such run, or one of another format.
        """
        run = read_json(directory / RUN_FILE, cls, "a bench run; make one with `speculators bench`")
        if run.format_version != FORMAT_VERSION:
            raise UserError(
                f"{directory / RUN_FILE}: format {run.format_version}, this version reads {FORMAT_VERSION}; "
                "run `speculators bench` again with another --output."
            )
        return run


class RecordWriter:
    """Appends rows, each whole and on disk before the next request starts."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / REQUESTS_FILE
        self._file: IO[bytes]

    def __enter__(self) -> Self:
        _cut_half_line(self._path)
        self._file = self._path.open("ab")
        return self

    def append(self, record: RequestRecord) -> None:
        """Write one row."""
        line = record.model_dump_json(exclude_defaults=True) + "\n"
        self._file.write(line.encode())
        self._file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def read_records(directory: Path) -> list[RequestRecord]:
    """All rows, the last one of each key, in the order of first appearance; a half-written last line is left out.

    Raises:
        UserError: a line in the middle is not a record.
    """
    path = directory / REQUESTS_FILE
    if not path.exists():
        return []
    records: dict[RequestKey, RequestRecord] = {}
    *lines, _half = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            data = json.loads(line)
        except ValueError as error:
            raise UserError(
                f"{path}: line {number} is not JSON ({error}); delete that line to go on without it."
            ) from None
        if not isinstance(data, dict):
            raise UserError(f"{path}: line {number} is not a request record; delete that line to go on.")
        record = validate(RequestRecord, data, f"{path}: line {number}")
        records[record.key] = record
    return list(records.values())


def finished_keys(records: Iterable[RequestRecord]) -> dict[RequestKey, RequestRecord]:
    """Rows that need no second try."""
    return {record.key: record for record in records if record.ok or record.skipped}


def _cut_half_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end != len(content):
        os.truncate(path, end)
