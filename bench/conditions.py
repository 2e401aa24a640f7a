"""Under what a bench run was made: conditions, variants, tasks, and the points that were measured.

Conditions must be equal for a comparison. Load points and passes are no conditions: each row says which one it is of.
"""

from typing import Any, Literal

from pydantic import model_validator

from speculators.acceptance import Acceptance
from speculators.schema import Strict

DEFAULT_POINT = "c1"
CLOSING_PASS = 1


class Conditions(Strict):
    """Everything that must be equal for two measurements to be compared, `points` excepted.

    Attributes:
        prompts: task -> hash of its prompts in their order.
        machine: processor, cores and memory.
        points: load points that were asked for: `c4` is four requests in flight, `r2.5` is 2.5 arrivals a second.
        thinking: what the chat template was told; None leaves it to the template.
        prefix_cache: how a prompt that was seen before is kept from looking fast.
    """

    verifier: str
    verifier_revision: str
    template_hash: str
    prompts: dict[str, str]
    max_tokens: int
    temperature: float
    seed: int
    points: tuple[str, ...] = (DEFAULT_POINT,)
    repeats: int
    thinking: Literal["on", "off"] | None = None
    prefix_cache: str = "off"
    enforce_eager: bool
    server_args: tuple[str, ...]
    vllm: str
    machine: str

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, data: Any) -> Any:
        """Older runs had one concurrency."""
        if isinstance(data, dict) and "concurrency" in data:
            data = {**data, "points": (f"c{data['concurrency']}",)}
            del data["concurrency"]
        return data


class Variant(Strict):
    """What is served under a name. `draft_revision` ties the rows to the draft's weights, not to its path.

    Attributes:
        algorithm: of the draft, or `ngram` or `suffix`, which speculate without one; None without speculation.
        url: of a server that somebody else runs; what it serves is unknown beyond `verifier`, its model's name.
    """

    name: str
    verifier: str
    fp8: bool = False
    draft: str | None = None
    draft_revision: str | None = None
    algorithm: str | None = None
    num_speculative_tokens: int | None = None
    url: str | None = None
    skip_reason: str | None = None

    @property
    def file_name(self) -> str:
        """The name where files are called after the variant: a path's slashes become underscores."""
        return "".join(c if c.isalnum() or c in "@+-._" else "_" for c in self.name)[-80:]

    @property
    def speculates(self) -> bool:
        """Whether tokens are drafted, as far as is known before it is measured."""
        return self.draft is not None or self.algorithm is not None


class Outcome(Strict):
    """How a variant's measurement went; `reason` says why it was skipped or failed."""

    status: Literal["measured", "skipped", "failed"]
    reason: str = ""


class Point(Strict):
    """One variant on one task at one load in one start: acceptance told twice, and how far the machine can be trusted.

    Attributes:
        point, pass_index: as in the rows.
        requests: summed over the requests; None where they tell none.
        counters: difference of the server's counters around them.
        other_cores: cores that other programs kept busy meanwhile; None if the system does not tell.
        wall_s: from the first request to the last answer, pauses between repeats left out.
        prefix_cache_reset: whether the server emptied it before each repeat; None if it was not asked to.
        client_lag_mean_s, client_lag_p99_s: from data lying ready to this client's handling it.
        refused: why this point must not be used (the client was too slow, or requests and counters tell different
            things): its rows are written again as failures. None if it may be.
        skipped: ids of the prompts that do not fit the server's context.
    """

    variant: str
    task: str
    point: str = DEFAULT_POINT
    pass_index: int = 0
    num_requests: int
    num_failed: int
    requests: Acceptance | None
    counters: Acceptance | None
    other_cores: float | None = None
    wall_s: float | None = None
    prefix_cache_reset: bool | None = None
    client_lag_mean_s: float | None = None
    client_lag_p99_s: float | None = None
    refused: str | None = None
    skipped: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool | None:
        """Whether both say the same; None when there is only one side."""
        if self.requests is None or self.counters is None:
            return None
        return _trimmed(self.requests) == _trimmed(self.counters)

    @property
    def mismatch(self) -> str | None:
        """What both sides say where they differ though they cannot; a failed request is in the counters only."""
        if self.agrees is not False or self.num_failed > len(self.skipped):
            return None
        return (
            f"the requests' acceptance and the server's counters differ: {told(self.requests)} against "
            f"{told(self.counters)}; was the server used by others meanwhile? Start the same bench again to measure it."
        )


class TaskInfo(Strict):
    """A task of the run."""

    name: str
    group: str
    num_prompts: int


def told(acceptance: Acceptance | None) -> str:
    """Steps and tokens in words."""
    if acceptance is None:
        return "nothing"
    return f"{acceptance.accepted} of {acceptance.drafted} drafted tokens accepted in {acceptance.steps} steps"


def _trimmed(acceptance: Acceptance) -> tuple[tuple[int, ...], int]:
    """Histogram without trailing zeros: a counter that no step reached may be missing on one side."""
    counts = list(acceptance.histogram)
    while counts and counts[-1] == 0:
        counts.pop()
    return tuple(counts), acceptance.drafted
