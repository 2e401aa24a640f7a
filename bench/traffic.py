"""Conversations sent to one server at one load: in flight or by arrival, turn after turn, each request written down."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.client import Sampling, send
from bench.load import Load, arrival_times_s
from bench.prompts import Prompt
from bench.records import RequestKey, RequestRecord
from serve.endpoint import Endpoint
from speculators.errors import UserError

if TYPE_CHECKING:
    from aiohttp import ClientSession

Finished = dict[RequestKey, RequestRecord]
Note = Callable[[RequestRecord], None]

_WARM_UP_PROMPT = "Describe in a few sentences how a bicycle works."
_WARM_UP_TOKENS = 48
_MIN_WARM_UPS = 2


class Scope(NamedTuple):
    """Which variant, pass, load and repeat requests belong to."""

    variant: str
    pass_index: int
    load: Load
    repeat: int = 0

    def key(self, task: str, prompt_id: str, turn: int) -> RequestKey:
        """The request of one turn."""
        return RequestKey(self.variant, task, prompt_id, turn, self.repeat, self.load.name, self.pass_index)


class Traffic(NamedTuple):
    """Sends to one server.

    Attributes:
        cache_salt: differs between measurements, so that none finds another's prompts in the prefix cache.
        finished: what needs no second try; answers of earlier starts are taken from there.
        note: called with every new record.
    """

    client: "ClientSession"
    endpoint: Endpoint
    sampling: Sampling
    cache_salt: str
    origin: float
    finished: Finished
    note: Note

    async def warm_up(self, scope: Scope) -> None:
        """A round of every stream, not recorded: a server's first requests pay for its caches and compilation."""
        messages = [{"role": "user", "content": _WARM_UP_PROMPT}]
        tokens = min(_WARM_UP_TOKENS, self.sampling.max_tokens)
        number = scope.load.warm_up_requests
        for start in range(0, max(_MIN_WARM_UPS, number), number):
            keys = [scope.key("warm-up", str(start + i), 0) for i in range(number)]
            for record in await asyncio.gather(*(self._send(key, messages, max_tokens=tokens) for key in keys)):
                if record.error:
                    raise UserError(f"{scope.variant}: the warm-up request failed ({record.error}).")

    async def run(self, scope: Scope, task: str, prompts: Sequence[Prompt]) -> None:
        """Have every conversation that is not finished, in the order given.

        Raises:
            UserError: the server stopped answering.
        """
        waiting = [prompt for prompt in prompts if not self._is_finished(scope, task, prompt)]
        if scope.load.rate is None:
            await self._closed_loop(scope, task, waiting)
        else:
            await self._open_loop(scope, task, waiting, scope.load.rate)

    def _is_finished(self, scope: Scope, task: str, prompt: Prompt) -> bool:
        return all(scope.key(task, prompt.prompt_id, turn) in self.finished for turn in range(prompt.num_turns))

    async def _closed_loop(self, scope: Scope, task: str, prompts: Sequence[Prompt]) -> None:
        """Keep `concurrency` conversations going until every prompt had its turn."""
        waiting = iter(prompts)

        async def work() -> None:
            for prompt in waiting:
                await self._converse(scope, task, prompt)

        await _all(work() for _ in range(scope.load.concurrency or 1))

    async def _open_loop(self, scope: Scope, task: str, prompts: Sequence[Prompt], rate: float) -> None:
        """Start each conversation when it is due, however many are still going on."""
        start = time.perf_counter()
        dues = [start + after for after in arrival_times_s(rate, len(prompts), self.sampling.seed + scope.repeat)]

        async def arrive(prompt: Prompt, due: float) -> None:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            await self._converse(scope, task, prompt, due)

        await _all(arrive(prompt, due) for prompt, due in zip(prompts, dues, strict=True))

    async def _converse(self, scope: Scope, task: str, prompt: Prompt, due: float | None = None) -> None:
        """All turns of one prompt. Later turns are due when the answer before them is there."""
        messages = [dict(message) for message in prompt.messages]
        for turn in range(prompt.num_turns):
            if turn:
                messages.append({"role": "user", "content": prompt.follow_ups[turn - 1]})
            key = scope.key(task, prompt.prompt_id, turn)
            record = self.finished.get(key)
            if record is None:
                record = await self._send(key, messages, due=due if turn == 0 else None)
                self.note(record)
            if record.skipped:
                for later in range(turn + 1, prompt.num_turns):
                    self.note(record.model_copy(update={"turn": later}))
                return
            if record.error:
                if not await asyncio.to_thread(self.endpoint.health):
                    raise UserError(f"{scope.variant}: the server stopped answering during {task} ({record.error}).")
                return
            messages.append({"role": "assistant", "content": record.text})

    async def _send(
        self,
        key: RequestKey,
        messages: Sequence[dict[str, str]],
        due: float | None = None,
        max_tokens: int | None = None,
    ) -> RequestRecord:
        sampling = self.sampling._replace(
            max_tokens=max_tokens or self.sampling.max_tokens,
            seed=self.sampling.seed + key.repeat,
            cache_salt=_salt(self.cache_salt, key.point, key.repeat, key.task),
        )
        return await send(self.client, self.endpoint.model, messages, key, sampling, origin=self.origin, due=due)


def _salt(*parts: object) -> str:
    """Equal for equal parts; a hash, since vLLM refuses long salts and some characters."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


async def _all(jobs: "Any") -> None:
    """Run all jobs; what one of them raises ends the others and is raised as it is."""
    failure: BaseException | None = None
    work: list[Coroutine[Any, Any, None]] = list(jobs)
    try:
        async with asyncio.TaskGroup() as group:
            for job in work:
                group.create_task(job)
    except* UserError as errors:  # what is raised in here would be wrapped in a group again
        failure = errors.exceptions[0]
    if failure:
        raise failure
