"""Where the hidden states of a run come from, as its options say: opens cache and servers, closes them at the end."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from speculators.checkpoint import all_checkpoints
from speculators.data.cache_manifest import CacheManifest
from speculators.data.endpoints import Endpoints
from speculators.data.extract_options import check_layer_ids
from speculators.data.extract_rest import RestSource
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.on_demand import Budget, OnDemand, Policy, Shape
from speculators.data.samples import SPLITS, DataDirectory
from speculators.data.skipped import SKIPPED_LOG, SkippedLog
from speculators.training.options import TrainOptions
from speculators.training.parallel import Ranks
from speculators.training.pretrained import read_start
from speculators.verifier import Verifier

_IN_FLIGHT = 32
_ATTEMPTS_BEFORE_SKIP = 5
_GIB = 1 << 30


class Wanted(NamedTuple):
    """What an extraction server for a run must give: the streams entering these layers, and the longest sample."""

    aux_layer_ids: tuple[int, ...]
    longest: int


def wanted(options: TrainOptions) -> Wanted:
    """What a server that is started for this run must give.

    Raises:
        UserError: verifier, data or cache are not there or do not fit.
    """
    verifier = Verifier.read(options.verifier)
    data = DataDirectory(options.data)
    longest = max((int(data.split(split).lengths.max(initial=0)) for split in SPLITS), default=0)
    start = read_start(options, verifier)
    layers = start.config.aux_layer_ids if start else options.aux_layer_ids
    return Wanted(_fetched_layers(options, verifier, layers), longest)


@contextmanager
def open_states(
    options: TrainOptions, verifier: Verifier, aux_layer_ids: tuple[int, ...] | None, ranks: Ranks
) -> Iterator[OnDemand]:
    """The source of a run's states, for the length of the block; at its end nothing of it is left with the servers.

    Args:
        options: cache, endpoints, and what to do with samples that the cache lacks.
        verifier: whose states.
        aux_layer_ids: layers that the draft reads; None: those of the cache, without one the verifier's default.
        ranks: the budget is shared by all.

    Raises:
        UserError: a cache that does not fit, or layers that no server gives.
    """
    cache = _open_cache(options, verifier, aux_layer_ids)
    policy = Policy(options.missing_policy, options.on_generate, options.max_consecutive_failures)
    skipped = SkippedLog(options.output)
    if ranks.first and (options.restart or not all_checkpoints(options.output)):
        (options.output / SKIPPED_LOG).unlink(missing_ok=True)  # of another run
    with ExitStack() as opened:
        if not options.vllm_endpoint or policy.on_missing == "raise":
            yield OnDemand(cache, policy=policy, skipped=skipped)
            return
        layers = cache.manifest.aux_layer_ids if cache else _fetched_layers(options, verifier, aux_layer_ids)
        fetch = opened.enter_context(_endpoints(options, layers, verifier, policy))
        source = OnDemand(
            cache,
            None if cache else Shape(layers, verifier.hidden_size, (len(layers) + 1) * verifier.hidden_size * 2),
            fetch=fetch,
            policy=policy,
            skipped=skipped,
            budget=Budget(int(options.hidden_states_budget * _GIB / ranks.world)),
            concurrency=_IN_FLIGHT * len(options.vllm_endpoint),
        )
        try:
            yield source
        finally:
            source.stop()


def _open_cache(
    options: TrainOptions, verifier: Verifier, aux_layer_ids: tuple[int, ...] | None
) -> HiddenStateCache | None:
    if options.hidden_states is None:
        return None
    if options.on_generate == "cache" and not (options.hidden_states / "manifest.json").exists():
        layers = _fetched_layers(options, verifier, aux_layer_ids)
        HiddenStateCache.create(options.hidden_states, CacheManifest.of(verifier, layers))
    return HiddenStateCache.open(options.hidden_states, verifier, aux_layer_ids, options.check_hidden_states)


def _fetched_layers(
    options: TrainOptions, verifier: Verifier, aux_layer_ids: tuple[int, ...] | None
) -> tuple[int, ...]:
    """A cache is filled with all the layers that it has, whichever of them this run reads."""
    if options.hidden_states and (options.hidden_states / "manifest.json").exists():
        return CacheManifest.read(options.hidden_states).aux_layer_ids
    layers = aux_layer_ids or verifier.default_aux_layer_ids()
    check_layer_ids(layers, verifier)
    return layers


def _endpoints(options: TrainOptions, layers: tuple[int, ...], verifier: Verifier, policy: Policy) -> Endpoints:
    assert options.storage_path
    sources = [
        RestSource(url, options.storage_path, len(layers), verifier.hidden_size, options.request_timeout)
        for url in options.vllm_endpoint
    ]
    skips = policy.on_missing == "skip"
    attempts = min(_ATTEMPTS_BEFORE_SKIP, policy.max_consecutive) if skips else policy.max_consecutive
    return Endpoints(sources, attempts)
