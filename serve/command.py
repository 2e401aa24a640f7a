"""vLLM's argument vector and environment, put together: `ServeSpec` is a server that can be started.

A flag of the user's that repeats one of ours replaces it, in any of vLLM's spellings. Nothing passes through a shell.
"""

import json
import os
import socket
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Self, TypedDict

from serve.program import VllmProgram, find
from speculators.errors import UserError
from speculators.schema import Strict

LOOPBACK = "127.0.0.1"
ENTRY = Path(__file__).parent / "vllm_side" / "entry.py"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
# Up to here all cores compute: on two that was 1.1 times as fast for one stream, 1.4 times for 64 (docs/serving.md).
_FEW_CORES = 2
_GIB = 1 << 30
_SHORT = {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "-dp": "data-parallel-size"}
_SHORT |= {"-sc": "speculative-config"}


class ServeSpec(Strict):
    """A vLLM server that can be started.

    Attributes:
        command: the whole argument vector, interpreter first.
        environment: variables to add to the caller's environment.
        host, port: where it listens.
        model: what the server is asked to serve (a path or a hub id).
        verifier, draft, algorithm: what that means; draft and algorithm are None without speculation.
        num_speculative_tokens: K, or None without speculation or when only vLLM knows it (a hub id).
        is_cpu, vllm_version: of the vLLM in `command`.
        notes: sentences for the user to read before the start.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    host: str
    port: int
    model: str
    verifier: str | None
    draft: str | None = None
    algorithm: str | None = None
    num_speculative_tokens: int | None = None
    is_cpu: bool = False
    vllm_version: str
    notes: tuple[str, ...] = ()

    @property
    def base_url(self) -> str:
        """Root of the HTTP server, without `/v1`."""
        host = LOOPBACK if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def flags(self) -> dict[str, str]:
        """Canonical name -> value of every flag in the command."""
        return given_flags(self.command)

    def summary(self) -> list[tuple[str, str]]:
        """Label and value of each line that `speculators serve` shows."""
        lines = [("verifier", self.verifier or f"as {self.model} says"), ("draft", self.draft or "none")]
        if self.algorithm:
            tokens = "as the draft says" if self.num_speculative_tokens is None else str(self.num_speculative_tokens)
            lines += [("algorithm", self.algorithm), ("speculative tokens", tokens)]
        context = self.flags.get("max-model-len")
        lines += [
            ("context", f"{context} tokens" if context else "as the model says"),
            ("parallelism", self._parallel()),
        ]
        return [*lines, ("endpoint", f"{self.base_url}/v1"), ("vLLM", self.vllm_version)]

    def _parallel(self) -> str:
        kinds = ("tensor", "pipeline", "data")
        used = [f"{kind} {size}" for kind in kinds if (size := self.flags.get(f"{kind}-parallel-size", "1")) != "1"]
        return ", ".join(used) or "one device"


class ServerOptions(TypedDict, total=False):
    """What every kind of server takes; what is left out has its default.

    Attributes:
        port: None picks a free one.
        host: 127.0.0.1 by default.
        extra_args: passed to vLLM untouched, after ours; they win over ours.
        tensor_parallel_size: devices; None leaves it to vLLM.
        vllm: environment, interpreter or executable; None searches (`serve.program.find`).
    """

    port: int | None
    host: str
    extra_args: tuple[str, ...]
    tensor_parallel_size: int | None
    vllm: str | None


class Common(NamedTuple):
    """`ServerOptions` with the defaults filled in and vLLM found."""

    port: int | None
    host: str
    extra_args: tuple[str, ...]
    tensor_parallel_size: int | None
    program: VllmProgram

    @classmethod
    def of(cls, options: ServerOptions) -> Self:
        """Raises UserError when there is no vLLM."""
        return cls(
            port=options.get("port"),
            host=options.get("host", LOOPBACK),
            extra_args=options.get("extra_args", ()),
            tensor_parallel_size=options.get("tensor_parallel_size"),
            program=find(options.get("vllm")),
        )

    @property
    def is_pipelined(self) -> bool:
        """Whether the user's flags ask for pipeline parallelism."""
        return given_flags(self.extra_args).get("pipeline-parallel-size", "1") not in ("", "1")

    @property
    def given_speculative_tokens(self) -> int | None:
        """K as the user's own `--speculative-config` says it, if it does."""
        given = given_flags(self.extra_args)
        try:
            value = json.loads(given.get("speculative-config", "{}"))["num_speculative_tokens"]
        except (ValueError, KeyError, TypeError):
            value = given.get("speculative-config.num-speculative-tokens")
        return int(value) if str(value).lstrip("-").isdigit() else None


def assemble(
    common: Common, model: str, flags: dict[str, str | None], notes: tuple[str, ...] = (), **facts: Any
) -> ServeSpec:
    """The server for `model` with our own `flags` (None: a switch), less those that the user gives too.

    Raises:
        UserError: a flag that vLLM refuses on a server of this kind, or that would replace what makes it one.
    """
    given = given_flags(common.extra_args)
    if "per-request-spec-decode-metrics" in given and not (
        facts.get("algorithm") or "speculative-config" in given or "--speculative-config" in flags
    ):
        raise UserError(
            f"--per-request-spec-decode-metrics: {model} is served without speculation, where vLLM refuses this "
            "option; leave it out, or serve a draft."
        )
    _check_own_configs(flags, given)
    host = given.get("host") or common.host
    port = _port(given.get("port")) or common.port or free_port(host)
    ours: dict[str, str | None] = {"--host": host, "--port": str(port), **flags}
    if common.tensor_parallel_size:
        ours["--tensor-parallel-size"] = str(common.tensor_parallel_size)
    command = [common.program.python, str(ENTRY), "serve", model]
    for flag, value in ours.items():
        if _canonical(flag) not in given:
            command += [flag] if value is None else [flag, value]
    alone = (common.tensor_parallel_size or 1) == 1 and not any(name.endswith("-parallel-size") for name in given)
    local = all(Path(name).exists() for name in (facts["verifier"], facts.get("draft")) if name)
    added = _environment(common.program, local, alone)
    return ServeSpec(
        command=(*command, *common.extra_args),
        environment={k: v for k, v in added.items() if k not in os.environ},
        host=host,
        port=port,
        model=model,
        is_cpu=common.program.is_cpu,
        vllm_version=common.program.version + (" (CPU)" if common.program.is_cpu else ""),
        notes=(*notes, *_reminders(host, given)),
        **facts,
    )


def _check_own_configs(flags: dict[str, str | None], given: dict[str, str]) -> None:
    """A JSON flag of ours says what is served; the user's, or one of its keys (`--flag.key`), would replace it."""
    for flag, value in flags.items():
        theirs = [name for name in given if name.partition(".")[0] == _canonical(flag)]
        if theirs and value and value.startswith("{"):
            raise UserError(
                f"--{theirs[0]}: this server needs {flag} for itself ({value}), and yours would replace it; leave "
                "yours out, or serve the verifier with all of it in yours."
            )


def free_port(host: str = LOOPBACK) -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def given_flags(arguments: tuple[str, ...]) -> dict[str, str]:
    """Canonical name -> value ("" if none) of every flag: `--a_b=c`, `--a-b c` and `-tp 2` are all read."""
    given = {}
    for arg, following in zip_longest(arguments, arguments[1:], fillvalue="-"):
        if arg.startswith("-"):
            _, equals, value = arg.partition("=")
            given[_canonical(arg)] = value if equals else "" if following.startswith("-") else following
    return given


def _canonical(flag: str) -> str:
    name = flag.partition("=")[0]
    return _SHORT.get(name) or name.lstrip("-").replace("_", "-").removeprefix("no-")


def _port(given: str | None) -> int | None:
    if given and not given.isdigit():
        raise UserError(f"--port: {given!r} is not a port; give a number from 1 to 65535.")
    return int(given) if given else None


def _reminders(host: str, given: dict[str, str]) -> tuple[str, ...]:
    """A server that other machines can reach answers whoever asks, unless it wants a key."""
    if host.startswith("127.") or host in ("localhost", "::1") or "api-key" in given or "VLLM_API_KEY" in os.environ:
        return ()
    return (f"--host {host} lets other machines in and nobody is asked for a key; add --api-key KEY to ask for one.",)


def _environment(program: VllmProgram, local: bool, alone: bool) -> dict[str, str]:
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if local:  # local models need no network; without this a machine without one waits for timeouts
        environment["HF_HUB_OFFLINE"] = "1"
    if program.is_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        environment[KV_SPACE] = str(min(16, max(1, memory // (5 * _GIB))))  # GiB, all of it is touched
        cores = sorted(os.sched_getaffinity(0))
        if alone and len(cores) <= _FEW_CORES:  # vLLM would keep one or two of them for its server
            environment[THREADS_BIND] = ",".join(map(str, cores))
    return environment
