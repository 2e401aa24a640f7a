"""What a bench run leaves on disk: `run.json` (conditions, variants, outcomes), `requests.jsonl` (one row a request).

Everything that a report says is computed from these two. Rows are appended as they come, so an interrupted run goes on;
a row cut in half by a crash loses that row only. Of rows with one key the last counts: failures are tried again.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Literal, NamedTuple, Self

from pydantic import Field

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


class RequestRecord(Strict):
    """One request. Times are seconds of a monotonic clock; a failed request has an `error` and is never averaged.

    Attributes:
        started_s: when it was sent, after the start of its variant's measurement.
        ttft_s: from sending to the first chunk that carries a token.
        tpot_s: time per output token, (last token - first token) / (output_tokens - 1); None below two tokens.
        chunk_gaps_s: times between neighbouring chunks with tokens. Under speculation not the time per token.
        chunk_tokens: tokens in each of these chunks (one entry more than gaps); empty if the server does not tell.
        e2e_s: from sending to the last token.
        token_ids, prompt_token_ids: of the output and of the prompt as templated; None if the server does not tell.
        acceptance: verification steps by accepted tokens; None without speculation or per-request metrics.
        accepted_per_step, drafted_per_step: the same steps in order, when the server gives them.
    """

    variant: str
    task: str
    prompt_id: str
    turn: int = 0
    repeat: int = 0
    error: str | None = None
    started_s: float = 0.0
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
        return RequestKey(self.variant, self.task, self.prompt_id, self.turn, self.repeat)


class Conditions(Strict):
    """Everything that must be equal for two measurements to be compared. `prompts` maps a task to the hash of its
    prompts in their order; `machine` is processor, cores and memory."""

    verifier: str
    verifier_revision: str
    template_hash: str
    prompts: dict[str, str]
    max_tokens: int
    temperature: float
    seed: int
    concurrency: int
    repeats: int
    enforce_eager: bool
    server_args: tuple[str, ...]
    vllm: str
    machine: str


class Variant(Strict):
    """What is served under a name. `draft_revision` ties the rows to the draft's weights, not to its path."""

    name: str
    verifier: str
    fp8: bool = False
    draft: str | None = None
    draft_revision: str | None = None
    algorithm: str | None = None
    num_speculative_tokens: int | None = None
    skip_reason: str | None = None

    @property
    def file_name(self) -> str:
        """The name where files are called after the variant: a path's slashes become underscores."""
        return "".join(c if c.isalnum() or c in "@+-._" else "_" for c in self.name)[-80:]


class Outcome(Strict):
    """How a variant's measurement went; `reason` says why it was skipped or failed."""

    status: Literal["measured", "skipped", "failed"]
    reason: str = ""


class Point(Strict):
    """One variant on one task in one start: acceptance told twice, and how busy the machine was with other work.

    Attributes:
        requests: summed over the requests; None where they tell none.
        counters: difference of the server's counters around them.
        other_cores: cores that other programs kept busy meanwhile; None if the system does not tell.
    """

    variant: str
    task: str
    num_requests: int
    num_failed: int
    requests: Acceptance | None
    counters: Acceptance | None
    other_cores: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether both say the same; None when there is only one side."""
        if self.requests is None or self.counters is None:
            return None
        return _trimmed(self.requests) == _trimmed(self.counters)


class TaskInfo(Strict):
    """A task of the run."""

    name: str
    group: str
    num_prompts: int


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
    return {record.key: record for record in records if record.ok}


def _cut_half_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end != len(content):
        os.truncate(path, end)


def _trimmed(acceptance: Acceptance) -> tuple[tuple[int, ...], int]:
    """Histogram without trailing zeros: a counter that no step reached may be missing on one side."""
    counts = list(acceptance.histogram)
    while counts and counts[-1] == 0:
        counts.pop()
    return tuple(counts), acceptance.drafted
