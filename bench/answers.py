"""What passes between a bench run and `speculators replay`: the verifier's answers go out, predictions come back.

The prediction walks exactly the tokens that the plain server was sent and wrote: no template is applied again.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from bench.records import BASELINE, BenchRun, RequestKey, RequestRecord, Variant, read_records
from speculators.prediction import Prediction
from speculators.schema import read_json, write_text

ANSWERS_FILE = "answers.jsonl"
PREDICTED_DIRECTORY = "predicted"


def answer_id(record: RequestRecord) -> str:
    """What a prompt's answer is called: `<task>/<prompt_id>`."""
    return f"{record.task}/{record.prompt_id}"


def write_answers(directory: Path, run: BenchRun) -> int:
    """Write `answers.jsonl`, ready tokens as `prepare` and `replay` read them, atomically.

    Returns:
        The number of rows. With none (sampled answers, a server that tells no token ids) nothing is written.
    """
    if run.conditions.temperature > 0:
        return 0
    lines = [_line(record) for record in _walkable(read_records(directory), run.conditions.points[0])]
    if lines:
        write_text(directory / ANSWERS_FILE, "".join(lines))
    return len(lines)


def _walkable(records: Iterable[RequestRecord], point: str) -> list[RequestRecord]:
    """One answer a prompt: the first one at the first load point."""
    return [
        record
        for record in records
        if record.ok and record.key == RequestKey(BASELINE, record.task, record.prompt_id, 0, 0, point)
        if record.token_ids and record.prompt_token_ids
    ]


def _line(record: RequestRecord) -> str:
    prompt, output = record.prompt_token_ids or (), record.token_ids or ()
    row = {
        "id": answer_id(record),
        "source": record.task,
        "input_ids": [*prompt, *output],
        "loss_mask": [0] * len(prompt) + [1] * len(output),
    }
    return json.dumps(row) + "\n"


def read_predictions(directory: Path, variants: Iterable[Variant]) -> tuple[dict[str, Prediction], list[str]]:
    """The predictions in `directory/predicted`, by variant, and the names of files that belong to none of `variants`.

    Raises:
        UserError: a file there is not a prediction.
    """
    names = {variant.file_name: variant.name for variant in variants}
    predictions, strangers = {}, []
    for path in sorted((directory / PREDICTED_DIRECTORY).glob("*.json")):
        if path.stem in names:
            predictions[names[path.stem]] = read_json(path, Prediction, "a prediction of `speculators replay --output`")
        else:
            strangers.append(path.name)
    return predictions, strangers
