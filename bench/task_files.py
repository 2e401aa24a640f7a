"""Tasks from files and from the hub: the user's own traffic, and collections such as RedHatAI/speculator_benchmarks.

One row is one conversation, told as `prompt` (text), `turns` (the user's texts, as in SPEED-Bench) or `messages` (role
and content). A directory's JSONL files are one task each. A hub id needs the package `datasets`.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.prompts import Prompt, Task, user
from speculators.errors import UserError

OWN = "own"
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<subset>[\w.-]+))?")


def tasks_of(name: str) -> list[Task] | None:
    """The tasks that a file, a directory or a hub id stands for; None if `name` looks like none of them.

    Raises:
        UserError: no such file, or a directory without JSONL files. Rows are read, and complained about, later.
    """
    path = Path(name)
    if path.is_dir():
        files = sorted(path.rglob("*.jsonl"))
        if not files:
            raise UserError(f"--tasks: {path} holds no .jsonl file; give a directory with one for each subset.")
        return [_file_task(file, path) for file in files]
    if name.endswith(".jsonl") or path.is_file():
        if not path.is_file():
            raise UserError(
                f"--tasks: {path}: no such file; give a task's name or a JSONL file with prompt, messages or turns."
            )
        return [_file_task(path, path.parent)]
    hub = _HUB_ID.fullmatch(name)
    if hub is None or path.parent.is_dir():
        return None
    dataset, subset = hub["id"], hub["subset"]
    return [Task(subset or dataset.rpartition("/")[2], OWN, lambda: _from_hub(dataset, subset))]


def _file_task(path: Path, root: Path) -> Task:
    return Task(path.relative_to(root).with_suffix("").as_posix(), OWN, lambda: _read_file(path))


def _read_file(path: Path) -> list[Prompt]:
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines: records may hold U+2028
        rows = [(f"{path}: line {number}", json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"--tasks: {path} cannot be read as JSONL ({error}).") from None
    return _from_rows(rows, str(path))


def _from_hub(dataset: str, subset: str | None) -> list[Prompt]:
    """All splits' rows of a data set; `subset` is one of its configurations, or one of its JSONL files."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"--tasks: {dataset} is on the hub, and the package datasets is not installed; install it with "
            "`pip install datasets`, or give the files of a local copy."
        ) from None
    try:
        named = subset in datasets.get_dataset_config_names(dataset) if subset else False
        chosen: dict[str, str] = {}
        if subset:
            chosen = {"name": subset} if named else {"data_files": f"**/{subset}.jsonl"}
        splits = datasets.load_dataset(dataset, **chosen)
        rows = [(f"{dataset}: {name} row {i}", row) for name in splits for i, row in enumerate(splits[name])]
    except Exception as error:  # whatever the hub, the network or a data set's own files raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--tasks: {dataset} cannot be loaded ({reason}); check its id, subset and the network."
        ) from None
    return _from_rows(rows, dataset)


def _from_rows(rows: Iterable[tuple[str, Any]], source: str) -> list[Prompt]:
    prompts = [_from_row(row, where, str(position)) for position, (where, row) in enumerate(rows)]
    if not prompts:
        raise UserError(f"--tasks: {source} is empty; give one JSON object a line, with prompt, messages or turns.")
    return prompts


def _from_row(row: Any, where: str, prompt_id: str) -> Prompt:
    row = row if isinstance(row, dict) else {}
    prompt, turns, messages = row.get("prompt"), row.get("turns"), row.get("messages")
    if isinstance(prompt, str) and prompt:
        return Prompt(prompt_id, (user(prompt),))
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return Prompt(prompt_id, (user(turns[0]),), tuple(turns[1:]))
    if isinstance(messages, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        plain = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        while plain and plain[-1]["role"] == "assistant":  # the recorded answer is what the verifier now writes itself
            plain.pop()
        if plain:
            return Prompt(prompt_id, tuple(plain))
    found = ", ".join(row) or "no keys"
    raise UserError(
        f"--tasks: {where} has {found}; it needs `prompt` (text), `turns` (texts) or `messages` (role, content)."
    )
