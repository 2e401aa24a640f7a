"""From options to a run: data that nothing can be learned from, or validated on, is one sentence."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from doctored import make_world, options

from speculators.data.samples import DataDirectory, SplitStats
from speculators.errors import UserError
from speculators.training.launch import train


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return make_world(tmp_path)


def without_validation(root: Path, supervised: bool) -> None:
    """The validation split emptied, or left without a supervised token."""
    data = DataDirectory(root / "d")
    kept = list(data.split("validation")) if not supervised else []
    kept = [sample._replace(loss_mask=sample.loss_mask & False) for sample in kept]
    tokens = sum(len(sample.ids) for sample in kept)
    stats = {**data.manifest.splits, "validation": SplitStats(samples=len(kept), tokens=tokens, supervised_tokens=0)}
    splits = {"train": list(data.split("train")), "validation": kept}
    DataDirectory.write(root / "d", data.manifest.model_copy(update={"splits": stats}), data.token_counts, dict(splits))


@pytest.mark.parametrize("supervised", [True, False])
def test_an_empty_validation_set_is_refused_and_can_be_done_without(world: Path, supervised: bool) -> None:
    without_validation(world, supervised)
    with pytest.raises(UserError, match=r"no validation sample with a supervised token.*--validate-every 0"):
        train(options(world, "eagle3", max_steps=1))
    assert not (world / "run").exists()
    result = train(options(world, "eagle3", max_steps=1, validate_every=0))
    assert result
    assert (result.steps, result.validation) == (1, None)
