"""`speculators extract --verify`: stored states against the same samples computed again by another source.

Compared token by token, because a mean over a whole sample hides a few wrong ones; and from every server that gave
some, because one of several may run with other layers.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch

from speculators.data.extract_options import LEAST_COSINE, LayerAgreement, Verification
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.samples import TokenizedSample
from speculators.data.stored_states import Fetch


def choose(samples: Sequence[TokenizedSample], number: int, answered_by: Mapping[str, str]) -> list[TokenizedSample]:
    """`number` of the samples, equally many from each server and one at least.

    Args:
        answered_by: the server that a sample came from; samples that were there before have none and count as one more.
    """
    servers: dict[str, list[TokenizedSample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.sample_id):
        servers.setdefault(answered_by.get(sample.sample_id, ""), []).append(sample)
    in_turn = [sample for turn in zip_longest(*servers.values()) for sample in turn if sample is not None]
    return in_turn[: max(number, len(servers))]


def verify(
    cache: HiddenStateCache,
    samples: Sequence[TokenizedSample],
    fetch: Fetch,
    answered_by: Mapping[str, str] | None = None,
) -> Verification:
    """Compare what the cache holds of `samples` with what `fetch` computes of them.

    Args:
        cache: opened with all of its layers.
        samples: at least one, all stored.
        fetch: computes all of the cache's layers.
        answered_by: the server that a sample came from, where it is known.

    Raises:
        UserError: a stored sample is damaged.
    """
    names = [*map(str, cache.aux_layer_ids), "last"]
    cosines: list[list[torch.Tensor]] = [[] for _ in names]
    errors: list[list[torch.Tensor]] = [[] for _ in names]
    for sample in samples:
        stored, computed = cache.read(sample.sample_id, sample.ids), fetch(sample.sample_id, sample.ids)
        for i in range(len(names)):
            seen, wanted = (
                (states.aux_hidden[:, i] if i < len(cache.aux_layer_ids) else states.last_hidden).float()
                for states in (stored, computed)
            )
            cosines[i].append(torch.cosine_similarity(seen, wanted, dim=-1))
            errors[i].append((seen - wanted).abs().amax(-1) / wanted.abs().amax(-1).clamp_min(1e-30))
    layers = [
        LayerAgreement(
            layer=name,
            lowest_cosine=float(torch.cat(cosine).min()),
            mean_cosine=float(torch.cat(cosine).mean()),
            largest_relative_error=float(torch.cat(error).max()),
        )
        for name, cosine, error in zip(names, cosines, errors, strict=True)
    ]
    differing = [
        f"{sample.sample_id} (from {(answered_by or {}).get(sample.sample_id, 'the cache')})"
        for sample, *of_layers in zip(samples, *cosines, strict=True)
        if min(float(cosine.min()) for cosine in of_layers) < LEAST_COSINE
    ]
    tokens = sum(len(sample.ids) for sample in samples)
    return Verification(samples=len(samples), tokens=tokens, layers=tuple(layers), differing=tuple(differing))
