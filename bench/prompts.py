"""What a task is made of: conversations to be had."""

from collections.abc import Callable
from typing import NamedTuple


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
    """A named set of prompts; one that is `by_name_only` is no part of what its group's name means."""

    name: str
    group: str
    load: Callable[[], list[Prompt]]
    by_name_only: bool = False


def user(text: str) -> dict[str, str]:
    """A message of the user's."""
    return {"role": "user", "content": text}
