"""Was the acceptance that was predicted the one that was served? By one definition, on the same prompts.

A prediction walks the plain verifier's answers. The trap: where a served output leaves that text (a near tie in
bfloat16), the two go over different tokens from there on.
"""

from collections.abc import Sequence

from bench.answers import answer_id
from bench.compare import ALL_TASKS
from bench.records import RequestRecord
from speculators.acceptance import Acceptance
from speculators.prediction import Prediction
from speculators.schema import Strict


class PromptParity(Strict):
    """Acceptance lengths on one prompt."""

    task: str
    prompt_id: str
    predicted: float
    served: float


class TaskParity(Strict):
    """Acceptance lengths by step on one task, or on all tasks.

    Attributes:
        predicted, served: over the `num_prompts` prompts on which both took a step.
        relative_difference: predicted / served - 1.
        num_served: prompts that the variant answered.
    """

    task: str
    predicted: float
    served: float
    relative_difference: float
    num_prompts: int
    num_served: int


class Parity(Strict):
    """A variant's prediction beside what was served: by task (all tasks last) and prompt by prompt."""

    variant: str
    draft: str
    tasks: tuple[TaskParity, ...]
    prompts: tuple[PromptParity, ...]


def parity(prediction: Prediction, records: Sequence[RequestRecord], tasks: Sequence[str]) -> Parity | None:
    """Compare a prediction with the records of one variant (first turns; repeats are added up).

    Returns:
        None when they have no prompt in common on which both took a step.
    """
    predicted: dict[str, Acceptance] = {}
    for sample in prediction.samples:
        _add(predicted, sample.conversation_id, sample.acceptance)
    served: dict[str, Acceptance] = {}
    of: dict[str, RequestRecord] = {}
    for record in records:
        if record.ok and record.turn == 0 and record.acceptance is not None:
            of[answer_id(record)] = record
            _add(served, answer_id(record), record.acceptance)
    common = [name for name in served if name in predicted and predicted[name].steps and served[name].steps]
    if not common:
        return None
    rows = []
    for task in (*tasks, ALL_TASKS):
        answered = [name for name in served if task in (of[name].task, ALL_TASKS)]
        mine = [name for name in common if task in (of[name].task, ALL_TASKS)]
        if mine:
            rows.append(_row(task, [predicted[n] for n in mine], [served[n] for n in mine], len(answered)))
    return Parity(
        variant=records[0].variant,
        draft=prediction.draft,
        tasks=tuple(rows),
        prompts=tuple(
            PromptParity(
                task=of[name].task,
                prompt_id=of[name].prompt_id,
                predicted=predicted[name].length,
                served=served[name].length,
            )
            for name in common
        ),
    )


def _add(sums: dict[str, Acceptance], name: str, acceptance: Acceptance) -> None:
    sums[name] = sums[name] + acceptance if name in sums else acceptance


def _row(task: str, predicted: list[Acceptance], served: list[Acceptance], num_served: int) -> TaskParity:
    mine, theirs = (sum(parts[1:], parts[0]).length for parts in (predicted, served))
    return TaskParity(
        task=task,
        predicted=mine,
        served=theirs,
        relative_difference=mine / theirs - 1,
        num_prompts=len(predicted),
        num_served=num_served,
    )
