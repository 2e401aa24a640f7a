"""`speculators extract --verify`: stored states against the same samples computed again by another source.

Compared token by token, because a mean over a whole sample hides a few wrong ones.
"""

from collections.abc import Sequence

import torch

from speculators.data.extract import Fetch
from speculators.data.extract_options import LayerAgreement, Verification
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.samples import TokenizedSample


def verify(cache: HiddenStateCache, samples: Sequence[TokenizedSample], fetch: Fetch) -> Verification:
    """Compare what the cache holds of `samples` with what `fetch` computes of them.

    Args:
        cache: opened with all of its layers.
        samples: at least one, all stored.
        fetch: computes all of the cache's layers.

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
    tokens = sum(len(sample.ids) for sample in samples)
    return Verification(samples=len(samples), tokens=tokens, layers=tuple(layers))
