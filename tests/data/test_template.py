"""Loss masks: exactly what the verifier writes is supervised; the prompt is exactly what the server would be fed."""

import numpy as np
import pytest
from chatml_verifier import CHANGES_PROMPT, FORGETS_THINKING, NO_END, NO_SYSTEM, chat, tiny_tokenizer

from speculators.data.template import HistoryRewrittenError, TemplateRefusedError, tokenize_conversation

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
CONVERSATIONS = [
    chat("hello", "The answer is 42."),
    chat("hello\n", "\n\nThe answer\n"),
    chat("", "def add(a, b):\n    return a + b\n\n"),
    [{"role": "system", "content": "how are you?"}, *chat("hello", "the answer"), *chat("print", "\nanswer \n\n")],
    [*chat("äöü \u2028 \U0001f600", "\U0001f600 ü"), *chat("and?", " 1"), *chat("\n", "x")],
    chat("hello", ""),
]


def served_prompt(messages):
    """What vLLM's chat endpoint feeds."""
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def supervised_runs(ids, mask):
    """Slow loop: the consecutive supervised token runs."""
    runs, current = [], []
    for token, supervised in zip(ids.tolist(), mask.tolist(), strict=True):
        if supervised:
            current.append(token)
        elif current:
            runs.append(current)
            current = []
    return runs + ([current] if current else [])


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_first_prompt_is_what_the_server_is_fed(messages):
    ids, mask = tokenize_conversation(TOKENIZER, messages)
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    prompt = served_prompt(messages[:first])
    assert ids[: len(prompt)].tolist() == prompt
    assert not mask[: len(prompt)].any()
    assert mask[len(prompt)]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_every_answer_is_supervised_with_its_end_token_and_nothing_else(messages):
    ids, mask = tokenize_conversation(TOKENIZER, messages)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    runs = supervised_runs(ids, mask)
    assert [TOKENIZER.decode(run[:-1]) for run in runs] == answers
    assert all(run[-1] == END for run in runs)


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_tokens_decode_to_the_rendered_conversation_up_to_its_last_end_token(messages):
    ids, _ = tokenize_conversation(TOKENIZER, messages)
    text = TOKENIZER.apply_chat_template(messages, tokenize=False)
    assert TOKENIZER.decode(ids) + "\n" == text


def test_a_newline_at_the_start_of_an_answer_does_not_merge_into_the_prompt():
    messages = chat("hello", "\n\nThe answer")
    whole = TOKENIZER(TOKENIZER.apply_chat_template(messages, tokenize=False), add_special_tokens=False)["input_ids"]
    prompt = served_prompt(messages[:1])
    assert whole[: len(prompt)] != prompt, "the premise: tokenised at once, the boundary merges"
    ids, _ = tokenize_conversation(TOKENIZER, messages)
    assert ids[: len(prompt)].tolist() == prompt


@pytest.mark.parametrize("messages", CONVERSATIONS[:5])
def test_an_answer_cut_at_its_limit_has_no_end_token(messages):
    ids, mask = tokenize_conversation(TOKENIZER, messages)
    cut_ids, cut_mask = tokenize_conversation(TOKENIZER, messages, "length")
    np.testing.assert_array_equal(cut_ids, ids[:-1])
    np.testing.assert_array_equal(cut_mask, mask[:-1])
    assert ids[-1] == END


def test_end_tokens_of_the_verifier_beat_the_tokenizers_own():
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    ids, _ = tokenize_conversation(TOKENIZER, chat("hello", "a<|im_start|>b"), eos_token_ids=(start,))
    assert ids[-1] == start


def test_a_template_without_end_token_supervises_the_answer_without_trailing_white_space():
    tokenizer = tiny_tokenizer(NO_END)
    ids, mask = tokenize_conversation(tokenizer, chat("hello", "The answer is 42."))
    assert tokenizer.decode(ids[mask]) == "The answer is 42."


def test_a_template_that_rewrites_history_is_noticed_and_the_last_answer_can_be_had():
    tokenizer = tiny_tokenizer(FORGETS_THINKING)
    messages = [*chat("hello", "hm</think>42"), *chat("sure?", "yes")]
    with pytest.raises(HistoryRewrittenError):
        tokenize_conversation(tokenizer, messages)
    ids, mask = tokenize_conversation(tokenizer, messages, only_last=True)
    assert tokenizer.decode(ids[mask]) == "yes<|im_end|>"
    assert "hm" not in tokenizer.decode(ids)


def test_a_template_whose_answered_prompt_differs_is_refused():
    with pytest.raises(HistoryRewrittenError, match="says"):
        tokenize_conversation(tiny_tokenizer(CHANGES_PROMPT), chat("hello", "hi"))


def test_a_template_that_raises_is_told_apart():
    with pytest.raises(TemplateRefusedError, match="system is not supported"):
        tokenize_conversation(tiny_tokenizer(NO_SYSTEM), [{"role": "system", "content": "x"}, *chat("hello", "hi")])
