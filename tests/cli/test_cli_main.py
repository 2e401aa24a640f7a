"""The command line as a whole: exit codes, one sentence an error, what Ctrl-C leaves, and a help that loads little."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from speculators import __version__, cli

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from fake_vllm import environment
from tiny_models import write_models

INTERRUPTED = "Interrupted; what was finished is kept, start the same command again to continue."
TRAIN = ("train", "--data", "d", "--hidden-states", "h", "--output", "o")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli-main")
    write_models(root, "dflash")
    environment(root / "vllm")
    return root


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[object, str, str]]:
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def call(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["speculators", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return call


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `speculators report` end with `error`."""
    import speculators.cli.report
    from speculators.cli.options import schema_command

    def fail(_: object) -> None:
        raise error

    made = schema_command(speculators.cli.report.ReportOptions, fail)
    monkeypatch.setattr(speculators.cli.report, "command", made)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (cli.UserError("here: wrong; do it so."), 2, "Error: here: wrong; do it so.\n"),
        (KeyboardInterrupt(), 130, INTERRUPTED + "\n"),
        (typer.Exit(0), 0, ""),
        (typer.Exit(1), 1, ""),
        (typer.Exit(130), 130, ""),
        (SystemExit(7), 7, ""),
    ],
)
def test_each_end_has_its_exit_code_and_its_sentence(run, monkeypatch, error, code, said) -> None:
    raising(monkeypatch, error)
    assert run("report", "somewhere") == (code, "", said)


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch) -> None:
    raising(monkeypatch, ZeroDivisionError("ours"))
    monkeypatch.setattr(sys, "argv", ["speculators", "report", "somewhere"])
    with pytest.raises(ZeroDivisionError, match="ours"):
        cli.main()


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--version",), *((name, "--help") for name in cli.COMMANDS)])
def test_help_and_version_are_results(run, arguments) -> None:
    code, stdout, stderr = run(*arguments)
    assert (code, stderr) == (0, "")
    assert ("Usage: speculators" in stdout) != (stdout.strip() == __version__)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("trian",), "unknown command 'trian' (did you mean train?)"),
        (("xyzzy",), "unknown command 'xyzzy'; commands are fetch, regenerate"),
        (("--surprise",), "speculators: No such option: --surprise; see `speculators --help`."),
        (("report", "--margn", "0.1", "x"), "speculators report: No such option: --margn"),
        (("report", "--margin", "many", "x"), "speculators report: Invalid value for '--margin'"),
        (("report", "--margin", "7", "x"), "--margin: Input should be less than 1 (value seen: 7.0)"),
        (("bench", "--compare"), "see `speculators bench --help`."),
        (("gate", "x", "y"), "unexpected extra argument"),
        (("report",), "RUN is missing"),
        (("report", "/nowhere"), "/nowhere/run.json: no such file"),
        ((*TRAIN, "--verifier", "{place}/verifier", "--speculator-type", "eagel3"), "unknown algorithm 'eagel3'"),
        (
            (*TRAIN, "--verifier", "{place}/verifier", "--speculator-type", "eagle3", "--block-size", "8"),
            "--block-size 8: an option of dflash, which eagle3 does not have",
        ),
        (("bench", "--compare", "eagel3", "--runs-dir", "{place}"), "unknown variant 'eagel3'; known are eagle3"),
        (("bench", "--compare", "{place}/dflash", "--tasks", "cod"), "unknown task 'cod'; known are code"),
    ],
)
def test_what_a_user_can_fix_is_one_sentence(run, place, arguments, sentence) -> None:
    assert_one_sentence(run(*(argument.format(place=place) for argument in arguments)), sentence)


@pytest.mark.parametrize(
    "arguments",
    [
        ("regenerate", "--verifier", "/nowhere", "--prompts", "p.jsonl", "--output", "o.jsonl"),
        ("prepare", "--verifier", "/nowhere", "--data", "d.jsonl", "--output", "o"),
        ("extract", "--verifier", "/nowhere", "--data", "d", "--output", "o"),
        (*TRAIN, "--verifier", "/nowhere", "--speculator-type", "dflash"),
        ("replay", "{place}/dflash", "--verifier", "/nowhere", "--answers", "a.jsonl"),
        ("serve", "/nowhere"),
        ("serve", "{place}/dflash", "--verifier", "/nowhere"),
        ("quantize", "/nowhere", "--output", "o"),
        ("bench", "--verifier", "/nowhere", "--compare", "{place}/dflash", "--tasks", "builtin_code"),
    ],
)
def test_a_verifier_that_does_not_exist_is_named_by_every_command(run, place, monkeypatch, tmp_path, arguments) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECULATORS_VLLM", str(place / "vllm"))
    assert_one_sentence(run(*(argument.format(place=place) for argument in arguments)), "/nowhere")
    assert list(tmp_path.iterdir()) == []


def assert_one_sentence(ended: tuple[object, str, str], sentence: str) -> None:
    code, stdout, stderr = ended
    assert (code, stdout) == (2, ""), stderr
    assert stderr.startswith("Error: ")
    assert stderr.count("\n") == 1, stderr
    assert stderr.endswith(".\n")
    assert sentence in stderr


def test_a_real_process_ends_with_the_sentence_and_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-m", "speculators", "trian"], capture_output=True, text=True)
    assert_one_sentence((done.returncode, done.stdout, done.stderr), "did you mean train?")


def test_sigterm_ends_an_event_loop_as_ctrl_c_does() -> None:
    cancelled = []

    async def wait() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    signal.signal(signal.SIGTERM, cli.end_as_interrupted)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(wait())
    assert cancelled == [True]  # the task was told, not hit by an exception in the middle of the loop


def test_sigterm_ends_a_command_that_ignores_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, cli.end_as_interrupted)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_says_how_to_go_on_and_leaves_no_server(place, tmp_path, signum) -> None:
    pids, asked = tmp_path / "pids", tmp_path / "pids.asked"
    given = ("--compare", place / "dflash", "--tasks", "builtin_code", "--output", tmp_path / "bench")
    process = subprocess.Popen(
        [sys.executable, "-m", "speculators", "bench", *map(str, given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SPECULATORS_VLLM": str(place / "vllm"), "FAKE_PIDS": str(pids)},
    )
    while process.poll() is None and not asked.exists():
        time.sleep(0.02)
    process.send_signal(signum)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, ""), stderr
    assert stderr.splitlines()[-1] == INTERRUPTED, stderr
    assert "Traceback" not in stderr
    assert not [pid for pid in pids.read_text().split() if running(pid)]


def running(pid: str) -> bool:
    """Whether the process lives; an ended one that nobody has waited for yet does not."""
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from speculators.cli import main; sys.argv = ['speculators', '--help']\n"
        "try: main()\n"
        "finally: print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "bench" in done.stdout
    heavy = {"torch", "transformers", "pydantic", "numpy", "pandas", "plotly", "openai", "requests", "yaml", "asyncio"}
    assert not heavy & set(done.stderr.split())
