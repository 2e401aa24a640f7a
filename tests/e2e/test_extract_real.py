"""`speculators extract` against real vLLM: interrupted and continued, it equals what transformers computes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data_directories import write_samples

from serve.vllm_side.entry import group_members
from speculators.data.samples import DataDirectory, TokenizedSample, sample_id
from speculators.verifier import Verifier

pytestmark = pytest.mark.e2e

NUM_SAMPLES = 60
NUM_COMPARED = 4
COSINE = 0.98


@pytest.fixture(scope="module")
def data(verifier_dir, tmp_path_factory):
    """Samples of 40 to 300 tokens of text."""
    verifier = Verifier.read(verifier_dir)
    text = " ".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("*/test_*.py"))[:12])
    ids = np.array(verifier.tokenizer(text)["input_ids"], dtype=np.int32)
    generator = np.random.default_rng(0)
    samples = []
    for i in range(NUM_SAMPLES):
        length = int(generator.integers(40, 300))
        start = int(generator.integers(0, len(ids) - length))
        part = ids[start : start + length]
        samples.append(TokenizedSample(sample_id(part), f"c{i}", "", part, np.ones(length, bool)))
    path = tmp_path_factory.mktemp("extract") / "data"
    write_samples(path, verifier, {"train": samples}, max_length=300)
    return path


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_interrupted_extraction_leaves_nothing_continues_and_equals_transformers(verifier_dir, data, tmp_path):
    import torch

    from speculators.data.extract_local import LocalSource
    from speculators.data.hidden_states import HiddenStateCache

    output = tmp_path / "hs"
    command = [sys.executable, "-m", "speculators", "extract", "--verifier", verifier_dir, "--data", data]
    command += ["--output", output, "--concurrency", "4"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while len(list(output.glob("*/*.safetensors"))) < 5:
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.05)
    groups = children_of(first.pid)
    first.send_signal(signal.SIGINT)
    first.wait(timeout=60)
    assert first.returncode == 130, first.stderr.read()
    assert not any(group_members(group) for group in groups)
    done = {path: path.stat().st_mtime_ns for path in output.glob("*/*.safetensors")}
    assert 5 <= len(done) < NUM_SAMPLES
    assert not list(output.glob("**/.*"))
    assert not list(Path("/dev/shm").glob(f"speculators-hs-{first.pid}-*"))

    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert f"{NUM_SAMPLES - len(done)} new" in again.stdout
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in done.items())

    verifier = Verifier.read(verifier_dir)
    layers = verifier.default_aux_layer_ids()
    cache = HiddenStateCache.open(output, verifier, layers)
    local = LocalSource(verifier, layers)
    for sample in DataDirectory(data).split("train")[:NUM_COMPARED]:
        served, computed = cache.read(sample.sample_id, sample.ids), local(sample.sample_id, sample.ids)
        assert torch.equal(served.ids, computed.ids)
        pairs = [(served.aux_hidden[:, i], computed.aux_hidden[:, i]) for i in range(len(layers))]
        for layer, (a, b) in zip((*layers, "last"), (*pairs, (served.last_hidden, computed.last_hidden)), strict=True):
            similar = torch.cosine_similarity(a.float(), b.float(), dim=-1)
            assert similar.min() >= COSINE, (layer, similar.min())
    assert os.path.getsize(output / "vllm.log") > 0
