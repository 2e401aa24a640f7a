"""`--from-pretrained`: structure and vocabulary come from the draft, contradictions are named."""

import shutil
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from foreign_drafts import write_ours, write_research
from tiny import H, V, tiny_draft, tiny_verifier, tiny_vocab

from speculators import checkpoint
from speculators.data.hidden_states import CacheManifest, HiddenStateCache, HiddenStates
from speculators.data.samples import FORMAT_VERSION, DataDirectory, DataManifest, SplitStats, TokenizedSample, sample_id
from speculators.errors import UserError
from speculators.schema import read_json_dict
from speculators.training.launch import build, train
from speculators.training.options import TrainOptions
from speculators.training.parallel import Ranks
from speculators.training.pretrained import read_start

# The data's own map would keep the high ids, the draft's keeps the low ones; 7 is the mask token.
COUNTS = np.where(np.arange(V) == 7, 0, np.arange(V)).astype(np.int64)


@pytest.fixture
def root(tmp_path):
    verifier = tiny_verifier(tmp_path / "v")
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    cache = HiddenStateCache.create(tmp_path / "cache", CacheManifest.of(verifier, (1, 2, 4, 5)))
    splits = {"train": [], "validation": []}
    for i in range(10):
        ids = random.integers(8, V, 12).astype(np.int32)  # without the mask token
        sample = TokenizedSample(sample_id(ids), str(i), "made up", ids, np.arange(12) >= 3)
        splits["validation" if i < 2 else "train"].append(sample)
        aux = torch.randn(12, 4, H, generator=generator).bfloat16()
        cache.write(sample.sample_id, HiddenStates(torch.from_numpy(ids), aux, aux[:, 0].contiguous()))
    stats = {n: SplitStats(samples=len(s), tokens=12 * len(s), supervised_tokens=9 * len(s)) for n, s in splits.items()}
    manifest = DataManifest(
        format_version=FORMAT_VERSION, verifier=verifier.path, verifier_revision=verifier.revision,
        template_hash=verifier.template_hash, max_length=64, validation_share=0.2, vocab_size=V, splits=stats,
    )  # fmt: skip
    DataDirectory.write(tmp_path / "data", manifest, COUNTS, splits)
    return tmp_path


def options_of(root, source, algorithm="eagle3", **changes):
    fixed = {
        "verifier": str(root / "v"), "data": root / "data", "hidden_states": root / "cache", "output": root / "run",
        "speculator_type": algorithm, "from_pretrained": source, "row_length": 64, "max_steps": 2, "epochs": 3,
        "device": "cpu", "precision": "float32", "validate_every": 0, "save_every": 1,
    }  # fmt: skip
    return TrainOptions(**fixed | changes)


def pretrained(root, algorithm="eagle3", **options):
    draft = tiny_draft(tiny_verifier(root / "v"), algorithm, **options)
    return draft, write_ours(root / "draft", draft)


def trainer_of(options):
    with ExitStack() as opened:
        return build(options, Ranks(0, 1, torch.device("cpu")), opened)


@pytest.mark.parametrize(
    ("algorithm", "structure"),
    [
        ("eagle3", {"num_layers": 2, "norm_output": True, "fc_norm": True}),
        ("dflash", {"block_size": 4, "sliding_window": 6, "learn_mask_embedding": True}),
    ],
)
def test_a_run_starts_with_the_drafts_weights_structure_and_map(root, algorithm, structure):
    draft, source = pretrained(root, algorithm, **structure)
    algorithm = trainer_of(options_of(root, source, algorithm)).algorithm
    assert algorithm.config == draft.config
    assert np.array_equal(algorithm.vocab.t2d, tiny_vocab().t2d)
    assert algorithm.vocab.coverage == pytest.approx(COUNTS[:24].sum() / COUNTS.sum())
    for name, parameter in algorithm.module.named_parameters():
        assert torch.equal(parameter, draft.module.get_parameter(name).bfloat16().float()), name


def test_a_foreign_draft_trains_on_with_its_own_output_rows(root):
    draft, _ = pretrained(root)
    source = write_research(root / "foreign", draft)
    result = train(options_of(root, source))
    saved = checkpoint.read_tensors(root / "run" / "checkpoints" / "step-00000002")
    assert result.steps == 2
    assert torch.equal(saved["lm_head.weight"], (draft.head.output_DH + 0.5).bfloat16())
    assert not torch.equal(saved["fc.weight"], draft.module.fc.weight.bfloat16())
    record = read_json_dict(root / "run" / "pretrained.json", "")
    assert (record["source"], record["format"], len(record["sha256"])) == (str(source), "eagle3 research", 64)


def test_a_continued_run_needs_its_source_no_more_and_loses_nothing(root):
    _, source = pretrained(root)
    whole = train(options_of(root, source, output=root / "whole"))
    train(options_of(root, source))
    shutil.rmtree(root / "run" / "checkpoints" / "step-00000002")
    before = (root / "run" / "pretrained.json").read_text()
    shutil.rmtree(source)
    result = train(options_of(root, source))
    assert (root / "run" / "pretrained.json").read_text() == before
    ends = [checkpoint.read_tensors(checkpoint.resolve(root / name)) for name in ("whole", "run")]
    assert result.steps == whole.steps
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"draft_vocab_size": 30}, "--draft-vocab-size: 30 contradicts .* whose draft has 24"),
        ({"aux_layer_ids": (1, 2, 4)}, "--aux-layer-ids: 1,2,4 contradicts .* whose draft has 2,4,5"),
        ({"num_layers": 2}, "--num-layers: 2 contradicts"),
        ({"norm_output": True}, "--norm-output: True contradicts"),
        ({"speculator_type": "dflash"}, "--speculator-type: dflash contradicts .* whose draft has eagle3"),
    ],
)
def test_an_option_that_contradicts_the_draft_is_one_sentence(root, changes, sentence):
    _, source = pretrained(root)
    with pytest.raises(UserError, match=sentence):
        read_start(options_of(root, source, **changes), tiny_verifier(root / "v"))
    same = {"draft_vocab_size": 24, "aux_layer_ids": (2, 4, 5), "num_layers": 1, "norm_output": False}
    assert read_start(options_of(root, source, **same), tiny_verifier(root / "v"))


def test_a_longer_chain_is_no_contradiction(root):
    _, source = pretrained(root)
    verifier = tiny_verifier(root / "v")
    assert read_start(options_of(root, source), verifier).config.ttt_steps == 3
    assert read_start(options_of(root, source, ttt_steps=5), verifier).config.num_speculative_tokens == 5


def test_the_saved_run_says_only_what_was_asked_so_that_it_runs_again(root):
    saved = options_of(root, "draft").model_dump(mode="json")
    assert not {"draft_vocab_size", "num_layers", "norm_output", "ttt_steps"} & set(saved)
    assert options_of(root, "draft", draft_vocab_size=24).model_dump()["draft_vocab_size"] == 24
    assert options_of(root, None).model_dump()["draft_vocab_size"] == 8192
