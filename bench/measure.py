"""Measure one variant on its server: every load point, every task, written down as requests end.

The server's counters are read right around each task, so that their difference tells of exactly its requests.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.client import Sampling, make_client
from bench.client_lag import ClientLag, LagMeter
from bench.conditions import CLOSING_PASS, Point
from bench.load import Load
from bench.machine_load import LoadMeter
from bench.metrics import pooled_acceptance
from bench.prefix_cache import reset
from bench.prompts import Prompt
from bench.records import RecordWriter, RequestKey, RequestRecord
from bench.suite import BenchOptions, Plan
from bench.traffic import Finished, Scope, Traffic
from serve.endpoint import Endpoint
from speculators.acceptance import Acceptance

_COUNTERS_SETTLE_S = 1.0
_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def prompts_of_pass(prompts: list[Prompt], pass_index: int) -> list[Prompt]:
    """The closing pass asks for half of the prompts again: enough to see drift, and half the time."""
    return prompts[: (len(prompts) + 1) // 2] if pass_index == CLOSING_PASS else prompts


def missing(variant: str, plan: Plan, repeats: int, finished: Finished, pass_index: int = 0) -> Iterator[RequestKey]:
    """The variant's requests that are still to be made."""
    for load in plan.loads:
        for task, prompts in plan.prompts.items():
            for repeat in range(repeats):
                for prompt in prompts_of_pass(prompts, pass_index):
                    for turn in range(prompt.num_turns):
                        key = Scope(variant, pass_index, load, repeat).key(task, prompt.prompt_id, turn)
                        if key not in finished:
                            yield key


def measure(
    endpoint: Endpoint,
    variant: str,
    plan: Plan,
    options: BenchOptions,
    finished: Finished,
    writer: RecordWriter,
    console: Console,
    pass_index: int = 0,
    keep_point: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """Send what is missing; every request goes to `writer`, every point to `keep_point`, as soon as it is known.

    Raises:
        UserError: the warm-up failed, or the server stopped answering.
    """
    job = _Job(endpoint, variant, pass_index, plan, options, finished)
    with Progress(*_COLUMNS, console=console) as progress:
        todo = sum(1 for _ in missing(variant, plan, options.repeats, finished, pass_index))
        bar = progress.add_task(escape(variant), total=todo)

        def keep(record: RequestRecord) -> None:
            writer.append(record)
            if record.ok or record.skipped:
                finished[record.key] = record
            if record.error:
                progress.console.print(f"{variant}, {record.task}: {record.error}", markup=False, highlight=False)
            progress.update(bar, advance=1, description=escape(f"{variant} {record.point}: {record.task}"))

        def refuse(records: list[RequestRecord], reason: str) -> None:
            progress.console.print(f"{variant}: {reason}", markup=False, highlight=False)
            for record in records:
                finished.pop(record.key, None)
                writer.append(record.model_copy(update={"error": reason}))

        return asyncio.run(_all_points(job, keep, refuse, keep_point))


class _Job(NamedTuple):
    """What is measured, where."""

    endpoint: Endpoint
    variant: str
    pass_index: int
    plan: Plan
    options: BenchOptions
    finished: Finished


async def _all_points(
    job: _Job,
    keep: Callable[[RequestRecord], None],
    refuse: Callable[[list[RequestRecord], str], None],
    keep_point: Callable[[Point], None],
) -> list[Point]:
    points = []
    left = {
        (key.point, key.task)
        for key in missing(job.variant, job.plan, job.options.repeats, job.finished, job.pass_index)
    }
    origin = time.perf_counter()
    options = job.options
    sampling = Sampling(options.max_tokens, options.temperature, options.seed, options.thinking)
    async with make_client(job.endpoint.base_url) as client:
        for load in job.plan.loads:
            if not any(point == load.name for point, _ in left):
                continue
            traffic = Traffic(client, job.endpoint, sampling, uuid.uuid4().hex, origin, job.finished, keep)
            await traffic.warm_up(Scope(job.variant, job.pass_index, load))
            for task in job.plan.prompts:
                if (load.name, task) in left:
                    point, records = await _one_point(job, traffic, load, task)
                    if point.refused:
                        refuse(records, point.refused)
                    keep_point(point)
                    points.append(point)
    return points


async def _one_point(job: _Job, traffic: Traffic, load: Load, task: str) -> tuple[Point, list[RequestRecord]]:
    """All repeats of one task at one load."""
    measured: list[RequestRecord] = []

    def note(record: RequestRecord) -> None:
        measured.append(record)
        traffic.note(record)

    noting = traffic._replace(note=note)
    prompts = prompts_of_pass(job.plan.prompts[task], job.pass_index)
    before, busy = job.endpoint.acceptance_counters(), LoadMeter()
    wall_s = 0.0
    resets: list[bool] = []
    with LagMeter() as meter:
        for repeat in range(job.options.repeats):
            if job.options.prefix_caching:
                resets.append(await asyncio.to_thread(reset, job.endpoint))
            started = time.perf_counter()
            await noting.run(Scope(job.variant, job.pass_index, load, repeat), task, prompts)
            wall_s += time.perf_counter() - started
    lag = meter.lag()
    point = _reconcile(
        job.endpoint,
        before,
        measured,
        Point(
            variant=job.variant,
            task=task,
            point=load.name,
            pass_index=job.pass_index,
            num_requests=len(measured),
            num_failed=sum(not record.ok for record in measured),
            requests=pooled_acceptance(measured),
            counters=None,
            other_cores=busy.other_cores(),
            wall_s=wall_s,
            prefix_cache_reset=all(resets) if resets else None,
            client_lag_mean_s=lag.mean_s if lag else None,
            client_lag_p99_s=lag.p99_s if lag else None,
            refused=_refusal(lag, measured),
            skipped=tuple(dict.fromkeys(record.prompt_id for record in measured if record.skipped)),
        ),
    )
    if not point.refused and (mismatch := point.mismatch):
        point = point.model_copy(update={"refused": mismatch})
    return point, measured


def _refusal(lag: ClientLag | None, records: list[RequestRecord]) -> str | None:
    gaps = [gap for record in records if record.ok for gap in record.chunk_gaps_s]
    return lag.refusal(float(np.median(gaps)) if gaps else None) if lag else None


def _reconcile(endpoint: Endpoint, before: Acceptance | None, measured: list[RequestRecord], point: Point) -> Point:
    """Read the counters until they agree with the requests or have had their time to settle."""
    deadline = time.perf_counter() + _COUNTERS_SETTLE_S
    while True:
        after = endpoint.acceptance_counters()
        point = point.model_copy(update={"counters": after - before if after and before else after})
        if point.agrees is not False or time.perf_counter() > deadline:
            return point
        time.sleep(0.1)
