import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_verifier

from serve.fp8 import dequantize_blocks, quantize_blocks
from serve.quantize import QuantizeOptions, quantize_fp8
from speculators.errors import UserError
from speculators.schema import read_json_dict


def slow_quantize(weight, block):
    """Every block by itself: divide by its largest magnitude over 448, round to float8."""
    N, K = weight.shape
    restored = torch.empty(N, K)
    for row in range(0, N, block[0]):
        for column in range(0, K, block[1]):
            part = weight[row : row + block[0], column : column + block[1]]
            scale = part.abs().max() / 448.0 if part.any() else torch.tensor(1.0)
            restored[row : row + block[0], column : column + block[1]] = (part / scale).to(
                torch.float8_e4m3fn
            ).float() * scale
    return restored


@pytest.mark.parametrize(("shape", "block"), [((64, 128), (64, 128)), ((128, 200), (64, 128)), ((70, 33), (16, 8))])
def test_blocks_equal_the_slow_loop_also_where_they_are_cut_off(shape, block):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.1
    weight[:8] = 0
    quantised, scales = quantize_blocks(weight, block)
    assert quantised.dtype == torch.float8_e4m3fn
    assert scales.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    restored = dequantize_blocks(quantised, scales, block)
    assert torch.isfinite(restored).all()
    torch.testing.assert_close(restored, slow_quantize(weight, block), rtol=1e-6, atol=1e-9)


def test_a_copy_differs_only_in_its_projections_and_says_by_how_much(tmp_path):
    verifier = write_tiny_verifier(tmp_path / "verifier")
    made = quantize_fp8(verifier, tmp_path / "fp8", (32, 64))
    before, after = load_file(verifier / "model.safetensors"), load_file(tmp_path / "fp8" / "model.safetensors")
    projections = {name for name in before if name.endswith("_proj.weight")}
    assert set(after) == set(before) | {f"{name}_scale_inv" for name in projections}
    for name, tensor in before.items():
        if name in projections:
            restored = dequantize_blocks(after[name], after[f"{name}_scale_inv"], (32, 64))
            assert (restored - tensor.float()).norm() / tensor.float().norm() < 0.04
        else:
            assert torch.equal(after[name], tensor)
    assert set(made.relative_error) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(0.01 < error < 0.04 for error in made.relative_error.values())
    config = read_json_dict(tmp_path / "fp8" / "config.json", "config")
    assert config["quantization_config"]["weight_block_size"] == [32, 64]
    assert (tmp_path / "fp8" / "tokenizer.json").exists()


def test_shards_are_written_with_a_new_index(tmp_path):
    verifier = write_tiny_verifier(tmp_path / "verifier")
    tensors = load_file(verifier / "model.safetensors")
    (verifier / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[:20], names[20:])):
        save_file({name: tensors[name] for name in part}, verifier / f"model-{i}.safetensors")
    quantize_fp8(verifier, tmp_path / "fp8", (32, 64))
    index = read_json_dict(tmp_path / "fp8" / "model.safetensors.index.json", "index")["weight_map"]
    seen = {
        name: f"model-{i}.safetensors"
        for i in (0, 1)
        for name in load_file(tmp_path / "fp8" / f"model-{i}.safetensors")
    }
    assert index == seen
    assert any(name.endswith("_scale_inv") for name in index)


def test_doing_it_again_changes_nothing_and_another_copy_is_not_overwritten(tmp_path):
    verifier = write_tiny_verifier(tmp_path / "verifier")
    made = quantize_fp8(verifier, tmp_path / "fp8", (32, 64))
    stamp = (tmp_path / "fp8" / "model.safetensors").stat().st_mtime_ns
    assert quantize_fp8(verifier, tmp_path / "fp8", (32, 64)) == made
    assert (tmp_path / "fp8" / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="holds something else"):
        quantize_fp8(verifier, tmp_path / "fp8", (16, 64))
    with pytest.raises(UserError, match="quantised already"):
        quantize_fp8(tmp_path / "fp8", tmp_path / "again", (32, 64))


def test_rows_that_the_block_does_not_divide_are_refused_and_nothing_is_left(tmp_path):
    verifier = write_tiny_verifier(tmp_path / "verifier")
    with pytest.raises(UserError, match=r"k_proj.weight has 32 rows, which don't divide by 64"):
        quantize_fp8(verifier, tmp_path / "fp8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["verifier"]


def test_by_channels_each_row_has_its_scale_and_what_is_kept_is_named(tmp_path):
    verifier = write_tiny_verifier(tmp_path / "verifier")
    tensors = load_file(verifier / "model.safetensors")
    save_file({**tensors, "model.layers.0.mlp.gate.weight": torch.ones(4, 64)}, verifier / "model.safetensors")
    made = quantize_fp8(verifier, tmp_path / "fp8", None)
    assert made.block is None
    after = load_file(tmp_path / "fp8" / "model.safetensors")
    for name in (name for name in tensors if name.endswith("_proj.weight")):
        scales = after[f"{name}_scale"]
        assert scales.shape == (tensors[name].shape[0], 1)
        torch.testing.assert_close(scales, tensors[name].float().abs().amax(dim=1, keepdim=True) / 448)
        error = after[name].float() * scales - tensors[name].float()
        assert error.norm() < 0.04 * tensors[name].float().norm()
    config = read_json_dict(tmp_path / "fp8" / "config.json", "config")["quantization_config"]
    assert config["ignore"] == ["lm_head", "model.layers.0.mlp.gate"]
    quantize_fp8(verifier, tmp_path / "blocks", (32, 64))
    config = read_json_dict(tmp_path / "blocks" / "config.json", "config")["quantization_config"]
    assert config["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.gate"]


def test_what_says_how_to_read_channels_is_what_its_own_library_reads(tmp_path):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    quantize_fp8(write_tiny_verifier(tmp_path / "verifier"), tmp_path / "fp8", None)
    written = read_json_dict(tmp_path / "fp8" / "config.json", "config")["quantization_config"]
    read = quantization.QuantizationConfig.model_validate(written)
    (group,) = read.config_groups.values()
    assert (group.weights.strategy, group.weights.dynamic) == ("channel", False)
    assert (group.input_activations.strategy, group.input_activations.dynamic) == ("token", True)


def test_experts_in_one_tensor_and_models_without_projections_are_refused(tmp_path):
    verifier = write_tiny_verifier(tmp_path / "verifier")
    tensors = load_file(verifier / "model.safetensors")
    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 8, 8)}
    save_file({**tensors, **fused}, verifier / "model.safetensors")
    with pytest.raises(UserError, match="holds all experts of a layer in one tensor"):
        quantize_fp8(verifier, tmp_path / "fp8", None)
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, verifier / "model.safetensors")
    with pytest.raises(UserError, match="has no projections to quantise"):
        quantize_fp8(verifier, tmp_path / "fp8", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["verifier"]


def test_a_block_is_two_numbers_and_only_for_blocks(tmp_path):
    given = {"verifier": "v", "output": tmp_path}
    assert QuantizeOptions(**given).scaled_together() == (64, 128)
    assert QuantizeOptions(**given, scheme="channel").scaled_together() is None
    for options in ({"block": (64,)}, {"block": (0, 128)}, {"block": (64, 128), "scheme": "channel"}):
        with pytest.raises(UserError, match="--block: "):
            QuantizeOptions(**given, **options).scaled_together()
