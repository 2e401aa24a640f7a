"""The algorithms, one line each. Configs load without torch; the network is imported when it is built."""

import importlib
from typing import TYPE_CHECKING, NamedTuple

from speculators.algorithms.dflash.config import DFlashConfig
from speculators.algorithms.draft_config import DraftConfig
from speculators.algorithms.eagle3.config import Eagle3Config
from speculators.errors import UserError

if TYPE_CHECKING:
    from speculators.algorithms.base import Algorithm


class Entry(NamedTuple):
    """An algorithm: its config class and the module whose `build` makes a trainable `Algorithm` of it."""

    config: type[DraftConfig]
    objective: str


ALGORITHMS: dict[str, Entry] = {
    "eagle3": Entry(Eagle3Config, "speculators.algorithms.eagle3.objective"),
    "dflash": Entry(DFlashConfig, "speculators.algorithms.dflash.objective"),
}


def lookup(name: str, where: str = "--speculator-type") -> Entry:
    """The entry of `name`.

    Raises:
        UserError: no such algorithm; the sentence lists the known ones.
    """
    if name not in ALGORITHMS:
        raise UserError(f"{where}: unknown algorithm {name!r}; known algorithms are {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[name]


def objective_of(config: DraftConfig) -> "type[Algorithm]":
    """The class that trains drafts of this config (imports torch)."""
    algorithm: type[Algorithm] = importlib.import_module(lookup(config.algorithm).objective).OBJECTIVE
    return algorithm
