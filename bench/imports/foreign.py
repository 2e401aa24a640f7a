"""What every importer makes of another tool's file, and the run of ours that it becomes.

The trap: such files tell little about their conditions. What they do not tell is `unknown`, which equals `unknown`, so
two files of one tool can be compared as soon as model, prompts and load agree.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from bench.conditions import Conditions, Outcome, Point, TaskInfo, Variant
from bench.records import BenchRun, RequestRecord
from speculators.acceptance import Acceptance
from speculators.provenance import Provenance

TASK = "imported"
_UNKNOWN = "unknown"


class Foreign(NamedTuple):
    """One file.

    Attributes:
        tool: that wrote it, with its version if it tells.
        prompts: what tells whether two files are about the same prompts, such as their lengths in tokens.
        wall_s: load point -> seconds that it took; None where unknown.
        counters: acceptance over the whole file, if it tells.
    """

    tool: str
    model: str
    records: list[RequestRecord]
    prompts: Sequence[Any]
    wall_s: Mapping[str, float | None]
    counters: Acceptance | None = None


def as_run(name: str, foreign: Foreign, written: datetime) -> BenchRun:
    """The run that holds this one variant; `written` is when the file was."""
    points = tuple(
        Point(
            variant=name,
            task=TASK,
            point=point,
            num_requests=len(mine),
            num_failed=sum(not record.ok for record in mine),
            requests=None,
            counters=foreign.counters,
            wall_s=wall_s,
        )
        for point, wall_s in foreign.wall_s.items()
        if (mine := [record for record in foreign.records if record.point == point])
    )
    return BenchRun(
        conditions=_conditions(foreign),
        tasks=(TaskInfo(name=TASK, group=TASK, num_prompts=len({r.prompt_id for r in foreign.records})),),
        variants=(Variant(name=name, verifier=foreign.model),),
        outcomes={name: Outcome(status="measured")},
        points=points,
        provenance=Provenance.collect().model_copy(update={"created": written.isoformat(timespec="seconds")}),
    )


def _conditions(foreign: Foreign) -> Conditions:
    return Conditions(
        verifier=foreign.model,
        verifier_revision=_UNKNOWN,
        template_hash=_UNKNOWN,
        prompts={TASK: hashlib.sha256(json.dumps(list(foreign.prompts)).encode()).hexdigest()[:16]},
        max_tokens=0,
        temperature=1.0,  # no file tells; at 0 outputs would be audited
        seed=0,
        points=tuple(foreign.wall_s),
        repeats=1,
        enforce_eager=False,
        server_args=(),
        vllm=f"{_UNKNOWN} (imported from {foreign.tool})",
        machine=_UNKNOWN,
    )
