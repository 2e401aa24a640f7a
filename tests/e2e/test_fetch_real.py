"""The real verifier and the real prompts, through to a prepared data directory."""

import json

import pytest

from bench.tasks import TASKS
from speculators.data.decontaminate import benchmark_grams, benchmark_prompts, shares_gram
from speculators.data.prepare import PrepareOptions, prepare, tokenize_conversation
from speculators.data.samples import DataDirectory
from speculators.data.sources import fetch_prompts, fetch_verifier
from speculators.verifier import Verifier

pytestmark = pytest.mark.e2e


def test_the_verifier_is_complete_and_fetched_once(verifier_dir):
    verifier = Verifier.read(verifier_dir)
    assert (verifier.num_layers, verifier.hidden_size, verifier.vocab_size, verifier.tied) == (30, 576, 49152, True)
    assert fetch_verifier(verifier_dir) is False


def test_it_answers_sensibly(verifier_dir):
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = Verifier.read(verifier_dir).tokenizer
    model = AutoModelForCausalLM.from_pretrained(verifier_dir, dtype=torch.bfloat16)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_no_fetched_prompt_shares_a_run_with_any_task_that_needs_no_hub(tmp_path):
    fetch_prompts(tmp_path / "prompts.jsonl", 1500, 0)
    texts = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().split("\n") if line]
    assert len(set(texts)) == 1500
    here = [
        prompt for task in TASKS.values() if not task.by_name_only for prompt in task.load()
    ]  # the rest is on a hub
    asked = [message["content"] for prompt in here for message in prompt.messages]
    later = [turn for prompt in here for turn in prompt.follow_ups]
    grams = benchmark_grams([*asked, *later, *benchmark_prompts()])
    assert not [text for text in texts if shares_gram(text, grams)]


def test_prompt_tokens_are_those_that_the_server_would_be_fed(verifier_dir, tmp_path):
    verifier = Verifier.read(verifier_dir)
    messages = [{"role": "user", "content": "Add 2 and 3.\n"}, {"role": "assistant", "content": "\n\n5"}]
    ids, mask = tokenize_conversation(verifier.tokenizer, messages, eos_token_ids=verifier.eos_token_ids)
    text = verifier.tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert ids[~mask].tolist() == verifier.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert verifier.tokenizer.decode(ids[mask]) == "\n\n5<|im_end|>"

    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    given = {"verifier": str(verifier_dir), "data": (tmp_path / "rows.jsonl",), "output": tmp_path / "data"}
    prepare(PrepareOptions(**given))
    assert DataDirectory(tmp_path / "data").split("train")[0].ids.tolist() == ids.tolist()
