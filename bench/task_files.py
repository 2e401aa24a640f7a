"""Tasks from files and from the hub: the user's own traffic, and collections such as RedHatAI/speculator_benchmarks.

One row is one conversation, told as `prompt` (text), `turns` (the user's texts, as in SPEED-Bench) or `messages` (role
and content). A directory's JSONL and parquet files are one task each. A hub id needs the package `datasets`. The trap:
SPEED-Bench is published with many prompts masked by a notice, which any draft guesses; those rows are left out.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.prompts import Prompt, Task, user
from speculators.errors import UserError

OWN = "own"
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<subset>[\w.-]+))?")
_SUFFIXES = (".jsonl", ".parquet")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"

Rows = Iterator[tuple[str, Any]]


def tasks_of(name: str) -> list[Task] | None:
    """The tasks that a file, a directory or a hub id stands for; None if `name` looks like none of them.

    Raises:
        UserError: no such file, or a directory without files of rows. Rows are read, and complained about, later.
    """
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)
        if not files:
            raise UserError(
                f"--tasks: {path} holds no .jsonl or .parquet file; give a directory with one for each subset."
            )
        return _file_tasks(files, path)
    if path.suffix in _SUFFIXES or path.is_file():
        if not path.is_file():
            raise UserError(
                f"--tasks: {path}: no such file; give a task's name or a JSONL file with prompt, messages or turns."
            )
        return _file_tasks([path], path.parent)
    hub = _HUB_ID.fullmatch(name)
    if hub is None or path.parent.is_dir():
        return None
    dataset, subset = hub["id"], hub["subset"]
    return [Task(subset or dataset.rpartition("/")[2], OWN, lambda: from_hub(dataset, subset))]


def from_hub(dataset: str, subset: str | None = None, wording: Callable[[Any], Any] = lambda row: row) -> list[Prompt]:
    """All splits' rows of a data set.

    Args:
        subset: one of its configurations, or one of its JSONL files.
        wording: makes a row with prompt, messages or turns out of one of the data set's.

    Raises:
        UserError: the package `datasets` is missing, or the data set cannot be loaded or has other rows.
    """
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
        rows = [(f"{dataset}: {name} row {i}", wording(row)) for name in splits for i, row in enumerate(splits[name])]
    except Exception as error:  # whatever the hub, the network or a data set's own files raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--tasks: {dataset} cannot be loaded ({reason}); check its id, subset and the network."
        ) from None
    return _from_rows(rows, dataset)


def _file_tasks(files: list[Path], root: Path) -> list[Task]:
    """A task for each file, or for all shards of one."""
    shards: dict[str, list[Path]] = {}
    for file in files:
        shards.setdefault(_SHARD.sub("", file.relative_to(root).with_suffix("").as_posix()), []).append(file)
    return [Task(name, OWN, lambda parts=parts: _read_files(parts)) for name, parts in shards.items()]  # type: ignore[misc]


def _read_files(paths: list[Path]) -> list[Prompt]:
    rows = [row for path in paths for row in (_parquet if path.suffix == ".parquet" else _jsonl)(path)]
    return _from_rows(rows, ", ".join(map(str, paths)))


def _jsonl(path: Path) -> Rows:
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines: records may hold U+2028
        rows = [(f"{path}: line {number}", json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"--tasks: {path} cannot be read as JSONL ({error}).") from None
    yield from rows


def _parquet(path: Path) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"--tasks: {path}: parquet files need pyarrow; install it with `pip install pyarrow`."
        ) from None
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise UserError(f"--tasks: {path} cannot be read as parquet ({error}).") from None
    yield from ((f"{path}: row {number}", row) for number, row in enumerate(table.to_pylist(), 1))


def _from_rows(rows: Iterable[tuple[str, Any]], source: str) -> list[Prompt]:
    """Prompts are numbered by their row, so a masked one changes no other's id."""
    prompts = [_from_row(row, where, str(position)) for position, (where, row) in enumerate(rows)]
    if not prompts:
        raise UserError(f"--tasks: {source} is empty; give one JSON object a line, with prompt, messages or turns.")
    told = [prompt for prompt in prompts if not _is_masked(prompt)]
    if not told:
        raise UserError(
            f"--tasks: {source} has only masked prompts ({_MASKED} ...); complete it with its publisher's script first."
        )
    if len(told) < len(prompts):
        print(f"{source}: {len(prompts) - len(told)} of {len(prompts)} prompts are masked, left out.", file=sys.stderr)
    return told


def _is_masked(prompt: Prompt) -> bool:
    texts = [*(message["content"] for message in prompt.messages), *prompt.follow_ups]
    return any(text.startswith(_MASKED) for text in texts)


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
