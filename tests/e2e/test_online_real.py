"""Training on hidden states that real vLLM gives while the draft trains: kept, they train the same draft; a killed
server that comes back is met again; nothing stays in memory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from data_directories import write_samples

from serve.endpoint import is_healthy
from serve.spec import free_port
from serve.vllm_side.entry import group_members
from speculators import checkpoint
from speculators.data.samples import TokenizedSample, sample_id
from speculators.verifier import Verifier

pytestmark = pytest.mark.e2e

NUM_SAMPLES = 24


@pytest.fixture(scope="module")
def data(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of 60 to 200 tokens of text, the second half of each supervised."""
    verifier = Verifier.read(verifier_dir)
    text = " ".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("*/test_*.py"))[:12])
    ids = np.array(verifier.tokenizer(text)["input_ids"], dtype=np.int32)
    generator = np.random.default_rng(1)
    samples = []
    for i in range(NUM_SAMPLES):
        length = int(generator.integers(60, 200))
        start = int(generator.integers(0, len(ids) - length))
        part = ids[start : start + length]
        samples.append(TokenizedSample(sample_id(part), f"c{i}", "", part, np.arange(length) >= length // 2))
    path = tmp_path_factory.mktemp("online") / "data"
    counts = np.bincount(ids, minlength=verifier.vocab_size)
    write_samples(path, verifier, {"train": samples}, max_length=200, token_counts=counts)
    return path


def train_command(verifier_dir: Path, data: Path, output: Path, *more: object) -> list[str]:
    options = ("--verifier", verifier_dir, "--data", data, "--output", output, "--speculator-type", "eagle3")
    small = ("--row-length", 400, "--draft-vocab-size", 2048, "--validate-every", 0, "--save-every", 0)
    return [sys.executable, "-m", "speculators", "train", *map(str, (*options, *small, *more))]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_server_of_its_own_gives_the_states_and_kept_they_train_the_same_draft(verifier_dir, data, tmp_path):
    cache = ("--hidden-states", tmp_path / "hs")
    online = train_command(
        verifier_dir, data, tmp_path / "online", "--vllm-endpoint", "auto", "--on-generate", "cache", *cache
    )
    process = subprocess.Popen(online, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, stderr = process.communicate(timeout=900)
    assert process.returncode == 0, stderr[-4000:]
    assert not list(Path("/dev/shm").glob(f"speculators-hs-{process.pid}-*"))
    assert len(list((tmp_path / "hs").glob("*/*.safetensors"))) == NUM_SAMPLES

    offline = train_command(verifier_dir, data, tmp_path / "offline", *cache)
    done = subprocess.run(offline, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    drafts = [checkpoint.read_tensors(checkpoint.resolve(tmp_path / name)) for name in ("online", "offline")]
    assert all(torch.equal(tensor, drafts[1][name]) for name, tensor in drafts[0].items())


def served(verifier_dir: Path, storage: Path, port: int) -> "subprocess.Popen[bytes]":
    """A running extraction server of the three default layers."""
    command = [sys.executable, "-m", "speculators", "serve", str(verifier_dir), "--hidden-states-path", str(storage)]
    command += ["--port", str(port), "--enforce-eager", "--max-model-len", "256"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not is_healthy(f"http://127.0.0.1:{port}"):
        assert process.poll() is None
        time.sleep(0.5)
    return process


def steps_of(run: Path) -> list[int]:
    file = run / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row["step"] for row in rows if row["kind"] == "step"]


def test_a_killed_server_that_comes_back_is_met_again_and_no_step_is_lost(verifier_dir, data, tmp_path):
    storage, run, port = tmp_path / "storage", tmp_path / "run", free_port()
    storage.mkdir()
    server = served(verifier_dir, storage, port)
    endpoint = ("--vllm-endpoint", f"http://127.0.0.1:{port}", "--storage-path", storage, "--epochs", 12)
    command = train_command(verifier_dir, data, run, *endpoint)
    log = (tmp_path / "log").open("wb")
    training = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        while len(steps_of(run)) < 4:
            assert training.poll() is None, (tmp_path / "log").read_text()[-4000:]
            time.sleep(0.1)
        (leader,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        while group_members(int(leader)):  # the guard ends its vLLM, and the port is free again
            time.sleep(0.1)
        at_kill = len(steps_of(run))
        server = served(verifier_dir, storage, port)
        training.wait(timeout=900)
    finally:
        training.kill()
        training.wait()
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
        log.close()
    assert training.returncode == 0, (tmp_path / "log").read_text()[-4000:]
    steps = steps_of(run)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > at_kill + 5, "the server was killed in mid-training"
    assert not (run / "skipped.jsonl").exists()
    assert not list(storage.iterdir()), "vLLM's files were read and deleted"
