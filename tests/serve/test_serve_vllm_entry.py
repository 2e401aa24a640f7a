"""What the entry into vLLM adds: drafted positions get their temperature, and a killed server leaves nothing."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from serve.vllm_side import entry
from serve.vllm_side.entry import end_group, expand, group_members, mend_cpu_sampling

STUBBORN = """
import signal, sys, time
from multiprocessing.shared_memory import SharedMemory

signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_value_is_written_once_for_each_drafted_token(dtype):
    values = torch.tensor([3, 0, 7, 5], dtype=dtype)
    drafted = [2, 3, 0, 1]
    output = torch.full((6,), -1, dtype=dtype)
    expand(output, values, torch.tensor(drafted).cumsum(0).to(torch.int32), 0, 1, MAX_NUM_TOKENS=8)
    assert output.tolist() == [3, 3, 1, 1, 1, 5]


def test_temperatures_keep_their_fraction_and_greedy_requests_divide_by_one():
    output = torch.full((3,), 9e9)
    expand(output, torch.tensor([0.7, -1.0]), torch.tensor([1, 3], dtype=torch.int32), -1, 1)
    assert output.tolist() == pytest.approx([0.7, 1.0, 1.0])


def test_without_the_cpu_build_nothing_is_touched(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm.utils", None)  # an import would raise
    mend_cpu_sampling()


def test_a_kernel_that_writes_to_a_copy_is_replaced_and_another_kept(monkeypatch, tmp_path):
    (tmp_path / "vllm" / "utils").mkdir(parents=True)
    for package in ("vllm", "vllm/utils"):
        (tmp_path / package / "__init__.py").touch()
    module = tmp_path / "vllm" / "utils" / "cpu_triton_utils.py"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.32.0+cpu")
    monkeypatch.syspath_prepend(str(tmp_path))
    for body, replaced in (("_ensure_int64(output)", True), ("output.fill_(0)", False)):
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        module.write_text(f"def _expand_kernel_impl(output):\n    {body}  # {len(body)}\n")
        mend_cpu_sampling()
        from vllm.utils import cpu_triton_utils

        assert (cpu_triton_utils._expand_kernel_impl is expand) == replaced


def test_a_group_that_had_to_be_killed_leaves_no_shared_memory(monkeypatch):
    for name in ("ASKED_S", "ORPHANED_S"):
        monkeypatch.setattr(entry, name, 0.1)
    command = [sys.executable, "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout
        segment = Path("/dev/shm", process.stdout.readline().strip())
        assert segment.exists()
        end_group(process.pid)
        assert process.wait(timeout=30) == -signal.SIGKILL
    assert entry._wait_until(lambda: not group_members(process.pid), 10)  # killed ones take a moment to go
    assert not segment.exists()
