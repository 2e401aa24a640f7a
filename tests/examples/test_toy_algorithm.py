"""The algorithm that the developer guide walks through: one line in the table, and everything else works with it."""

import pytest
import torch
from heads.config import HeadsConfig
from tiny import tiny_draft, tiny_row, tiny_verifier

from speculators import algorithms
from speculators.replay import replay


@pytest.fixture
def draft(tmp_path, monkeypatch):
    monkeypatch.setitem(algorithms.ALGORITHMS, "heads", algorithms.Entry(HeadsConfig, "heads.objective"))
    return tiny_draft(tiny_verifier(tmp_path / "v"), "heads", loss_fn="ce")


def test_its_tensors_are_those_that_its_config_names_and_the_config_survives_the_disk(draft):
    shapes = {name: tuple(tensor.shape) for name, tensor in draft.checkpoint_tensors().items()}
    assert shapes == draft.config.tensor_shapes()
    assert HeadsConfig.from_json(draft.config.to_json(), "config.json") == draft.config


def test_it_learns_a_text_and_the_walk_accepts_what_the_objective_counts(draft):
    batch = tiny_row(lengths=(14,))
    batch = batch._replace(ids=batch.ids % 8 + 1)
    before = replay(draft, [batch])[0][1]
    optimizer = torch.optim.AdamW(draft.module.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        output = draft.step(batch, torch.Generator())
        (output.loss_sum / output.num_targets).backward()
        optimizer.step()
    after = replay(draft, [batch])[0][1]
    teacher_forced = output.histogram.tolist()
    assert teacher_forced == [0, 0, 0, sum(teacher_forced)], "every target of the text is known by heart"
    assert after.length > before.length
    assert after.conditional[:2] == (1.0, 1.0), "nothing but the text's end is rejected"


def test_it_never_sees_the_features_of_the_token_just_emitted(draft):
    batch, t = tiny_row(lengths=(14,)), 6
    changed = batch._replace(aux_hidden=batch.aux_hidden.clone())
    changed.aux_hidden[t:] += 3
    before, after = draft.accepted_from_every_position(batch), draft.accepted_from_every_position(changed)
    assert torch.equal(before[: t + 1], after[: t + 1])
