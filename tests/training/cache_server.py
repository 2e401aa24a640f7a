"""An extraction server that gives what a cache of the toy's data holds, and misbehaves as it is told."""

from pathlib import Path

import torch
from toy_training import VERIFIER
from unruly_server import ORDERLY, Script, UnrulyServer

from speculators.data.hidden_states import HiddenStateCache
from speculators.data.samples import sample_id


def sample_of(ids: list[int]) -> str:
    """The sample that a request asks for."""
    return sample_id(torch.tensor(ids, dtype=torch.int32).numpy())


def serve(cache: Path, storage: Path, script: Script = ORDERLY) -> UnrulyServer:
    """Writes to `storage`, which must be there."""
    full = HiddenStateCache.open(cache, VERIFIER, None)

    def states_of(ids: list[int]) -> torch.Tensor:
        states = full.read(sample_of(ids), torch.tensor(ids, dtype=torch.int32).numpy())
        return torch.cat([states.aux_hidden, states.last_hidden[:, None]], 1)

    return UnrulyServer(storage, states_of, script)
