"""How a CPU server is best bound to cores: one core, both, or unbound; eager or compiled; one stream and eight.

    python benchmarks/serve_cpu_binding.py MODEL --output output/serve-cpu-binding [--rounds 3]

Every round starts each configuration once, in an order that is reversed from round to round, so that a drift of the
machine meets all alike. Written: `binding.json` (every run) and `binding.md` (medians, and ratios to vLLM's default).
The trap: a compiled server takes minutes to start; a start is not part of what is measured.
"""

import argparse
import itertools
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import requests

from serve.endpoint import Endpoint
from serve.options import ServeOptions, spec_of
from serve.spec import free_port
from serve.vllm import running
from speculators.provenance import Provenance
from speculators.schema import Strict, write_json, write_text

BIND = "VLLM_CPU_OMP_THREADS_BIND"
DEFAULT = "auto"  # vLLM's own: one logical core of each physical one, less what it keeps for its other processes
STREAMS = (1, 8)
PROMPT = "Write down the numbers from one to one hundred in words, one after the other, and explain each of them."


class Configuration(NamedTuple):
    """What `VLLM_CPU_OMP_THREADS_BIND` says, and whether vLLM compiles."""

    binding: str
    compiled: bool


class Run(Strict):
    """One server, one number of streams: output tokens a second over all of them, and until the server answered."""

    binding: str
    compiled: bool
    round: int
    streams: int
    tokens_per_s: float
    ready_s: float


class Result(Strict):
    """What `binding.json` holds."""

    model: str
    tokens: int
    runs: tuple[Run, ...]
    provenance: Provenance


def configurations(cores: list[int], compiled: bool) -> list[Configuration]:
    """One core, all, unbound, and vLLM's choice; each eager, and compiled if asked for."""
    bindings = (DEFAULT, str(cores[0]), ",".join(map(str, cores)), "nobind")
    modes = (False, True) if compiled else (False,)
    return [Configuration(binding, mode) for mode in modes for binding in dict.fromkeys(bindings)]


def measure(configuration: Configuration, arguments: argparse.Namespace, number: int) -> list[Run]:
    """Start the server, warm it up, and time one and eight streams."""
    extra = ("--max-model-len", "1024") if configuration.compiled else ("--max-model-len", "1024", "--enforce-eager")
    options = ServeOptions(model=arguments.model, port=free_port(), vllm=arguments.vllm, vllm_args=extra)
    os.environ[BIND] = configuration.binding
    began = time.monotonic()
    name = f"{configuration.binding.replace(',', '-')}-{'compiled' if configuration.compiled else 'eager'}-{number}.log"
    with running(spec_of(options), arguments.output / "logs" / name, timeout_s=1200) as endpoint:
        ready_s = time.monotonic() - began
        _tokens_per_s(endpoint, max(STREAMS), min(8, arguments.tokens))
        return [
            Run(
                binding=configuration.binding,
                compiled=configuration.compiled,
                round=number,
                streams=streams,
                tokens_per_s=_tokens_per_s(endpoint, streams, arguments.tokens),
                ready_s=ready_s,
            )
            for streams in STREAMS
        ]


def _tokens_per_s(endpoint: Endpoint, streams: int, tokens: int) -> float:
    """Every stream asks for the same number of tokens; prompts differ, so that none is answered from a cache."""

    def ask(stream: int) -> int:
        body = {"model": endpoint.model, "prompt": f"{time.monotonic_ns()} {stream} {PROMPT}", "max_tokens": tokens}
        answer = requests.post(
            f"{endpoint.base_url}/v1/completions", json={**body, "temperature": 0, "ignore_eos": True}, timeout=1200
        )
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    with ThreadPoolExecutor(streams) as pool:
        began = time.monotonic()
        total = sum(pool.map(ask, range(streams)))
        return total / (time.monotonic() - began)


def table(runs: tuple[Run, ...]) -> str:
    """Markdown: medians over the rounds, lowest and highest in brackets; ratios are to the default binding, eager."""
    lines = ["| binding | mode | streams | tokens/s | ratio | ready after |", "|---|---|---|---|---|---|"]
    keys = list(dict.fromkeys((run.binding, run.compiled) for run in runs))
    for streams, (binding, compiled) in itertools.product(STREAMS, keys):
        mine = [r for r in runs if (r.binding, r.compiled, r.streams) == (binding, compiled, streams)]
        base = {
            r.round: r.tokens_per_s for r in runs if (r.binding, r.compiled, r.streams) == (DEFAULT, False, streams)
        }
        speeds = [run.tokens_per_s for run in mine]
        ratios = [run.tokens_per_s / base[run.round] for run in mine]  # within a round: what drifts, drifts for both
        spread = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        ready = f"{statistics.median(run.ready_s for run in mine):.0f} s"
        mode = "compiled" if compiled else "eager"
        lines.append(f"| `{binding}` | {mode} | {streams} | {spread} | {ratio} | {ready} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, writing down after every server what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="verifier directory, or a draft's run")
    parser.add_argument("--output", type=Path, default=Path("output/serve-cpu-binding"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each stream")
    parser.add_argument("--vllm", help="as in `speculators serve`")
    parser.add_argument("--no-compiled", dest="compiled", action="store_false", help="eager only")
    arguments = parser.parse_args()
    todo = configurations(sorted(os.sched_getaffinity(0)), arguments.compiled)
    runs: list[Run] = []
    for number in range(arguments.rounds):
        for configuration in todo if number % 2 == 0 else reversed(todo):
            print(f"round {number + 1} of {arguments.rounds}: {configuration}", flush=True)
            runs += measure(configuration, arguments, number)
            result = Result(
                model=arguments.model, tokens=arguments.tokens, runs=tuple(runs), provenance=Provenance.collect()
            )
            write_json(arguments.output / "binding.json", result)
        write_text(arguments.output / "binding.md", table(tuple(runs)))
    print(table(tuple(runs)))


if __name__ == "__main__":
    main()
