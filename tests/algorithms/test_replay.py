"""The walk of draft and verify over known accepted counts."""

import numpy as np
from tiny import document_of, tiny_draft, tiny_row, tiny_verifier

from speculators.acceptance import Acceptance
from speculators.prediction import Prediction, SamplePrediction
from speculators.replay import replay, walk


def test_the_walk_jumps_accepted_plus_one_from_the_first_answer_token():
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1, 1, 1], dtype=bool)
    accepted = np.array([9, 9, 2, 9, 9, 0, 1, 9, 0, 9])
    # 2 accepts 2 -> 5 accepts 0 -> 6 accepts 1 -> 8 accepts 0 -> 9 is the last token
    assert walk(accepted, mask, 3).histogram == (2, 1, 1, 0)


def test_tokens_beyond_the_answer_are_not_accepted():
    mask = np.array([0, 1, 1, 1, 0, 0], dtype=bool)
    assert walk(np.full(6, 3), mask, 3).histogram == (0, 0, 1, 0)


def test_each_answer_of_a_conversation_is_walked_on_its_own():
    mask = np.array([0, 1, 1, 0, 0, 1, 1, 1], dtype=bool)
    assert walk(np.zeros(8, dtype=int), mask, 2).histogram == (3, 0, 0)


def test_a_walk_emits_every_answer_token_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        mask = np.zeros(40, dtype=bool)
        mask[5:33] = True
        acceptance = walk(rng.integers(0, 5, 40), mask, 4)
        # 28 tokens, the first of which is not drafted; a step that accepts the last one adds a bonus token beyond it.
        assert acceptance.accepted + acceptance.steps in (27, 28)


def test_documents_of_a_row_are_walked_as_if_alone(tmp_path):
    draft = tiny_draft(tiny_verifier(tmp_path / "v"), "eagle3")
    draft.head.output_DH, draft.head.embedding_VH = draft.head.output_DH.float(), draft.head.embedding_VH.float()
    row = tiny_row(lengths=(9, 12))
    alone = [replay(draft, [document_of(row, n)])[0] for n in range(2)]
    assert replay(draft, [row]) == alone


def test_a_prediction_adds_up_by_source():
    parts = [("a", "chat", (3, 1)), ("b", "code", (0, 4)), ("c", "chat", (1, 0))]
    samples = [
        SamplePrediction(sample_id=i, conversation_id=i, source=s, acceptance=Acceptance.from_histogram(h))
        for i, s, h in parts
    ]
    prediction = Prediction.of("draft", samples, 1)
    assert prediction.by_source["chat"].histogram == (4, 1)
    assert prediction.total.histogram == (4, 5)
