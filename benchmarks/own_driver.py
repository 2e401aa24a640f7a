"""The child process of our side: exports packed rows for upstream, or trains as `speculators train` does.

python own_driver.py export JOB.json          # rows in the order of the steps -> the job's `rows` directory
python own_driver.py train JOB.json RESULT    # the trainer on cached hidden states; times from its train.jsonl
"""

import math
import sys
from importlib.metadata import version
from pathlib import Path
from typing import cast

from safetensors.torch import save_file
from training_job import Exported, Job, Measured, settle

from speculators.algorithms.dflash import mask_token
from speculators.checkpoint import all_checkpoints
from speculators.data.hidden_states import HiddenStateCache
from speculators.data.loader import PackedRows
from speculators.data.packing import RowSchedule
from speculators.data.samples import DataDirectory
from speculators.data.vocab import VocabMap
from speculators.training import launch
from speculators.training.log import StepRecord, read_log
from speculators.training.options import TrainOptions
from speculators.verifier import Verifier


def options_of(job: Job) -> TrainOptions:
    """The job as our options. Validation is off: it is no part of a step."""
    own = {"eagle3": {"ttt_steps": job.ttt_steps}, "dflash": _dflash(job)}[job.algorithm]
    asked = {
        "verifier": job.verifier, "data": job.data, "hidden_states": job.hidden_states, "output": job.output,
        "speculator_type": job.algorithm, "row_length": job.row_length, "draft_vocab_size": job.draft_vocab_size,
        "num_layers": job.num_layers, "seed": job.seed, "save_every": job.save_every, "validate_every": 0,
        "save_total_limit": None, "max_steps": job.steps, "epochs": job.steps, "restart": True,
    }  # fmt: skip
    options = TrainOptions.model_validate({**asked, **own, **job.overrides})
    options.check()
    return options


def _dflash(job: Job) -> dict[str, int]:
    return {"block_size": job.block_size, "max_anchors": job.max_anchors}


def export(job: Job) -> Exported:
    """Write the rows that our trainer would read, in its order."""
    options, verifier = options_of(job), Verifier.read(job.verifier)
    data = DataDirectory(options.data)
    cache = HiddenStateCache.open(options.hidden_states, verifier, options.aux_layer_ids)
    rows = PackedRows(data.split("train"), cache, "train", options.row_length, options.seed)
    schedule = RowSchedule(len(rows), 1, options.seed)
    order = tuple(schedule.slots(step)[0].row for step in range(job.steps))
    directory = Path(job.rows)
    directory.mkdir(parents=True, exist_ok=True)
    for row in sorted(set(order)):
        batch = rows.read(row)
        tensors = {name: value for name, value in batch._asdict().items() if name != "sample_ids"}
        save_file(tensors, directory / f"row-{row}.safetensors")
    vocab = VocabMap.from_counts(data.token_counts, options.draft_vocab_size, always=verifier.eos_token_ids)
    import torch

    save_file({"t2d": torch.from_numpy(vocab.t2d), "d2t": torch.from_numpy(vocab.d2t)}, directory / "vocab.safetensors")
    exported = Exported(
        aux_layer_ids=cache.aux_layer_ids,
        mask_token_id=mask_token.choose(verifier, options.mask_token_id),
        order=order,
        fullness=rows.fullness,
        vocab_size=verifier.vocab_size,
    )
    (directory / "exported.json").write_text(exported.model_dump_json(), encoding="utf-8")
    return exported


def train(job: Job) -> Measured:
    """Train as the command does. What is resident is noted once everything is loaded; the log has the peak from then
    on, without the checkpoint that is written after the last step."""
    resident: list[int] = []
    launch.train(options_of(job), on_ready=lambda: resident.append(settle()))
    run = Path(job.output)
    records = [cast(StepRecord, record) for record in read_log(run) if record.kind == "step"]
    return Measured(
        step_s=tuple(record.tokens / record.tokens_per_s for record in records),
        tokens=tuple(record.tokens for record in records),
        losses=tuple(record.loss if math.isfinite(record.loss) else 0.0 for record in records),
        resident_bytes=resident[0],
        peak_bytes=max(record.memory_bytes for record in records),
        checkpoints=tuple(str(path) for path in all_checkpoints(run)),
        packages={name: version(name) for name in ("speculators", "torch", "transformers")},
    )


if __name__ == "__main__":
    asked = Job.model_validate_json(Path(sys.argv[2]).read_text(encoding="utf-8"))
    if sys.argv[1] == "export":
        export(asked)
    else:
        Path(sys.argv[3]).write_text(train(asked).model_dump_json(), encoding="utf-8")
