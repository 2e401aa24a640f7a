"""Real vLLM, in eager mode, by the command: its text is what transformers computes, and nothing of it is left."""

import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import requests

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from tiny_models import write_random_draft

from serve.endpoint import Endpoint, is_healthy
from serve.spec import free_port, plain_spec
from serve.vllm import running
from serve.vllm_side.entry import group_members

pytestmark = pytest.mark.e2e

EAGER = ("--enforce-eager", "--max-model-len", "256")
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
NEAR_TIE = 0.5  # logits; bfloat16 kernels of two programs differ by a few tenths


@cache
def model_and_tokenizer(path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), AutoTokenizer.from_pretrained(path)


def assert_greedy(endpoint, verifier_dir):
    """Every served token has the verifier's highest logit, or one that is `NEAR_TIE` below it."""
    import torch

    model, tokenizer = model_and_tokenizer(verifier_dir)
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        body = {"model": endpoint.model, "prompt": ids, "max_tokens": 32, "temperature": 0, "return_token_ids": True}
        answer = requests.post(f"{endpoint.base_url}/v1/completions", json=body, timeout=300).json()
        served = answer["choices"][0]["token_ids"]
        assert len(served) >= 8
        with torch.no_grad():
            logits = model(torch.tensor([ids + served])).logits[0, len(ids) - 1 : -1].float()
        behind = logits.amax(dim=-1) - logits.gather(1, torch.tensor(served)[:, None])[:, 0]
        assert behind.max() <= NEAR_TIE, (prompt, behind)
        assert (behind == 0).float().mean() > 0.9


def check_acceptance(endpoint, num_speculative_tokens):
    """A random draft: nearly everything it proposes is refused."""
    acceptance = endpoint.acceptance_counters()
    assert acceptance.num_speculative_tokens == num_speculative_tokens
    assert acceptance.steps > 40
    assert 1.0 <= acceptance.length < 1.2


def test_the_command_serves_an_eagle3_draft_and_leaves_nothing_when_it_is_killed(verifier_dir, tmp_path):
    draft = write_random_draft(tmp_path / "eagle3", "eagle3", verifier_dir)
    port = free_port()
    command = [sys.executable, "-m", "speculators", "serve", draft, "--port", str(port), *EAGER]
    with (tmp_path / "log").open("wb") as log:
        serving = subprocess.Popen(command, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_healthy(url):
            assert serving.poll() is None, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.5)
        endpoint = Endpoint.connect(url)
        assert_greedy(endpoint, verifier_dir)
        check_acceptance(endpoint, 3)
        (leader,) = Path(f"/proc/{serving.pid}/task/{serving.pid}/children").read_text().split()
        assert len(group_members(int(leader))) >= 4  # server, guard, engine, worker
    finally:
        os.kill(serving.pid, signal.SIGKILL)
        serving.wait()
    deadline = time.monotonic() + 40
    while group_members(int(leader)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not group_members(int(leader))
    assert not is_healthy(url)


def test_what_kills_real_vllm_at_its_start_is_in_the_error(verifier_dir, tmp_path):
    from speculators.errors import UserError

    spec = plain_spec(verifier_dir, extra_args=(*EAGER, "--no-such-option"))
    with pytest.raises(UserError, match=r"died at its start .*unrecognized arguments: --no-such-option"):
        running(spec, tmp_path / "log").__enter__()
