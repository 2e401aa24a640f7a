"""What a load generator adds to the latencies it reports: ours, `vllm bench serve` and guidellm against one server.

A scripted server streams at a known pace and notes when it wrote what. The error of a client is what it reports less
what the server did. Run it on a quiet machine:

    python benchmarks/client_overhead.py --streams 1 64 256 --tokenizer DIR --guidellm ENVIRONMENT
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import requests
from rich.console import Console
from rich.table import Table

from bench.load import Load
from bench.measure import measure
from bench.prompts import Prompt, user
from bench.records import RecordWriter, read_records
from bench.suite import BenchOptions, Plan
from serve.endpoint import Endpoint
from serve.program import find

ROOT = Path(__file__).parent.parent
ENTRY = ROOT / "serve" / "vllm_side" / "entry.py"


class Job(NamedTuple):
    """One measurement: so many streams at a time, so many answers of so many tokens each."""

    url: str
    streams: int
    num_requests: int
    num_tokens: int
    scratch: Path
    tokenizer: str | None
    guidellm: str | None


class Latency(NamedTuple):
    """Milliseconds."""

    median: float
    p99: float

    @classmethod
    def of(cls, seconds: Any) -> "Latency":
        median, p99 = np.quantile(np.asarray(seconds, dtype=float), [0.5, 0.99]) * 1000
        return cls(float(median), float(p99))


class Reported(NamedTuple):
    """What a client says, or what the server did."""

    ttft: Latency
    tpot: Latency


def ours(job: Job) -> Reported:
    """The client of `speculators bench`, with everything that it does beside: records, lag, counters."""
    options = BenchOptions(compare=("x",), output=job.scratch, max_tokens=job.num_tokens)
    prompts = [Prompt(str(i), (user(f"{i}: say something"),)) for i in range(job.num_requests)]
    plan = Plan((), {"scripted": prompts}, None, (Load(concurrency=job.streams),))  # type: ignore[arg-type]
    with RecordWriter(job.scratch) as writer:
        endpoint = Endpoint(job.url, "scripted")
        (point,) = measure(endpoint, "x", plan, options, {}, writer, Console(quiet=True))
    lag = 1000 * (point.client_lag_mean_s or 0)
    print(f"  our client's own lag: {lag:.2f} ms on average; refused: {point.refused or 'no'}", file=sys.stderr)
    lines = (job.scratch / "requests.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[: job.num_requests]]  # a refused point's rows come again without times
    assert len(read_records(job.scratch)) == len(rows) == job.num_requests
    return Reported(Latency.of([row["ttft_s"] for row in rows]), Latency.of([row["tpot_s"] for row in rows]))


def vllm_bench_serve(job: Job) -> Reported:
    """`vllm bench serve` of the vLLM that `speculators serve` would start."""
    assert job.tokenizer
    data = job.scratch / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}: say something"}) + "\n" for i in range(job.num_requests)))
    options = {
        "--backend": "openai-chat",
        "--base-url": job.url,
        "--endpoint": "/v1/chat/completions",
        "--model": job.tokenizer,
        "--served-model-name": "scripted",
        "--dataset-name": "custom",
        "--dataset-path": str(data),
        "--custom-output-len": str(job.num_tokens),
        "--num-prompts": str(job.num_requests),
        "--max-concurrency": str(job.streams),
        "--metric-percentiles": "99",
        "--percentile-metrics": "ttft,tpot",
        "--result-dir": str(job.scratch),
        "--result-filename": "vllm.json",
        "--ready-check-timeout-sec": "0",
    }
    arguments = [part for pair in options.items() for part in pair]
    _run([find().python, str(ENTRY), "bench", "serve", *arguments, "--save-result", "--disable-tqdm", "--ignore-eos"])
    said = json.loads((job.scratch / "vllm.json").read_text())
    ttft = Latency(said["median_ttft_ms"], said["p99_ttft_ms"])
    return Reported(ttft, Latency(said["median_tpot_ms"], said["p99_tpot_ms"]))


def guidellm(job: Job) -> Reported:
    """guidellm (0.8), from an environment of its own."""
    assert job.guidellm
    assert job.tokenizer
    file = job.scratch / "guidellm.json"
    options = {
        "--backend": f"kind=openai_http,target={job.url},model=scripted",
        "--profile": f"kind=concurrent,streams={job.streams}",
        "--constraint": f"kind=max_requests,count={job.num_requests}",
        "--tokenizer": f"kind=hf_auto,model={job.tokenizer}",
        "--data": f"kind=synthetic_text,prompt_tokens=8,output_tokens={job.num_tokens}",
        "--output": f"kind=json,path={file}",
    }
    arguments = [part for pair in options.items() for part in pair]
    _run([f"{job.guidellm}/bin/guidellm", "run", *arguments, "--disable-console"])
    metrics = json.loads(file.read_text())["benchmarks"][0]["metrics"]
    ttft = metrics["time_to_first_token_ms"]["successful"]
    tpot = metrics["inter_token_latency_ms"]["successful"]
    return Reported(*(Latency(m["median"], m["percentiles"]["p99"]) for m in (ttft, tpot)))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ...: {(done.stderr or done.stdout)[-1500:]}")


@contextmanager
def scripted_server(ttft_s: float, tpot_s: float) -> Iterator[str]:
    """In a process of its own, so that it competes with the client for cores only."""
    script = Path(__file__).parent / "scripted_stream.py"
    command = [sys.executable, str(script), "--ttft-s", str(ttft_s), "--tpot-s", str(tpot_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()


def truth(url: str, num_tokens: int) -> Reported:
    """What the server did since it was last asked; answers of another length were warm-ups."""
    told = [entry for entry in requests.get(f"{url}/truth", timeout=30).json() if entry[0] == num_tokens]
    return Reported(Latency.of([entry[1] for entry in told]), Latency.of([entry[2] for entry in told]))


def main() -> None:
    """Measure every client at every number of streams and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--requests-per-stream", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--ttft-s", type=float, default=0.2)
    parser.add_argument("--tpot-s", type=float, default=0.04)
    parser.add_argument("--tokenizer", help="a model directory; without it only our client is measured")
    parser.add_argument("--guidellm", help="environment with guidellm (python -m venv E; E/bin/pip install guidellm)")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    given = parser.parse_args()
    clients: dict[str, Callable[[Job], Reported]] = {"speculators bench": ours}
    if given.tokenizer:
        clients["vllm bench serve"] = vllm_bench_serve
        if given.guidellm:
            clients["guidellm"] = guidellm
    table = Table("client", "streams", "TTFT error, ms: median", "p99", "TPOT error, ms: median", "p99")
    rows = []
    for streams in given.streams:
        for name, client in clients.items():
            with scripted_server(given.ttft_s, given.tpot_s) as url, tempfile.TemporaryDirectory() as scratch:
                count = streams * given.requests_per_stream
                job = Job(url, streams, count, given.tokens, Path(scratch), given.tokenizer, given.guidellm)
                said, did = client(job), truth(url, given.tokens)
            errors = [a - b for a, b in zip((*said.ttft, *said.tpot), (*did.ttft, *did.tpot), strict=True)]
            rows.append({"client": name, "streams": streams, "said": said, "did": did})
            table.add_row(name, str(streams), *(f"{error:+.3f}" for error in errors))
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
