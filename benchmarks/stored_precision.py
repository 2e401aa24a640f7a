"""What storing hidden states in fp8 costs: acceptance length of drafts trained from a bf16 store and from an fp8 one.

    python benchmarks/stored_precision.py --verifier output/verifier --data output/data \
        --hidden-states output/hidden_states --max-steps 500

The same samples, seed, rows and steps; the fp8 store is rounded from the bf16 one. Both drafts are judged on the
validation split of the bf16 store, because a served draft reads states that nobody rounded.
"""

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from drivers import deliver, run_script
from pydantic import Field
from rich.table import Table

from speculators.cli.options import schema_command
from speculators.data.cache_manifest import CacheManifest, Store
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.loader import PackedRows
from speculators.data.samples import SPLITS, DataDirectory
from speculators.errors import UserError
from speculators.provenance import Provenance
from speculators.schema import Strict
from speculators.training import launch
from speculators.training.options import TrainOptions
from speculators.training.parallel import start_ranks
from speculators.training.stop import StopRequest
from speculators.training.validation import validate
from speculators.verifier import Verifier

Algorithm = Literal["eagle3", "dflash"]


class PrecisionOptions(Strict):
    """Train from a bf16 store of hidden states and from an fp8 store of the same, and compare the drafts."""

    verifier: str = Field(description="Directory of the verifier.")
    data: Path = Field(description="Data directory made by `speculators prepare`.")
    hidden_states: Path = Field(description="Cache made by `speculators extract --store bf16`.")
    algorithms: tuple[Algorithm, ...] = Field(("eagle3", "dflash"), description="Algorithms to train.")
    seeds: tuple[int, ...] = Field((0,), description="Seeds; the spread between them tells what a difference means.")
    epochs: int = Field(1, ge=1, description="Passes over the data.")
    max_steps: int | None = Field(None, ge=1, description="Stop each training after this many steps.")
    row_length: int = Field(1024, ge=16, description="Tokens of a packed row.")
    draft_vocab_size: int = Field(8192, ge=1, description="Tokens the draft can propose.")
    scratch: Path | None = Field(None, description="For the fp8 store and the runs (default: the temporary directory).")
    output: Path | None = Field(None, description="Also write the result here as JSON.")
    json_output: bool = Field(False, description="Print the result as JSON.", json_schema_extra={"flags": ["--json"]})


class PrecisionRun(Strict):
    """One draft; `acceptance_length` is on the bf16 states of the validation split."""

    algorithm: Algorithm
    seed: int
    store: Store
    steps: int
    acceptance_length: float


class PrecisionResult(Strict):
    """Every draft, and the sizes of the stores in bytes."""

    provenance: Provenance
    samples: int
    size_bytes: dict[Store, int]
    runs: tuple[PrecisionRun, ...]


class Difference(Strict):
    """Of one algorithm: medians over the seeds, and fp8 less bf16 seed by seed."""

    algorithm: Algorithm
    bf16: float
    fp8: float
    differences: tuple[float, ...]


def differences(runs: Sequence[PrecisionRun]) -> list[Difference]:
    """Pairs runs of the same algorithm and seed."""
    found = []
    for algorithm in dict.fromkeys(run.algorithm for run in runs):
        bf16, fp8 = (
            {run.seed: run.acceptance_length for run in runs if (run.algorithm, run.store) == (algorithm, store)}
            for store in ("bf16", "fp8")
        )
        found.append(
            Difference(
                algorithm=algorithm,
                bf16=statistics.median(bf16.values()),
                fp8=statistics.median(fp8.values()),
                differences=tuple(fp8[seed] - bf16[seed] for seed in bf16),
            )
        )
    return found


def round_to_fp8(cache: HiddenStateCache, data: DataDirectory, verifier: Verifier, path: Path) -> int:
    """Store the samples of `data` in fp8 as `speculators extract --store fp8` would have; gives their number."""
    rounded = HiddenStateCache.create(path, CacheManifest.of(verifier, cache.manifest.aux_layer_ids, "fp8"))
    samples = {sample.sample_id: sample for split in SPLITS for sample in data.split(split)}
    for sample in samples.values():
        if sample.sample_id not in rounded:
            rounded.write(sample.sample_id, cache.read(sample.sample_id, sample.ids))
    return len(samples)


def measure(options: PrecisionOptions, scratch: Path) -> PrecisionResult:
    """Round, train and judge.

    Raises:
        UserError: the cache is none of bf16, or a training failed.
    """
    verifier, data = Verifier.read(options.verifier), DataDirectory(options.data)
    cache = HiddenStateCache.open(options.hidden_states, verifier, None)
    if cache.manifest.dtype != "bfloat16":
        raise UserError(f"--hidden-states: {cache.path} holds {cache.manifest.dtype}; give a cache of --store bf16.")
    stores: dict[Store, Path] = {"bf16": options.hidden_states, "fp8": scratch / "fp8"}
    samples = round_to_fp8(cache, data, verifier, stores["fp8"])
    runs = []
    for algorithm in options.algorithms:
        for seed in options.seeds:
            for store, path in stores.items():
                asked = _training(options, algorithm, seed, path, scratch / f"{algorithm}-{seed}-{store}")
                runs.append(_train_and_judge(asked, store, cache))
    names = {sample.sample_id for split in SPLITS for sample in data.split(split)}
    sizes = {
        store: sum((path / name[:2] / f"{name}.safetensors").stat().st_size for name in names)
        for store, path in stores.items()
    }
    return PrecisionResult(provenance=Provenance.collect(), samples=samples, size_bytes=sizes, runs=tuple(runs))


def _training(options: PrecisionOptions, algorithm: Algorithm, seed: int, states: Path, output: Path) -> TrainOptions:
    asked: dict[str, Any] = options.model_dump(
        include={"verifier", "data", "epochs", "max_steps", "row_length", "draft_vocab_size"}
    )
    own = {"hidden_states": states, "output": output, "speculator_type": algorithm, "seed": seed, "restart": True}
    return TrainOptions.model_validate({**asked, **own, "validate_every": 0, "save_every": 0})


def _train_and_judge(options: TrainOptions, store: Store, exact: HiddenStateCache) -> PrecisionRun:
    """Train, then validate the last weights once more, on the states that were not rounded."""
    launch.train(options)
    again = options.model_copy(update={"restart": False})
    with start_ranks(options.device) as ranks, ExitStack() as opened, StopRequest() as stop:
        trainer = launch.build(again, ranks, opened)
        split = DataDirectory(options.data).split("validation")
        rows = PackedRows(split, exact, "validation", options.row_length, options.seed)
        draft = trainer.algorithm
        judged = validate(draft.module, draft.step, rows, options, ranks, trainer.step, stop)
    assert judged
    return PrecisionRun(
        algorithm="eagle3" if options.speculator_type == "eagle3" else "dflash",
        seed=options.seed,
        store=store,
        steps=trainer.step,
        acceptance_length=judged.acceptance_length,
    )


def run(options: PrecisionOptions) -> None:
    """Measure, write, show."""
    with tempfile.TemporaryDirectory(prefix="precision-", dir=options.scratch) as scratch:
        result = measure(options, Path(scratch))
    console = deliver(result, options.output, options.json_output)
    if console is None:
        return
    shown = Table("algorithm", "from bf16", "from fp8", "difference", title="acceptance length on bf16 states")
    for found in differences(result.runs):
        each = ", ".join(f"{difference:+.4f}" for difference in found.differences)
        shown.add_row(found.algorithm, f"{found.bf16:.4f}", f"{found.fp8:.4f}", each)
    console.print(shown)
    sizes = ", ".join(f"{size / 2**20:,.0f} MiB in {store}" for store, size in result.size_bytes.items())
    steps = sorted({trained.steps for trained in result.runs})
    console.print(f"{result.samples} samples: {sizes}; {', '.join(map(str, steps))} steps, seeds {options.seeds}")


if __name__ == "__main__":
    run_script("stored_precision.py", schema_command(PrecisionOptions, run))
