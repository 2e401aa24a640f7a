"""What to start: a draft, a plain verifier, or an extraction server becomes vLLM's command line and environment.

Nothing is started here. A flag of the user's that repeats one of ours replaces it, in any of vLLM's spellings.
"""

import json
import os
import socket
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from serve.fit import check_fits, check_model, check_tokens
from serve.program import VllmProgram, find
from speculators import checkpoint
from speculators.data.extract_options import check_layer_ids
from speculators.schema import Strict
from speculators.verifier import Verifier

ENTRY = Path(__file__).parent / "vllm_side" / "entry.py"
MINIMUM = {"dflash": (0, 20), "eagle3": (0, 18)}
MINIMUM_FOR_EXTRACTION = (0, 18)
_CPU_CONNECTOR = ("CpuHiddenStatesConnector", "cpu_connector")
_GIB = 1 << 30


class ServeSpec(Strict):
    """A vLLM server that can be started.

    Attributes:
        command: the whole argument vector, interpreter first.
        environment: variables to add to the caller's environment.
        host, port: where it listens.
        model: what the server is asked to serve (a path or a hub id).
        verifier, draft, algorithm: what that means; draft and algorithm are None without speculation.
        num_speculative_tokens: K, or None without speculation or when only vLLM knows it (a hub id).
        vllm_version: of the vLLM in `command`.
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
    vllm_version: str

    @property
    def base_url(self) -> str:
        """Root of the HTTP server, without `/v1`."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def summary(self) -> list[tuple[str, str]]:
        """Label and value of each line that `speculators serve` shows."""
        lines = [("verifier", self.verifier or f"as {self.model} says"), ("draft", self.draft or "none")]
        if self.algorithm:
            lines += [("algorithm", self.algorithm), ("speculative tokens", str(self.num_speculative_tokens))]
        return [*lines, ("endpoint", f"{self.base_url}/v1"), ("vLLM", self.vllm_version)]


class _Common(NamedTuple):
    """What every builder takes."""

    port: int | None
    host: str
    extra_args: tuple[str, ...]
    tensor_parallel_size: int | None
    program: VllmProgram


def plain_spec(
    verifier: str | Path,
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    extra_args: tuple[str, ...] = (),
    tensor_parallel_size: int | None = None,
    vllm: str | None = None,
) -> ServeSpec:
    """The verifier alone.

    Args:
        verifier: model directory, or a hub id that vLLM resolves.
        port: None picks a free one.
        extra_args: passed to vLLM untouched, after ours; they win over ours.
        tensor_parallel_size: devices; None leaves it to vLLM.
        vllm: environment, interpreter or executable; None searches (`serve.program.find`).

    Raises:
        UserError: no such directory, or no vLLM.
    """
    check_model(verifier)
    common = _Common(port, host, extra_args, tensor_parallel_size, find(vllm))
    return _spec(common, str(verifier), {}, verifier=str(verifier))


def draft_spec(
    draft: str | Path,
    *,
    verifier: str | Path | None = None,
    num_speculative_tokens: int | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
    extra_args: tuple[str, ...] = (),
    tensor_parallel_size: int | None = None,
    vllm: str | None = None,
) -> ServeSpec:
    """A draft with its verifier, or with another verifier of the same shape (an FP8 copy).

    Args:
        draft: checkpoint directory, or run directory (its best checkpoint).
        verifier: None means the one in the draft's config.
        num_speculative_tokens: None means as many as it was trained for.
        port, host, extra_args, tensor_parallel_size, vllm: as in `plain_spec`.

    Raises:
        UserError: nothing to serve there, tensors that don't fit the config, a verifier that doesn't fit the draft,
            more speculative tokens than the draft has, no vLLM or one that is too old.
    """
    directory = checkpoint.resolve(Path(draft))
    config = checkpoint.read_config(directory)
    checkpoint.check_tensors(directory, config)
    check_fits(directory, config, str(verifier or config.verifier))
    tokens = check_tokens(directory, config, num_speculative_tokens)
    program = find(vllm)
    program.check_at_least(MINIMUM[config.algorithm], f"{config.algorithm} drafts")
    common = _Common(port, host, extra_args, tensor_parallel_size, program)
    facts: dict[str, Any] = {"draft": str(directory), "algorithm": config.algorithm, "num_speculative_tokens": tokens}
    if tokens == config.num_speculative_tokens and (
        verifier is None or Path(verifier).resolve() == Path(config.verifier).resolve()
    ):
        return _spec(common, str(directory), {}, verifier=config.verifier, **facts)
    speculation = {"model": str(directory), "method": config.algorithm, "num_speculative_tokens": tokens}
    served = str(verifier or config.verifier)
    return _spec(common, served, {"--speculative-config": json.dumps(speculation)}, verifier=served, **facts)


def extraction_spec(
    verifier: str | Path,
    aux_layer_ids: tuple[int, ...],
    storage_path: Path,
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    extra_args: tuple[str, ...] = (),
    tensor_parallel_size: int | None = None,
    vllm: str | None = None,
) -> ServeSpec:
    """A server whose answers name a file with the hidden states of the prompt.

    Args:
        verifier: model directory.
        aux_layer_ids: the streams entering these layers, ascending; the last residual stream is always added.
        storage_path: where vLLM writes the files.
        port, host, extra_args, tensor_parallel_size, vllm: as in `plain_spec`.

    Raises:
        UserError: layers that the verifier does not have, no such directory, no vLLM or one that is too old.
    """
    facts = Verifier.read(verifier)
    check_layer_ids(aux_layer_ids, facts)
    program = find(vllm)
    program.check_at_least(MINIMUM_FOR_EXTRACTION, "hidden-state extraction")
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*aux_layer_ids, facts.num_layers]}},
    }
    transfer: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(storage_path)},
    }
    if program.is_cpu:  # vLLM's own connector wants pinned memory and CUDA streams; ours lies beside the entry file
        transfer["kv_connector"], transfer["kv_connector_module_path"] = _CPU_CONNECTOR
    flags = {
        "--speculative-config": json.dumps(speculation),
        "--kv-transfer-config": json.dumps(transfer),
        "--no-enable-prefix-caching": None,
    }
    common = _Common(port, host, extra_args, tensor_parallel_size, program)
    return _spec(common, str(verifier), flags, verifier=str(verifier))


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def _spec(common: _Common, model: str, flags: dict[str, str | None], **facts: Any) -> ServeSpec:
    given = _given_flags(common.extra_args)
    host = given.get("host") or common.host
    port = int(given.get("port") or common.port or free_port(host))
    ours: dict[str, str | None] = {"--host": host, "--port": str(port), **flags}
    if common.tensor_parallel_size:
        ours["--tensor-parallel-size"] = str(common.tensor_parallel_size)
    command = [common.program.python, str(ENTRY), "serve", model]
    for flag, value in ours.items():
        if _canonical(flag) not in given:
            command += [flag] if value is None else [flag, value]
    added = _environment(common.program, local=Path(facts["verifier"]).exists())
    return ServeSpec(
        command=(*command, *common.extra_args),
        environment={k: v for k, v in added.items() if k not in os.environ},
        host=host,
        port=port,
        model=model,
        vllm_version=common.program.version + (" (CPU)" if common.program.is_cpu else ""),
        **facts,
    )


_SHORT = {"-tp": "tensor-parallel-size", "-sc": "speculative-config"}


def _canonical(flag: str) -> str:
    name = flag.partition("=")[0]
    return _SHORT.get(name) or name.lstrip("-").replace("_", "-").removeprefix("no-")


def _given_flags(extra_args: tuple[str, ...]) -> dict[str, str]:
    """Canonical name -> value ("" if none) of every flag: `--a_b=c`, `--a-b c` and `-tp 2` are all read."""
    given = {}
    for arg, following in zip_longest(extra_args, extra_args[1:], fillvalue="-"):
        if arg.startswith("-"):
            _, equals, value = arg.partition("=")
            given[_canonical(arg)] = value if equals else "" if following.startswith("-") else following
    return given


def _environment(program: VllmProgram, local: bool) -> dict[str, str]:
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if local:  # a local model needs no network; without this a machine without one waits for timeouts
        environment["HF_HUB_OFFLINE"] = "1"
    if program.is_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(min(16, max(1, memory // (5 * _GIB))))  # GiB, all of it is touched
    return environment
