"""Hidden states of a run's samples: from the cache where they are, from extraction servers where not, or left out.

Any mix trains as a full cache does, bit by bit: fetched states are rounded and reduced to the run's layers as the cache
would have done it. The trap: which samples are left out (`skip`) may depend on the servers, so the rows and the number
of steps never do; a row keeps its place when nothing of it is left, and is not counted then.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from speculators.data.endpoints import GivenUpError
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.samples import Split, TokenizedSample
from speculators.data.skipped import SkippedLog
from speculators.data.stored_states import Fetch, HiddenStates
from speculators.errors import UserError

OnMissing = Literal["generate", "skip", "raise"]
OnGenerate = Literal["delete", "cache"]


class Policy(NamedTuple):
    """What a run does with samples that its cache lacks.

    Attributes:
        on_missing: generate: have them from a server, or end the run; skip: from a server if there is one, else leave
            them out; raise: refuse to begin.
        on_generate: keep fetched states in the cache, or not.
        max_consecutive: samples left out in a row after which the run ends.
    """

    on_missing: OnMissing = "raise"
    on_generate: OnGenerate = "delete"
    max_consecutive: int = 10


class Shape(NamedTuple):
    """Layers and width of the states that a run trains on, and the bytes that a fetched token takes."""

    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    token_bytes: int


class OnDemand:
    """Gives one sample's states, from any thread. With a cache alone it is that cache, read by whoever asks."""

    def __init__(
        self,
        cache: HiddenStateCache | None,
        shape: Shape | None = None,
        *,
        fetch: Fetch | None = None,
        policy: Policy = Policy(),
        skipped: SkippedLog | None = None,
        budget: "Budget | None" = None,
        concurrency: int = 1,
    ) -> None:
        """
        Args:
            cache: opened for the run's layers; None when everything is fetched.
            shape: only without a cache, whose shape it would be.
            fetch: gives the states of all layers of the cache, without one of the run's, or raises GivenUpError. None:
                nothing can be fetched.
            policy: for the samples that the cache lacks.
            skipped: lists those left out.
            budget: of fetched states that wait.
            concurrency: samples fetched at once.
        """
        self.cache, self._fetch, self.policy = cache, fetch, policy
        if cache:
            fetched = (len(cache.manifest.aux_layer_ids) + 1) * cache.manifest.hidden_size * 2
            shape = Shape(cache.aux_layer_ids, cache.manifest.hidden_size, fetched)
        assert shape
        self.shape = shape
        self.budget = budget or Budget(1 << 32)
        self.pool = ThreadPoolExecutor(concurrency, "fetch") if fetch else None
        self._skipped = skipped or SkippedLog()
        self._in_a_row = 0
        self._lock = threading.Lock()

    def missing(self, samples: Sequence[TokenizedSample]) -> list[TokenizedSample]:
        """Those that the cache lacks."""
        return [sample for sample in samples if self.cache is None or sample.sample_id not in self.cache]

    def check(self, samples: Sequence[TokenizedSample], split: Split) -> int:
        """Look for a split's samples in the cache; gives the number of those that are missing.

        Raises:
            UserError: some are missing and the policy is to refuse, or all are and nothing can be fetched.
        """
        missing = self.missing(samples)
        refused = self.policy.on_missing == "raise" or (not self._fetch and len(missing) == len(samples))
        if missing and refused:
            raise UserError(
                f"--hidden-states: {self.cache.path if self.cache else 'no cache'} lacks {len(missing)} of the "
                f"{len(samples)} samples of the {split} split (first: {missing[0].sample_id}); run "
                "`speculators extract` again, it continues, or give --vllm-endpoint to have them while training."
            )
        return len(missing)

    def states(self, sample: TokenizedSample, split: Split) -> HiddenStates | None:
        """One sample's states in the run's layers; None when it is left out, which is then on the list.

        Raises:
            UserError: damaged in the cache, or it cannot be had and the policy or the number of those left out in a row
                ends the run.
            ClosedError: the run is ending.
        """
        if self.cache is not None and sample.sample_id in self.cache:
            return self.cache.read(sample.sample_id, sample.ids)
        if self._fetch is None:
            self._skipped.add(sample.sample_id, split, len(sample.ids), "not in the cache")
            return None
        try:
            fetched = self._fetch(sample.sample_id, sample.ids)
        except GivenUpError as error:
            self._leave_out(sample, split, error)
            return None
        with self._lock:
            self._in_a_row = 0
        if self.cache is None:
            return fetched
        if self.policy.on_generate == "cache":
            self.cache.write(sample.sample_id, fetched)
        return self.cache.as_read(fetched)

    def stop(self) -> None:
        """Drop what was not begun; what was ends when whoever fetches is closed."""
        if self.pool:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def _leave_out(self, sample: TokenizedSample, split: Split, error: GivenUpError) -> None:
        if self.policy.on_missing != "skip":
            raise UserError(
                f"{error}. The same command continues from the last checkpoint; --on-missing skip leaves such samples "
                "out."
            ) from None
        self._skipped.add(sample.sample_id, split, len(sample.ids), str(error))
        with self._lock:
            self._in_a_row += 1
            stops = self._in_a_row >= self.policy.max_consecutive
        if stops:
            raise UserError(
                f"{error}. {self.policy.max_consecutive} samples in a row were left out (--max-consecutive-failures); "
                "look at that server and start again."
            ) from None


class Budget:
    """Bytes of fetched states that may wait: on their way, on the RAM disk, or in memory for the trainer.

    A reader that holds nothing may always take one row, so that a row larger than the budget, or one beside another
    reader's waiting rows, is late but never stuck.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self._changed = threading.Condition()

    def take(self, size_bytes: int, holds_nothing: bool, wait_s: float = 0.0) -> bool:
        """Whether there was room, or was within the time given."""
        with self._changed:
            fits = self._changed.wait_for(
                lambda: holds_nothing or self.held_bytes + size_bytes <= self.size_bytes, timeout=wait_s
            )
            if fits:
                self.held_bytes += size_bytes
            return fits

    def give(self, size_bytes: int) -> None:
        """Hand bytes back."""
        with self._changed:
            self.held_bytes -= size_bytes
            self._changed.notify_all()
