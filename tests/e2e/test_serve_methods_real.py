"""Every way to serve on real vLLM in eager mode, one server each: it answers, its counters agree with its answers, and
with a draft the text and the samples stay the plain verifier's. Untrained drafts do: that must hold for any draft."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import requests
from observed import EAGER, SPECULATING, Observed, assert_lossless, observe, sample_alike

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from tiny_models import write_random_draft

from serve.endpoint import Endpoint
from serve.program import find
from serve.quantize import fp8_unsupported_reason, quantize_fp8
from serve.spec import draft_spec, extraction_spec, free_port, method_spec, plain_spec
from serve.state import ENVIRONMENT_VARIABLE, ServerState
from serve.vllm import running
from serve.vllm_side.entry import group_members, shared_memory

pytestmark = pytest.mark.e2e


class Background(NamedTuple):
    """The plain server was in the background: what its commands said, in order, and what it answered."""

    told: dict[str, subprocess.CompletedProcess[str]]
    url: str
    left_behind: set[int]
    observed: Observed


@pytest.fixture(scope="module")
def background(verifier_dir, tmp_path_factory):
    """Started, looked at, asked, and stopped twice, by commands alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path_factory.mktemp("state")))
        told = {}

        def command(name, *arguments):
            words = [sys.executable, "-m", "speculators", "serve", *map(str, arguments)]
            told[name] = subprocess.run(words, capture_output=True, text=True, timeout=600)
            return told[name]

        try:
            started = command(
                "start", verifier_dir, "--port", free_port(), "--daemon", "plain", "--wait", "--json", *EAGER
            )
            assert started.returncode == 0, started.stderr
            url = json.loads(started.stdout)["url"]
            leader = ServerState.read("plain").server.pid
            command("status", "status", "plain", "--json")
            observed = observe(Endpoint.connect(url), seed=0)
            command("logs", "logs")
        finally:
            command("stop", "stop")
        left_behind = group_members(leader)
        command("stop again", "stop")
        command("stop by name", "stop", "plain")
        command("status again", "status", "--json")
        yield Background(told, url, left_behind, observed)


def test_a_server_in_the_background_is_started_looked_at_and_stopped_by_commands(background):
    told = background.told
    (before,) = json.loads(told["status"].stdout)["servers"]
    assert (before["name"], before["status"], before["url"]) == ("plain", "ready", background.url)
    assert "Application startup complete" in told["logs"].stdout
    assert told["stop"].stdout == "plain stopped\n"
    assert not background.left_behind
    for again, sentence in (
        ("stop again", "NAME is missing, and there is no server in the background"),
        ("stop by name", "plain: no server in the background has this name"),
    ):
        assert told[again].returncode == 2
        assert sentence in told[again].stderr
        assert told[again].stderr.count("\n") == 1
    assert json.loads(told["status again"].stdout) == {"servers": []}


def shared_memory_of_children() -> set[Path]:
    """The shared-memory segments that servers started by this process have mapped; other programs have theirs."""
    leaders = " ".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")).split()
    return {Path(name) for leader in leaders for name in shared_memory(int(leader))}


@pytest.mark.parametrize(("algorithm", "tokens"), [("eagle3", None), ("dflash", 4)])
def test_an_untrained_draft_changes_nothing_but_the_counters(background, verifier_dir, tmp_path, algorithm, tokens):
    draft = write_random_draft(tmp_path / algorithm, algorithm, verifier_dir)
    spec = draft_spec(draft, num_speculative_tokens=tokens, extra_args=SPECULATING)
    with running(spec, tmp_path / "log") as endpoint:
        assert endpoint.max_model_len() == 256
        observed = observe(endpoint, seed=10_000 if algorithm == "eagle3" else 20_000)
        assert_lossless(observed, background.observed)
        acceptance = endpoint.acceptance_counters()
        segments = shared_memory_of_children()
    assert sample_alike(observed, background.observed)
    assert acceptance.num_speculative_tokens == spec.num_speculative_tokens == (tokens or 3)
    assert acceptance.steps > 400
    assert 1.0 <= acceptance.length < 1.2
    assert segments, "vLLM's processes talk through shared memory"
    assert [path for path in segments if path.exists()] == []


def test_a_smaller_model_that_is_mostly_right_changes_nothing_either(background, verifier_dir, tmp_path):
    """The verifier drafts for itself, so that acceptance is what is exercised: with greedy decoding, nearly always."""
    spec = method_spec(
        verifier_dir, "draft_model", draft=str(verifier_dir), num_speculative_tokens=2, extra_args=SPECULATING
    )
    with running(spec, tmp_path / "log") as endpoint:
        assert_lossless(observe(endpoint), background.observed)
        assert endpoint.acceptance_counters().length > 2
        assert sample_alike(observe(endpoint, num_prompts=1, seed=30_000), background.observed)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_repeating_the_context_changes_nothing_either(background, verifier_dir, tmp_path, method):
    if method == "suffix" and not find().has_arctic:
        pytest.skip("suffix decoding needs arctic-inference")
    with running(method_spec(verifier_dir, method, extra_args=SPECULATING), tmp_path / "log") as endpoint:
        assert_lossless(observe(endpoint), background.observed)
        assert endpoint.acceptance_counters().accepted > 0


def test_the_fp8_verifier_that_we_quantise_answers_alone_and_with_a_draft(verifier_dir, tmp_path):
    reason = fp8_unsupported_reason()
    if reason:
        pytest.skip(reason)
    quantize_fp8(verifier_dir, tmp_path / "fp8")
    with running(plain_spec(tmp_path / "fp8", extra_args=EAGER), tmp_path / "log") as endpoint:
        plain = observe(endpoint)
    draft = write_random_draft(tmp_path / "dflash", "dflash", verifier_dir)
    spec = draft_spec(draft, verifier=tmp_path / "fp8", extra_args=SPECULATING)
    with running(spec, tmp_path / "log") as endpoint:
        assert_lossless(observe(endpoint), plain)
        assert endpoint.acceptance_counters().num_speculative_tokens == 7


def test_an_extraction_server_answers_a_chat_and_names_the_file_of_its_states(verifier_dir, tmp_path):
    states = tmp_path / "states"
    states.mkdir()
    with running(extraction_spec(verifier_dir, (2, 15), states, extra_args=SPECULATING), tmp_path / "log") as endpoint:
        observe(endpoint, num_prompts=2)
        body = {"model": endpoint.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        answer = requests.post(f"{endpoint.base_url}/v1/chat/completions", json=body, timeout=300).json()
        file = Path(answer["kv_transfer_params"]["hidden_states_path"])
        deadline = time.monotonic() + 30
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert file.parent == states
        assert file.stat().st_size > 0
