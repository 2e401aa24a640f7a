"""The bar that data commands show on stderr."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def progress_bar(command: str, *fields: str) -> "Progress":
    """A bar with done of all, the task fields named, the time so far and the time left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    told = [TextColumn(f"{{task.fields[{field}]}}") for field in fields]
    counted = (TextColumn(command), BarColumn(), MofNCompleteColumn())
    return Progress(*counted, *told, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
