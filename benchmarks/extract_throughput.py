"""Tokens/s of `speculators extract` against the same vLLM asked by a bare loop, on the same samples, in turn.

    python benchmarks/extract_throughput.py --verifier output/verifier --data output/data --online

By option also against upstream's `generate-offline-data`, and `--online`: how long a trainer waits for states that come
from that server, and whether its memory stays flat over an epoch. The server is one for all: started here as
`speculators extract` does it, or named with `--endpoint`. It shares the machine's cores with whoever asks it.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
from drivers import deliver, run_script
from extraction_result import ExtractionResult, ExtractionRun, TrainingRun, compare, verdict
from extraction_runs import Setting, ask_bare, ask_upstream, cache_of, extract, train
from pydantic import Field, model_validator
from rich.console import Console
from rich.table import Table
from upstream_environment import upstream_python

from serve.extraction import extraction_endpoints
from speculators.cli.options import schema_command
from speculators.data.extract_options import ExtractOptions
from speculators.data.samples import DataDirectory, Split, SplitStats, TokenizedSample
from speculators.errors import UserError
from speculators.provenance import Provenance
from speculators.schema import Strict
from speculators.verifier import Verifier

_WARM_UP_SAMPLES = 8


class ExtractThroughputOptions(Strict):
    """Measure extraction against a bare loop over the same server, in alternating runs."""

    verifier: str = Field(description="Directory of the verifier.")
    data: Path = Field(description="Data directory made by `speculators prepare`.")
    samples: int | None = Field(None, ge=1, description="Samples of each run, the first of the training split.")
    rounds: int = Field(3, ge=1, description="Runs of each side.")
    concurrency: int = Field(32, ge=1, description="Requests in flight, of every side.")
    aux_layer_ids: tuple[int, ...] = Field((), description="Layers (default: as `speculators extract`).")
    endpoint: str | None = Field(None, description="A running extraction server (default: one is started).")
    storage_path: Path | None = Field(None, description="Where that server writes.")
    vllm: str | None = Field(None, description="vLLM to start: an environment, an interpreter, an executable.")
    eager: bool = Field(True, description="--no-eager: the server that is started compiles first.")
    upstream: Path | None = Field(None, description="Interpreter with upstream speculators 0.9.0: measured as well.")
    online: bool = Field(False, description="Also train on states from the server, and on those of a cache.")
    speculator_type: Literal["eagle3", "dflash"] = Field("eagle3", description="--online: what is trained.")
    steps: int | None = Field(None, ge=2, description="--online: steps (default: an epoch).")
    row_length: int = Field(1024, ge=16, description="--online: tokens of a packed row.")
    warmup: int = Field(5, ge=1, description="--online: first steps that do not count.")
    output: Path | None = Field(None, description="Also write the result here as JSON.")
    json_output: bool = Field(False, description="Print the result as JSON.", json_schema_extra={"flags": ["--json"]})

    @model_validator(mode="after")
    def _check(self) -> "ExtractThroughputOptions":
        if self.endpoint and not self.storage_path:
            raise ValueError("--endpoint needs --storage-path, the directory that its server writes to")
        return self


def measure(options: ExtractThroughputOptions) -> ExtractionResult:
    """Run all sides in turn, each round beginning with another one.

    Raises:
        UserError: a run failed.
    """
    python = upstream_python(options.upstream) if options.upstream else None
    load = os.getloadavg()
    with _prepared(options) as setting:
        sides: list[Callable[[int], ExtractionRun]] = [
            lambda number: extract(setting, number),
            lambda number: ask_bare(setting),
            *([lambda number: ask_upstream(setting, python)] if python else []),
        ]
        _warm_up(setting)
        runs = []
        for number in range(options.rounds):
            first = number % len(sides)
            runs += [side(number) for side in sides[first:] + sides[:first]]
        online, offline = _trainings(options, setting) if options.online else (None, None)
        return ExtractionResult(
            provenance=Provenance.collect(),
            load_average=load,
            server=options.endpoint or "started here",
            samples=len(json.loads(setting.prompts.read_text())),
            tokens=setting.tokens,
            concurrency=options.concurrency,
            runs=tuple(runs),
            offline=offline,
            online=online,
        )


@contextmanager
def _prepared(options: ExtractThroughputOptions) -> Iterator[Setting]:
    """The samples, and a server for them; both for the length of the block."""
    verifier = Verifier.read(options.verifier)
    layers = options.aux_layer_ids or verifier.default_aux_layer_ids()
    with tempfile.TemporaryDirectory(prefix="extraction-") as directory:
        scratch = Path(directory)
        samples = _write_part(DataDirectory(options.data), options.samples, scratch / "data")
        prompts = scratch / "prompts.json"
        prompts.write_text(json.dumps([sample.ids.tolist() for sample in samples]))
        asked = ExtractOptions(
            verifier=options.verifier, data=options.data, output=scratch, storage_path=options.storage_path,
            endpoint=(options.endpoint,) if options.endpoint else (), vllm=options.vllm, eager=options.eager,
        )  # fmt: skip
        longest = max(len(sample.ids) for sample in samples)
        with extraction_endpoints(asked, layers, longest) as (server,):
            yield Setting(
                verifier=options.verifier,
                data=scratch / "data",
                prompts=prompts,
                url=server.base_url,
                storage=server.storage_path,
                aux_layer_ids=layers,
                concurrency=options.concurrency,
                tokens=sum(len(sample.ids) for sample in samples),
                scratch=scratch,
            )


def _write_part(data: DataDirectory, number: int | None, path: Path) -> list[TokenizedSample]:
    """A data directory of the first training samples alone, each once."""
    train = data.split("train")
    samples = list(train[: number or len(train)])
    if not samples:
        raise UserError(f"--data: {data.path} has no training sample.")
    stats = SplitStats(
        samples=len(samples),
        tokens=sum(len(sample.ids) for sample in samples),
        supervised_tokens=sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples),
    )
    empty = SplitStats(samples=0, tokens=0, supervised_tokens=0)
    splits: dict[Split, SplitStats] = {"train": stats, "validation": empty}
    manifest = data.manifest.model_copy(update={"splits": splits})
    DataDirectory.write(path, manifest, data.token_counts, {"train": samples, "validation": []})
    return samples


def _warm_up(setting: Setting) -> None:
    """A few prompts that do not count: a server's first answers are slow."""
    few = setting.scratch / "few.json"
    prompts = json.loads(setting.prompts.read_text())[:_WARM_UP_SAMPLES]
    few.write_text(json.dumps(prompts))
    ask_bare(setting._replace(prompts=few, tokens=sum(map(len, prompts))))


def _trainings(options: ExtractThroughputOptions, setting: Setting) -> tuple[TrainingRun, TrainingRun]:
    """On states from the server, and on those of the first cache."""
    same = ["--speculator-type", options.speculator_type, "--row-length", str(options.row_length)]
    same += ["--max-steps", str(options.steps), "--epochs", str(options.steps)] if options.steps else []
    served = ["--vllm-endpoint", setting.url, "--storage-path", str(setting.storage)]
    online = train(setting, setting.scratch / "online", [*same, *served], options.warmup)
    cached = ["--hidden-states", str(cache_of(setting, 0))]
    return online, train(setting, setting.scratch / "offline", [*same, *cached], options.warmup)


def run(options: ExtractThroughputOptions) -> None:
    """Measure, write, show."""
    result = measure(options)
    console = deliver(result, options.output, options.json_output)
    if console is None:
        return
    compared = compare(result.runs)
    shown = Table("extraction", "tokens/s", "ours over it (smallest to largest)")
    for side in compared:
        ratio = "" if side.side == "ours" else str(side.ours_over_it)
        shown.add_row(side.side, f"{side.tokens_per_s:,.0f}", ratio)
    console.print(shown)
    if result.online and result.offline:
        _show_trainings(console, result.online, result.offline)
        bare = next(side.tokens_per_s for side in compared if side.side == "bare")
        console.print(verdict(bare, result.online))
    p = result.provenance
    console.print(f"{result.samples} samples, {result.tokens:,} tokens, {result.concurrency} requests in flight")
    console.print(f"{p.processor}, {p.cores} cores; Python {p.python}; {p.packages}; load {result.load_average}")


def _show_trainings(console: Console, online: TrainingRun, offline: TrainingRun) -> None:
    shown = Table("training", "steps", "tokens/s", "waited", "MiB at start", "at end", "growth", "MiB at the server")
    for name, trained in (("online", online), ("from a cache", offline)):
        memory = trained.memory
        shown.add_row(
            name, str(trained.steps), f"{trained.tokens_per_s:,.0f}", f"{trained.wait_share:.1%}",
            f"{memory.start_bytes / 2**20:,.0f}", f"{memory.end_bytes / 2**20:,.0f}", f"{memory.growth:+.1%}",
            f"{memory.storage_peak_bytes / 2**20:,.1f} at most",
        )  # fmt: skip
    console.print(shown)


if __name__ == "__main__":
    run_script("extract_throughput.py", schema_command(ExtractThroughputOptions, run))
