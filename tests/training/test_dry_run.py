"""What a dry run promises is what the run has: steps, weights, bytes of checkpoints and of kept activations."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_verifier

sys.path.append(str(Path(__file__).parents[1]))
from doctored import flags, make_world, options

from speculators import cli
from speculators.algorithms import lookup, objective_of
from speculators.algorithms.base import Algorithm, Batch
from speculators.data.vocab import VocabMap
from speculators.training import estimate
from speculators.training.dry_run import dry_run
from speculators.training.launch import train
from speculators.training.options import TrainOptions


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


def everything(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


@pytest.mark.parametrize(("algorithm", "optimizer"), [("eagle3", "adamw"), ("dflash", "muon")])
def test_a_run_is_as_its_dry_run_said(world: Path, algorithm: str, optimizer: str) -> None:
    asked = options(world, algorithm, optimizer=optimizer, output=world / algorithm, epochs=2, accumulate=2)
    before = everything(world)
    promised = dry_run(asked)
    assert everything(world) == before
    result = train(asked)
    assert result
    assert (result.steps, result.tokens) == (promised.total_steps, 2 * promised.tokens)
    files = (Path(result.checkpoint) / "model.safetensors", Path(result.checkpoint) / "training" / "state.safetensors")
    tensors = [tensor for file in files for tensor in load_file(file).values()]
    assert sum(tensor.nbytes for tensor in tensors) == promised.checkpoint_bytes
    assert all(value is not None for name, value in promised.options.items() if name in ("lr", "num_layers"))
    assert promised.options["aux_layer_ids"] == [2, 4, 5]


def test_the_command_prints_one_document_and_starts_nothing(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["speculators", "train", *flags(world, "eagle3"), "--dry-run", *more])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0
        return capsys.readouterr().out

    before = everything(world)
    document = json.loads(call("--json"))
    assert document["memory_bytes"] == sum(document["memory"].values())
    assert sum(document["parts"].values()) == document["trained_weights"]
    text = call()
    assert "--warmup-share" in text
    assert f"{document['trained_weights']:,} trained weights" in text
    assert everything(world) == before


def large_draft(path: Path, algorithm: str, **changes: object) -> Algorithm:
    """Wide enough that activations, not odd indices, make up the memory."""
    H, vocabulary = 96, 500
    sizes = {"hidden_size": H, "intermediate_size": 256, "num_attention_heads": 3, "num_key_value_heads": 1}
    verifier = tiny_verifier(path, **sizes, head_dim=32, vocab_size=vocabulary, max_position_embeddings=1024)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    ends = {name: torch.randn(vocabulary, H).bfloat16() for name in names}
    save_file({**ends, "model.norm.weight": torch.ones(H).bfloat16()}, path / "model.safetensors")
    here = {"verifier": verifier.path, "data": "d", "hidden_states": "h", "output": "o", "draft_vocab_size": 200}
    own = {"mask_token_id": 499} if algorithm == "dflash" else {}
    asked = TrainOptions(**here, speculator_type=algorithm, **own, **changes)
    config = lookup(algorithm).config.from_options(verifier, asked, (2, 4, 5))
    vocab = VocabMap.from_counts(np.arange(vocabulary, 0, -1), 200)
    return objective_of(config).build(config, verifier, vocab, asked)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_trained_weights_are_the_modules_parameters(tmp_path: Path, algorithm: str) -> None:
    draft = large_draft(tmp_path / "v", algorithm)
    real = {name: tuple(p.shape) for name, p in draft.module.named_parameters()}
    assert estimate.trained_shapes(draft.config) == real
    assert sum(estimate.parts(draft.config).values()) == sum(p.numel() for p in draft.module.parameters())


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [("eagle3", {}), ("eagle3", {"num_layers": 2, "ttt_steps": 4}), ("dflash", {"max_anchors": 24})],
)
def test_kept_activations_are_as_large_as_the_tensors_kept(
    tmp_path: Path, algorithm: str, changes: dict[str, int], bf16: bool
) -> None:
    tokens, supervised = 256, 160
    draft = large_draft(tmp_path / "v", algorithm, **changes)
    positions = torch.arange(tokens)
    row = Batch(
        ids=torch.randint(0, 200, (tokens,)),
        positions=positions,
        document_ids=torch.zeros(tokens, dtype=torch.int64),
        loss_mask=positions >= tokens - supervised,
        aux_hidden=torch.randn(tokens, 3, 96).bfloat16(),
        last_hidden=torch.randn(tokens, 96).bfloat16(),
        sample_ids=("x",),
    )
    weights = {p.untyped_storage().data_ptr() for p in draft.module.parameters()}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (row.aux_hidden, row.last_hidden)}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        output = draft.step(row, torch.Generator().manual_seed(0))
    assert output.num_targets
    real = sum(storage.nbytes() for storage in kept.values())
    promised = estimate.kept_bytes(draft.config, draft.options, estimate.Row(tokens, supervised, 2 if bf16 else 4))  # type: ignore[attr-defined]
    assert promised == pytest.approx(real, rel=0.25)


def test_kept_checkpoints_are_never_fewer_than_best_and_last_and_one_being_written(world: Path) -> None:
    def kept(steps: int = 100, **changes: object) -> int:
        return estimate.checkpoints_kept(options(world, **changes), steps)

    assert kept(save_total_limit=1) == 3
    assert kept(save_total_limit=3, save_every=10) == 4
    assert kept(save_total_limit=None, save_every=10) == 11
    assert kept(steps=1) == 2
