"""A tiny verifier directory (config, byte-level BPE tokenizer, chat template; no weights) for the data tests."""

import json
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Drops the thinking of every answer but the last one, as several families do.
FORGETS_THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Puts something between the generation prompt's place and the answer that the generation prompt does not have.
CHANGES_PROMPT = CHATML.replace("message['role'] + '\n'", "message['role'] + ' says:\n'")
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('system is not supported') }}{% endif %}" + CHATML
)
# Shows tools and calls, and the reasoning of the last answer unless it is told not to think.
TOOLS_AND_REASONING = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.reasoning_content and loop.last %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message['content'] }}{% for call in message.tool_calls or [] %}"
    "{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)
NO_END = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

CORPUS = [
    "system\nuser\nassistant\nhello there, how are you?\n\n",
    "The answer is 42.\n\nThe answer\nis\n\n\nthat the answer is the answer.\n",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n" * 3,
]


def tiny_tokenizer(template: str | None = CHATML) -> Any:
    """A byte-level BPE whose merges include runs of newlines, so that text boundaries can merge."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    return fast


def write_verifier(path: Path, template: str | None = CHATML) -> Path:
    """A directory that `Verifier.read` accepts."""
    tokenizer = tiny_tokenizer(template)
    tokenizer.save_pretrained(path)
    config = {
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "vocab_size": len(tokenizer),
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as JSONL."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def chat(question: str, answer: str) -> list[dict[str, str]]:
    """One question, one answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
