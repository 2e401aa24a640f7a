"""The files in examples/ are what they say they are: each resolves, its sizes follow from the verifier's config, and
the commands beside it exist. The hardware they name and vLLM are stood in for; nothing is trained or served."""

import importlib
import json
import math
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from fake_vllm import environment

from bench.suite import BenchOptions
from bench.tasks import select
from speculators import doctor_states
from speculators.algorithms import lookup
from speculators.cli import COMMANDS
from speculators.cli.options import options_from_file, resolve
from speculators.data.hidden_states import CacheManifest, HiddenStateCache, HiddenStates
from speculators.data.samples import (
    FORMAT_VERSION,
    SPLITS,
    DataDirectory,
    DataManifest,
    SplitStats,
    TokenizedSample,
    sample_id,
)
from speculators.schema import write_json
from speculators.training import dry_run
from speculators.training.options import TrainOptions
from speculators.verifier import Verifier

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.parent for path in (ROOT / "examples").glob("*/bench.yaml"))
RUNS = sorted((ROOT / "examples").glob("*/run*.yaml"))
GPU_BYTES = 80 << 30
TOKENS, SUPERVISED = 64, 48  # of a sample


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "examples"))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hardware that the files are for: one device of 80 GiB and a large disk."""
    monkeypatch.setattr(doctor_states, "memory_bytes", lambda device: (GPU_BYTES, GPU_BYTES))
    for module in (doctor_states, dry_run):
        monkeypatch.setattr(module, "free_bytes", lambda path: 1 << 42)


def write_data(path: Path, verifier: Verifier) -> list[TokenizedSample]:
    """A data directory of a few short conversations, no special token among them."""
    samples = []
    for number in range(10):
        ids = (1000 + number + 7 * np.arange(TOKENS)).astype(np.int32)
        samples.append(TokenizedSample(sample_id(ids), f"c{number}", "", ids, np.arange(TOKENS) >= TOKENS - SUPERVISED))
    train, held_out = samples[:8], samples[8:]
    counts = np.bincount(np.concatenate([s.ids[s.loss_mask] for s in train]), minlength=verifier.vocab_size)
    stats = {name: SplitStats.of(part) for name, part in zip(SPLITS, (train, held_out), strict=True)}
    manifest = DataManifest(
        format_version=FORMAT_VERSION,
        verifier=verifier.path,
        verifier_revision=verifier.revision,
        template_hash=verifier.template_hash,
        max_length=TOKENS,
        validation_share=0.2,
        vocab_size=verifier.vocab_size,
        splits=stats,
    )
    DataDirectory.write(path, manifest, counts, {"train": train, "validation": held_out})
    return samples


def write_states(path: Path, verifier: Verifier, layers: tuple[int, ...], samples: list[TokenizedSample]) -> None:
    cache = HiddenStateCache.create(path, CacheManifest.of(verifier, layers))
    for sample in samples:
        aux = torch.ones(TOKENS, len(layers), verifier.hidden_size, dtype=torch.bfloat16)
        cache.write(sample.sample_id, HiddenStates(torch.from_numpy(sample.ids), aux, aux[:, 0].clone()))


def given(run: Path, **changes: Any) -> TrainOptions:
    """The options of a run file, as `--config` reads them."""
    return resolve(TrainOptions, {**options_from_file(run, TrainOptions), **changes})


@cache
def weights_by_hand(run: Path) -> int:
    """Numbers in the matrices that are trained: fc, and of each layer q, k, v, o, gate, up and down."""
    options = given(run)
    facts = Verifier.read(run.parent / "verifier")
    H, heads, kv = facts.hidden_size, facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    assert options.aux_layer_ids
    fc = H * H * len(options.aux_layer_ids)
    eagle3 = options.speculator_type == "eagle3"
    layers = options.num_layers or 1
    widths = [2 * H if eagle3 and n == 0 else H for n in range(layers)]
    return fc + sum(heads * w + 2 * kv * w + heads * H + 3 * H * facts.intermediate_size for w in widths)


@pytest.mark.parametrize("run", RUNS, ids=name_of)
@pytest.mark.usefixtures("one_gpu")
def test_a_run_file_is_a_run_of_the_size_that_its_readme_says(run: Path, tmp_path: Path) -> None:
    verifier = Verifier.read(run.parent / "verifier")
    samples = write_data(tmp_path / "data", verifier)
    options = given(run)
    places = {"verifier": verifier.path, "data": tmp_path / "data", "output": tmp_path / "run"}
    if options.hidden_states:
        assert options.aux_layer_ids
        write_states(tmp_path / "states", verifier, options.aux_layer_ids, samples)
        places["hidden_states"] = tmp_path / "states"
    flags = [word for name, value in places.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = importlib.import_module(COMMANDS["train"].module).command
    shown = CliRunner().invoke(command, ["--config", str(run), *flags, "--dry-run", "--json"])
    assert shown.exit_code == 0, (shown.output, shown.exception)
    promised = json.loads(shown.stdout)
    matrices = promised["trained_weights"] - promised["parts"]["norms"]
    assert matrices == weights_by_hand(run)
    assert promised["parts"]["norms"] < matrices / 1000
    memory = promised["memory"]
    assert memory["weights_bytes"] == memory["gradients_bytes"] == 4 * promised["trained_weights"]
    readme = (run.parent / "README.md").read_text(encoding="utf-8")
    row = next(line for line in readme.splitlines() if line.startswith(f"| `{run.name}`"))
    said = [cell.strip() for cell in row.strip("|").split("|")]
    assert said[1:] == [
        options.speculator_type,
        str(promised["num_speculative_tokens"]),
        f"{promised['trained_weights'] / 1e6:,.0f} million",
        f"{promised['memory_bytes'] / 2**30:.0f} GiB",
        f"{promised['checkpoint_bytes'] / 2**30:.0f} GiB",
        f"{CacheManifest.of(verifier, options.aux_layer_ids or ()).token_bytes / 1000:.0f} kB",
    ]
    assert not (tmp_path / "run").exists()


def write_draft(run_directory: Path, run: Path) -> None:
    """The checkpoint that a run file would leave, all weights zero: a sparse file, its first tokens the vocabulary."""
    verifier = Verifier.read(run.parent / "verifier")
    options = given(run, verifier=verifier.path)
    assert options.aux_layer_ids
    config = lookup(options.speculator_type).config.from_options(verifier, options, options.aux_layer_ids)
    directory = run_directory / "checkpoints" / "step-1"
    write_json(directory / "config.json", config.to_json())
    width = {"d2t": ("I64", 8), "t2d": ("BOOL", 1)}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in config.tensor_shapes().items():
        kind, size = width.get(name, ("BF16", 2))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size * math.prod(shape)]}
        end += size * math.prod(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.seek(start + header["t2d"]["data_offsets"][0])
        file.write(b"\x01" * config.draft_vocab_size)
        file.truncate(start + end)
    write_json(run_directory / "best.json", {"checkpoint": "step-1", "step": 1, "acceptance_length": 2.0})


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("vllm") / "env")


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_a_suite_measures_the_drafts_that_the_run_files_train(
    example: Path, vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = options_from_file(example / "bench.yaml", BenchOptions)
    runs_dir = Path(suite["runs_dir"])
    for run in sorted(example.glob("run*.yaml")):
        output = given(run).output
        assert output.parent == runs_dir
        assert given(run).verifier == suite["verifier"]
        write_draft(tmp_path / output, run)
    assert {task.group for task in select(tuple(suite["tasks"]))} == set(suite["tasks"])
    monkeypatch.chdir(tmp_path)
    # The public tasks are files that would have to be fetched.
    asked = ["--suite", str(example / "bench.yaml"), "--verifier", str(example / "verifier"), "--vllm", str(vllm)]
    command = importlib.import_module(COMMANDS["bench"].module).command
    shown = CliRunner().invoke(command, [*asked, "--tasks", "builtin_code", "--dry-run"])
    assert shown.exit_code == 0, (shown.output, shown.exception)
    for algorithm, tokens in (("eagle3", 3), ("dflash", 7)):
        assert f"  {algorithm}: {(tmp_path / runs_dir / algorithm).resolve()}" in shown.output
        assert f"{algorithm}/checkpoints/step-1 (K = {tokens})" in shown.output
    assert not (tmp_path / suite["output"]).exists()


def commands(readme: Path) -> list[list[str]]:
    """The words of each `speculators` command in the code blocks, after that word; a loop's variable is 0."""
    blocks = re.findall(r"```bash\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").replace("$i", "0").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[line.index("speculators") + 1 :] for line in words if "speculators" in line]


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_the_commands_in_a_readme_exist_and_name_files_that_do(example: Path) -> None:
    found = commands(example / "README.md")
    stages = ["regenerate", "prepare", "extract", "doctor", "train", "serve", "bench", "gate"]
    assert set(stages) <= {words[0] for words in found}
    assert f"examples/{example.name}/run-gpus.yaml" in {word for words in found for word in words}
    for name, *arguments in found:
        command = importlib.import_module(COMMANDS[name].module).command
        command.make_context(name, list(arguments))  # refuses a flag or a value that the command does not know
        assert all((ROOT / word).is_file() for word in arguments if word.startswith("examples/"))
