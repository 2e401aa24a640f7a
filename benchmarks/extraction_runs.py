"""Starts what an extraction measurement compares, each in a process of its own, and watches a training's memory."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from extraction_result import ExtractionRun, Side, TrainingRun, memory_over, training_run

from speculators.errors import UserError
from speculators.training.log import TRAIN_LOG, StepRecord, read_log

_HERE = Path(__file__).parent
_LOOK_EVERY_S = 0.25
_UPSTREAM_SECONDS = re.compile(r"Timing: ([\d.]+)s elapsed")


class Setting(NamedTuple):
    """What all sides are given.

    Attributes:
        data: data directory of the samples, and nothing else.
        prompts: the same samples' token ids, one each, as a JSON file.
        storage: where the server at `url` writes.
        scratch: for what the runs write.
    """

    verifier: str
    data: Path
    prompts: Path
    url: str
    storage: Path
    aux_layer_ids: tuple[int, ...]
    concurrency: int
    tokens: int
    scratch: Path


def extract(setting: Setting, number: int) -> ExtractionRun:
    """`speculators extract` into a new cache. Raises UserError with the end of its words."""
    said = _output(
        [
            sys.executable, "-m", "speculators", "extract", "--json", *_common(setting),
            "--output", str(cache_of(setting, number)), "--endpoint", setting.url,
            "--storage-path", str(setting.storage), "--concurrency", str(setting.concurrency),
        ]
    )  # fmt: skip
    summary = json.loads(said)
    return _run("ours", setting, summary["seconds"], summary["tokens"])


def cache_of(setting: Setting, number: int) -> Path:
    """Where the `number`-th run of ours puts its states."""
    return setting.scratch / f"cache-{number}"


def ask_bare(setting: Setting) -> ExtractionRun:
    """The bare loop. Raises UserError with the end of its words."""
    script = [sys.executable, str(_HERE / "bare_extraction.py")]
    said = _output([*script, str(setting.prompts), setting.url, str(setting.concurrency)])
    return _run("bare", setting, float(said), setting.tokens)


def ask_upstream(setting: Setting, python: Path) -> ExtractionRun:
    """`generate-offline-data` of the speculators in that interpreter's environment, as shipped: it moves the files and
    checks nothing. It tells its time in tenths of a second. Raises UserError with the end of its words."""
    with tempfile.TemporaryDirectory(dir=setting.scratch) as directory:
        data = Path(directory) / "dataset"
        interpreter = os.path.abspath(python)  # a symbolic link is what tells it its environment
        _output([interpreter, str(_HERE / "upstream_dataset.py"), str(setting.prompts), str(data)])
        said = _output(
            [
                interpreter, "-m", "speculators", "generate-offline-data", "--endpoint", f"{setting.url}/v1",
                "--preprocessed-data", str(data), "--output", str(Path(directory) / "states"),
                "--concurrency", str(setting.concurrency), "--fail-on-error",
            ],
            elsewhere=Path(directory),
        )  # fmt: skip
    told = _UPSTREAM_SECONDS.search(said)
    if told is None:
        raise UserError(f"--upstream: {python} told no time; its last words: {_last_line(said)}")
    return _run("upstream", setting, float(told[1]), setting.tokens)


def train(setting: Setting, output: Path, arguments: Sequence[str], warmup: int) -> TrainingRun:
    """`speculators train` with these further arguments, watched from its first steps on.

    Raises:
        UserError: it failed, or had too few steps to count.
    """
    log = output / TRAIN_LOG
    common = [sys.executable, "-m", "speculators", "train", "--json", "--restart", "--validate-every", "0"]
    command = [*common, "--save-every", "0", *_common(setting), "--output", str(output), *arguments]
    output.mkdir(parents=True)
    resident: list[int] = []
    storage: list[int] = [0]
    with (output / "words.log").open("w+", encoding="utf-8") as words:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=words)
        try:
            while process.poll() is None:
                time.sleep(_LOOK_EVERY_S)
                storage.append(_size(setting.storage))
                if _lines(log) > warmup:
                    resident += _resident(process.pid)
        finally:
            process.kill()
            process.wait()
        words.seek(0)
        if process.returncode:
            raise UserError(f"speculators train ended with {process.returncode}: {_last_line(words.read())}")
    records = [record for record in read_log(output) if isinstance(record, StepRecord)]
    if len(records) <= warmup or not resident:
        raise UserError(f"--steps: {len(records)} steps are too few to count after the first {warmup}; give more.")
    return training_run(records, memory_over(resident, storage), warmup)


def _common(setting: Setting) -> list[str]:
    layers = ",".join(map(str, setting.aux_layer_ids))
    return ["--verifier", setting.verifier, "--data", str(setting.data), "--aux-layer-ids", layers]


def _run(side: Side, setting: Setting, seconds: float, tokens: int) -> ExtractionRun:
    if tokens != setting.tokens:
        raise UserError(f"{side}: {tokens} tokens were asked for instead of {setting.tokens}.")
    run = ExtractionRun(side=side, tokens=tokens, seconds=seconds)
    print(f"{side}: {run.tokens_per_s:,.0f} tokens/s", file=sys.stderr)
    return run


def _output(command: list[str], elsewhere: Path | None = None) -> str:
    """What a command printed; with `elsewhere` also its words on stderr, and it runs there, where no package of ours is
    found before upstream's."""
    environment = {name: value for name, value in os.environ.items() if not (elsewhere and name == "PYTHONPATH")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, cwd=elsewhere, env=environment
    )
    if done.returncode:
        name = next((part for part in command[1:] if not part.startswith("-")), command[0])
        raise UserError(f"{Path(name).name} ended with {done.returncode}: {_last_line(done.stderr or done.stdout)}")
    return done.stdout + done.stderr if elsewhere else done.stdout


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def _lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _resident(process: int) -> list[int]:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return []
    return [1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")]


def _size(directory: Path) -> int:
    total = 0
    for file in directory.iterdir():
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            continue
    return total
