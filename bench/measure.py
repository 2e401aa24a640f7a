"""Stream the tasks' prompts through one server and write every request down as it ends.

The server's counters are read right around each task, so that their difference tells of exactly its requests.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.client import make_client, send
from bench.machine_load import LoadMeter
from bench.metrics import pooled_acceptance
from bench.records import Point, RecordWriter, RequestKey, RequestRecord
from bench.suite import BenchOptions, Plan
from bench.tasks import Prompt
from serve.endpoint import Endpoint
from speculators.acceptance import Acceptance
from speculators.errors import UserError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Finished = dict[RequestKey, RequestRecord]

_WARM_UP_PROMPT = "Describe in a few sentences how a bicycle works."
_WARM_UP_TOKENS = 48
_COUNTERS_SETTLE_S = 1.0


def missing(variant: str, plan: Plan, repeats: int, finished: Finished) -> Iterator[RequestKey]:
    """The variant's requests that are still to be made."""
    for task, prompts in plan.prompts.items():
        for repeat in range(repeats):
            for prompt in prompts:
                for turn in range(prompt.num_turns):
                    key = RequestKey(variant, task, prompt.prompt_id, turn, repeat)
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
) -> list[Point]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(
            escape(variant), total=sum(1 for _ in missing(variant, plan, options.repeats, finished))
        )

        def keep(record: RequestRecord) -> None:
            writer.append(record)
            if record.ok:
                finished[record.key] = record
            else:
                progress.console.print(f"{variant}, {record.task}: {record.error}", markup=False, highlight=False)
            progress.update(bar, advance=1, description=escape(f"{variant}: {record.task}"))

        return asyncio.run(_all_tasks(endpoint, variant, plan, options, finished, keep))


async def _all_tasks(
    endpoint: Endpoint,
    variant: str,
    plan: Plan,
    options: BenchOptions,
    finished: Finished,
    keep: Callable[[RequestRecord], None],
) -> list[Point]:
    points = []
    async with make_client(endpoint.base_url) as client:
        sender = _Sender(client, endpoint, variant, options, time.perf_counter())
        await sender.warm_up()
        for task, prompts in plan.prompts.items():
            before, load = endpoint.acceptance_counters(), LoadMeter()
            measured: list[RequestRecord] = []

            def note(record: RequestRecord, measured: list[RequestRecord] = measured) -> None:
                measured.append(record)
                keep(record)

            for repeat in range(options.repeats):
                await _closed_loop(sender, task, prompts, repeat, finished, note)
            if measured:
                busy = load.other_cores()
                point = _reconcile(endpoint, variant, task, before, measured)
                points.append(point.model_copy(update={"other_cores": busy}))
    return points


async def _closed_loop(
    sender: "_Sender",
    task: str,
    prompts: list[Prompt],
    repeat: int,
    finished: Finished,
    note: Callable[[RequestRecord], None],
) -> None:
    """Keep `concurrency` conversations going until every prompt had its turn, in the order given."""
    waiting = iter(prompts)

    async def work() -> None:
        for prompt in waiting:
            await sender.converse(task, prompt, repeat, finished, note)

    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(sender.options.concurrency):
                group.create_task(work())
    except* UserError as errors:  # what is raised in here would be wrapped in a group again
        failure = errors.exceptions[0]
    if failure:
        raise failure


class _Sender:
    """Sends a variant's requests to its server."""

    def __init__(
        self, client: "AsyncOpenAI", endpoint: Endpoint, variant: str, options: BenchOptions, origin: float
    ) -> None:
        self.client, self.endpoint, self.variant, self.options, self.origin = client, endpoint, variant, options, origin

    async def request(self, key: RequestKey, messages: list[dict[str, str]], max_tokens: int) -> RequestRecord:
        return await send(
            self.client,
            self.endpoint.model,
            messages,
            key,
            max_tokens=max_tokens,
            temperature=self.options.temperature,
            seed=self.options.seed + key.repeat,
            origin=self.origin,
        )

    async def warm_up(self) -> None:
        """A round of every stream, not recorded: a server's first requests pay for its caches and compilation."""
        messages = [{"role": "user", "content": _WARM_UP_PROMPT}]
        tokens = min(_WARM_UP_TOKENS, self.options.max_tokens)
        for start in range(0, max(2, self.options.concurrency), self.options.concurrency):
            keys = [RequestKey(self.variant, "warm-up", str(start + i), 0, 0) for i in range(self.options.concurrency)]
            for record in await asyncio.gather(*(self.request(key, messages, tokens) for key in keys)):
                if record.error:
                    raise UserError(f"{self.variant}: the warm-up request failed ({record.error}).")

    async def converse(
        self, task: str, prompt: Prompt, repeat: int, finished: Finished, note: Callable[[RequestRecord], None]
    ) -> None:
        """All turns of one prompt; what an earlier start has finished is taken from there."""
        messages = [dict(message) for message in prompt.messages]
        for turn in range(prompt.num_turns):
            if turn:
                messages.append({"role": "user", "content": prompt.follow_ups[turn - 1]})
            key = RequestKey(self.variant, task, prompt.prompt_id, turn, repeat)
            record = finished.get(key)
            if record is None:
                record = await self.request(key, messages, self.options.max_tokens)
                note(record)
            if record.error:
                if not await asyncio.to_thread(self.endpoint.health):
                    raise UserError(f"{self.variant}: the server stopped answering during {task} ({record.error}).")
                return
            messages.append({"role": "assistant", "content": record.text})


def _reconcile(
    endpoint: Endpoint, variant: str, task: str, before: Acceptance | None, measured: list[RequestRecord]
) -> Point:
    """Read the counters until they agree with the requests or have had their time to settle."""
    deadline = time.perf_counter() + _COUNTERS_SETTLE_S
    while True:
        after = endpoint.acceptance_counters()
        point = Point(
            variant=variant,
            task=task,
            num_requests=len(measured),
            num_failed=sum(not record.ok for record in measured),
            requests=pooled_acceptance(measured),
            counters=after - before if after and before else after,
        )
        if point.agrees is not False or time.perf_counter() > deadline:
            return point
        time.sleep(0.1)
