"""How much of the machine others used while something was measured. A variant measured on a busy machine looks slow."""

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class LoadMeter:
    """Counts processor time from its creation on: all of it on our cores, less that of this process and its children.

    Only Linux tells; elsewhere the answer is None. A child that ends in between counts as other load.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._busy, self._own = _busy_s(), _own_s()

    def other_cores(self) -> float | None:
        """Cores that other programs kept busy since then, on average."""
        busy, elapsed = _busy_s(), time.perf_counter() - self._started
        if busy is None or self._busy is None or elapsed <= 0:
            return None
        return max(0.0, (busy - self._busy - (_own_s() - self._own)) / elapsed)


def _busy_s() -> float | None:
    """Seconds that the cores we may use were busy since boot (user, nice, system, irq, softirq)."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    rows = [fields for line in lines if (fields := line.split()) and fields[0] in cores]
    return sum(sum(int(fields[i]) for i in (1, 2, 3, 6, 7)) for fields in rows) / _TICKS_PER_S


def _own_s() -> float:
    """Processor seconds of this process and everything it started."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        pid = int(stat.parent.name)
        parents[pid], used[pid] = int(after_name[1]), int(after_name[11]) + int(after_name[12])
    return sum(ticks for pid, ticks in used.items() if _is_ours(pid, parents)) / _TICKS_PER_S


def _is_ours(pid: int, parents: dict[int, int]) -> bool:
    us = os.getpid()
    while pid not in (0, us):
        pid = parents.get(pid, 0)
    return pid == us
