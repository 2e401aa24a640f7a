"""A checkpoint is whole or not there, and says at once when it could not be served."""

import pytest
import torch
from tiny import tiny_draft, tiny_verifier

from speculators import checkpoint
from speculators.errors import UserError
from speculators.schema import write_json


@pytest.fixture(params=["eagle3", "dflash"])
def draft(request, tmp_path):
    return tiny_draft(tiny_verifier(tmp_path / "v"), request.param)


def write(draft, path):
    checkpoint.write(path, draft.config.to_json(), draft.checkpoint_tensors())
    return path


def test_config_and_tensors_come_back_as_they_were_written(draft, tmp_path):
    path = write(draft, tmp_path / "d")
    config = checkpoint.read_config(path)
    assert config == draft.config
    checkpoint.check_tensors(path, config)
    for name, tensor in checkpoint.read_tensors(path).items():
        wanted = draft.checkpoint_tensors()[name]
        assert torch.equal(tensor, wanted.bfloat16() if wanted.is_floating_point() else wanted), name


def test_the_vocabulary_maps_on_disk_are_the_ones_vllm_reads(draft, tmp_path):
    tensors = checkpoint.read_tensors(write(draft, tmp_path / "d"))
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])
    assert torch.equal(ids, draft.draft_token_ids)
    assert tensors["t2d"].dtype == torch.bool


def test_loading_a_checkpoint_gives_the_same_draft(draft, tmp_path):
    tensors = checkpoint.read_tensors(write(draft, tmp_path / "d"))
    before = {name: p.detach().clone() for name, p in draft.module.named_parameters()}
    with torch.no_grad():
        for parameter in draft.module.parameters():
            parameter.add_(1)
    draft.load_tensors(tensors)
    for name, parameter in draft.module.named_parameters():
        assert torch.equal(parameter, before[name].bfloat16().float()), name


def test_a_failing_save_leaves_nothing_behind(draft, tmp_path):
    def fail(_):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoint.write(tmp_path / "run" / "d", draft.config.to_json(), draft.checkpoint_tensors(), fail)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_run_directory_means_its_best_checkpoint(draft, tmp_path):
    for step in (1, 2):
        write(draft, tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    assert checkpoint.resolve(tmp_path / "run").name == "step-00000002"
    best = checkpoint.Best(checkpoint="step-00000001", step=1, acceptance_length=2.0)
    write_json(tmp_path / "run" / "best.json", best)
    assert checkpoint.resolve(tmp_path / "run").name == "step-00000001"
    assert checkpoint.resolve(tmp_path / "run" / "checkpoints" / "step-00000002").name == "step-00000002"


def test_a_missing_key_and_a_wrong_shape_are_named(draft, tmp_path):
    path = write(draft, tmp_path / "d")
    config = draft.config.to_json()
    del config["transformer_layer_config"]["hidden_size"]
    write_json(path / "config.json", config)
    with pytest.raises(UserError, match=r"hidden_size.*vLLM would not load it"):
        checkpoint.read_config(path)
    wider = draft.config.model_copy(update={"intermediate_size": 48})
    with pytest.raises(UserError, match=r"gate_proj.weight has shape \[32, 16\], config.json asks for \[48, 16\]"):
        checkpoint.check_tensors(path, wider)


@pytest.mark.parametrize("cut", [0, 5, 40, 1000])
def test_truncated_weights_are_refused_from_the_header_alone(draft, tmp_path, cut):
    path = write(draft, tmp_path / "d")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(UserError, match="corrupt or truncated"):
        checkpoint.check_tensors(path, draft.config)
