"""Options of `speculators train`: which algorithm knows what, what a saved run holds, losses and their weights."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from speculators.cli.options import resolve, save_resolved
from speculators.errors import UserError
from speculators.training.options import TrainOptions

REQUIRED = {"verifier": "v", "data": "d", "hidden_states": "h", "output": "o"}


def options(**given: object) -> TrainOptions:
    return resolve(TrainOptions, REQUIRED | {"speculator_type": "eagle3"} | given)


@pytest.mark.parametrize(
    ("algorithm", "name", "value"),
    [
        ("eagle3", "block_size", 8),
        ("eagle3", "max_anchors", 256),
        ("eagle3", "mask_token_id", 0),
        ("dflash", "ttt_steps", 3),
    ],
)
def test_an_option_of_another_algorithm_is_refused_even_at_its_default(algorithm: str, name: str, value: int):
    with pytest.raises(
        UserError, match=f"--{name.replace('_', '-')} {value}: an option of .* which {algorithm} does not"
    ):
        options(speculator_type=algorithm, **{name: value}).check()


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match="unknown algorithm 'medusa'; known algorithms are eagle3, dflash"):
        options(speculator_type="medusa").check()


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_saved_run_can_be_given_as_config(tmp_path: Path, algorithm: str):
    before = options(speculator_type=algorithm, aux_layer_ids="2,4", lr=0.5)
    save_resolved(before, tmp_path / "run.yaml")
    after = resolve(TrainOptions, yaml.safe_load((tmp_path / "run.yaml").read_text()))
    after.check()
    assert after == before


def test_settings_leave_out_what_a_resumed_run_may_change():
    assert options(save_every=3, output="x", device="cpu").settings() == options().settings()
    assert options(lr=0.1).settings() != options().settings()


@pytest.mark.parametrize(
    ("given", "weights"),
    [("kl_div", (0, 1, 0)), ("ce", (1, 0, 0)), ('{"ce": 0.1, "tv": 0.9}', (0.1, 0, 0.9))],
)
def test_losses_by_name_or_weight(given: str, weights: tuple[float, ...]):
    mix = options(loss_fn=given).loss_mix()
    assert (mix["ce"], mix["kl_div"], mix["tv"]) == weights


@pytest.mark.parametrize("given", ["mse", '{"mse": 1}', "{", '{"ce": "much"}'])
def test_an_unknown_or_malformed_loss_is_refused_by_its_flag(given: str):
    with pytest.raises(UserError, match=r"^--loss-fn: "):
        options(loss_fn=given)


def test_reading_the_options_loads_no_torch():
    program = "import sys, speculators.cli.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
