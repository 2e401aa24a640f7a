"""Acceptance length against tokens and against seconds of training, for our candidates and upstream's defaults.

    python benchmarks/learning_curve.py --data output/data --hidden-states output/hidden_states \
        --verifier output/verifier --output output/learning

Every checkpoint of every run is walked by `speculators replay` over the validation split, upstream's too: its
checkpoints have the tensor names that ours have. Seconds are those of optimizer steps alone. Upstream trains with its
defaults at our draft's size (its dflash has 5 layers and blocks of 16 otherwise), rows of our length (more steps than
its 8,192) and all layers attending to the whole context, in both directions inside a block: its default, causal blocks,
is another draft that our replay does not walk. The trap: seconds mean something only on a machine that does nothing
else. Started again, it skips what its `curves.json` holds.
"""

import shutil
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from curves import Curve, CurvePoint, Curves, lines, plot, standings
from drivers import export_rows, run_ours, run_script, run_upstream
from pydantic import Field
from training_job import Algorithm, Measured, make_job
from upstream_environment import upstream_python

from speculators.cli.options import schema_command
from speculators.errors import UserError
from speculators.prediction import Prediction
from speculators.provenance import Provenance
from speculators.schema import Strict, read_json, write_json


class Candidate(NamedTuple):
    """A recipe: overrides of `TrainOptions`, or of upstream's options where `upstream` is set."""

    algorithm: Algorithm
    overrides: dict[str, Any] = {}
    upstream: bool = False


CANDIDATES: dict[str, Candidate] = {
    "eagle3": Candidate("eagle3"),
    "eagle3-muon-3e-3": Candidate("eagle3", {"optimizer": "muon", "lr": 3e-3}),
    "eagle3-muon-8e-3": Candidate("eagle3", {"optimizer": "muon", "lr": 8e-3}),
    "eagle3-adamw": Candidate("eagle3", {"optimizer": "adamw", "lr": 1e-3}),
    "eagle3-hard": Candidate("eagle3", {"loss_fn": "ce"}),
    "eagle3-upstream": Candidate("eagle3", upstream=True),
    "dflash": Candidate("dflash"),
    "dflash-muon-3e-3": Candidate("dflash", {"optimizer": "muon", "lr": 3e-3}),
    "dflash-adamw": Candidate("dflash", {"optimizer": "adamw", "lr": 1.5e-3}),
    "dflash-hard": Candidate("dflash", {"loss_fn": "ce"}),
    "dflash-128-anchors": Candidate("dflash", {"max_anchors": 128}),
    "dflash-upstream": Candidate("dflash", {"max_anchors": 512}, upstream=True),
}


class LearningOptions(Strict):
    """Train candidates with several seeds, replay every checkpoint, plot."""

    data: Path = Field(description="Data directory made by `speculators prepare`.")
    hidden_states: Path = Field(description="Cache made by `speculators extract`.")
    verifier: str = Field(description="Directory of the verifier.")
    output: Path = Field(description="Directory for curves.json, curves.html and the runs under way.")
    upstream_python: Path | None = Field(
        None, description="Interpreter with upstream 0.9.0 (default: an environment is made in the user's cache)."
    )
    candidates: tuple[str, ...] = Field(tuple(CANDIDATES), description="Candidates, by name.")
    seeds: tuple[int, ...] = Field((0, 1, 2), description="Seeds of weights, packing and order.", min_length=1)
    steps: int = Field(500, ge=1, description="Optimizer steps of a run, a row each.")
    checkpoints: int = Field(8, ge=1, description="Checkpoints replayed of each run.")
    row_length: int = Field(1024, ge=16, description="Tokens of a packed row.")
    draft_vocab_size: int = Field(8192, ge=1, description="Tokens the draft can propose.")
    threads: int | None = Field(None, ge=1, description="OMP_NUM_THREADS of the runs (default: as it is).")
    json_output: bool = Field(False, description="Print the curves as JSON.", json_schema_extra={"flags": ["--json"]})


def learn(options: LearningOptions) -> Curves:
    """Run what is not in `curves.json` yet.

    Raises:
        UserError: an unknown candidate, or a run or a replay failed; the curves so far are kept.
    """
    unknown = sorted(set(options.candidates) - set(CANDIDATES))
    if unknown:
        raise UserError(f"--candidates: {unknown[0]!r} is not known; known candidates are {', '.join(CANDIDATES)}.")
    upstream = any(CANDIDATES[name].upstream for name in options.candidates)
    python = upstream_python(options.upstream_python) if upstream else None
    file = options.output / "curves.json"
    curves = list(read_json(file, Curves, "learning curves").curves) if file.exists() else []
    for seed in options.seeds:
        for name in options.candidates:
            if any((c.candidate, c.seed, c.steps) == (name, seed, options.steps) for c in curves):
                continue
            curves.append(_curve(options, name, seed, python))
            print(f"{name}, seed {seed}: {curves[-1].points[-1]}", file=sys.stderr)
            write_json(file, Curves(provenance=Provenance.collect(), curves=tuple(curves)))
            plot(curves, options.output / "curves.html")
    wanted = [c for c in curves if c.steps == options.steps and c.candidate in options.candidates]
    return Curves(provenance=Provenance.collect(), curves=tuple(wanted))


def _curve(options: LearningOptions, name: str, seed: int, python: Path | None) -> Curve:
    candidate = CANDIDATES[name]
    directory = options.output / f"{name}-{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    job = make_job(
        candidate.algorithm,
        options,
        directory,
        steps=options.steps,
        row_length=options.row_length,
        draft_vocab_size=options.draft_vocab_size,
        max_anchors=256,
        seed=seed,
        save_every=max(1, options.steps // options.checkpoints),
    )
    own = job.model_copy(update={"overrides": candidate.overrides})
    if python and candidate.upstream:
        export_rows(job, options.threads)
        measured = run_upstream(python, own, options.threads)
    else:
        measured = run_ours(own, options.threads)
    points = points_of(measured, [_replay(options, path) for path in measured.checkpoints])
    shutil.rmtree(directory)
    return Curve(candidate=name, algorithm=candidate.algorithm, seed=seed, steps=options.steps, points=points)


def points_of(measured: Measured, lengths: list[float]) -> tuple[CurvePoint, ...]:
    """Tokens and seconds up to each checkpoint, which is named `step-N`, with its acceptance length."""
    tokens, seconds = list(accumulate(measured.tokens)), list(accumulate(measured.step_s))
    steps = [int(Path(path).name.removeprefix("step-")) for path in measured.checkpoints]
    return tuple(
        CurvePoint(step=step, tokens=tokens[step - 1], seconds=seconds[step - 1], acceptance_length=length)
        for step, length in zip(steps, lengths, strict=True)
    )


def _replay(options: LearningOptions, checkpoint: str) -> float:
    command = [sys.executable, "-m", "speculators", "replay", checkpoint, "--verifier", options.verifier, "--json"]
    command += ["--data", str(options.data), "--hidden-states", str(options.hidden_states)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UserError(f"replay of {checkpoint} ended with {done.returncode}: {said}")
    prediction = Prediction.model_validate_json(done.stdout)
    return prediction.total.length


def run(options: LearningOptions) -> None:
    """Learn, write, show."""
    result = learn(options)
    if options.json_output:
        print(result.model_dump_json(indent=2))
        return
    for axis in ("seconds", "tokens"):
        print("\n".join(lines(standings(result.curves, axis), axis)))
    print(f"written to {options.output / 'curves.json'} and {options.output / 'curves.html'}", file=sys.stderr)


if __name__ == "__main__":
    run_script("learning_curve.py", schema_command(LearningOptions, run))
