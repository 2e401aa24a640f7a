"""What a user of a running server sees: a chat answer, greedy answers, samples, and counters that agree with them.

Everything is asked through the OpenAI client. Per-request numbers are summed here and compared with `/metrics`.
"""

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import requests

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from lossless import Greedy, two_sample_p, unexplained_difference

from bench.builtin_prompts import BUILTIN_CODE, BUILTIN_REASONING
from serve.endpoint import Endpoint
from speculators.acceptance import Acceptance

PROMPTS = (*BUILTIN_REASONING, *BUILTIN_CODE)
assert len(PROMPTS) == 40
EAGER = ("--enforce-eager", "--max-model-len", "256", "--enable-per-request-metrics")
SPECULATING = (*EAGER, "--per-request-spec-decode-metrics", "summary")
MAX_TOKENS = 24
NUM_SAMPLES = 400
OPEN_PROMPT = "Name any animal, fruit, city or tool that comes to your mind. Answer with one or two words."
_STREAMS = 8
# A request with a seed whose prompt is computed in parts ends a CPU engine ("CPU Generator does not use offset", 0.32).
_AT_ONCE = 25
_SETTLE_S = 20.0  # a counter is written a moment after the answer


class Observed(NamedTuple):
    """Answers of one server: greedy ones to `PROMPTS`, and the first three tokens of 400 samples."""

    greedy: list[Greedy]
    samples: list[tuple[int, ...]]


def observe(endpoint: Endpoint, *, num_prompts: int = len(PROMPTS), seed: int | None = None) -> Observed:
    """Ask, and check that the counters agree with the answers.

    Args:
        seed: of the first sample; each server needs its own (`lossless`). None draws no samples.
    """
    from openai import OpenAI

    client = OpenAI(base_url=f"{endpoint.base_url}/v1", api_key="none", timeout=600, max_retries=0)
    before = _Counters.read(endpoint)
    chat = client.chat.completions.create(
        model=endpoint.model,
        messages=[{"role": "user", "content": "Explain why the sky is blue."}],
        max_tokens=16,
        temperature=0,
    )
    assert len(str(chat.choices[0].message.content)) > 10, chat
    with ThreadPoolExecutor(_STREAMS) as pool:
        answers = list(pool.map(lambda prompt: _greedy(client, endpoint.model, prompt), PROMPTS[:num_prompts]))
    _check_counters(endpoint, before, [chat, *answers])
    samples = [] if seed is None else _samples(client, endpoint.model, seed)
    return Observed([_tokens(answer) for answer in answers], samples)


def assert_lossless(served: Observed, plain: Observed) -> None:
    """The draft's server writes the plain one's text."""
    for prompt, mine, reference in zip(PROMPTS, served.greedy, plain.greedy, strict=False):
        assert not (reason := unexplained_difference(mine.token_ids, reference)), (prompt, reason)


def sample_alike(served: Observed, plain: Observed) -> bool:
    """Whether the first three tokens, one by one and together, may be from one distribution (level 0.0003 each)."""
    pairs = [([s[at] for s in served.samples], [s[at] for s in plain.samples]) for at in range(3)]
    return all(two_sample_p(mine, others) > 0.0003 for mine, others in [*pairs, (served.samples, plain.samples)])


def _greedy(client: Any, model: str, prompt: str) -> Any:
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
        extra_body={"return_tokens_as_token_ids": True},
    )


def _tokens(answer: Any) -> Greedy:
    def token_id(token: str) -> int:
        return int(token.removeprefix("token_id:"))

    places = answer.choices[0].logprobs.content
    likeliest = [{token_id(top.token): top.logprob for top in place.top_logprobs} for place in places]
    return Greedy([token_id(place.token) for place in places], likeliest)


def _samples(client: Any, model: str, seed: int) -> list[tuple[int, ...]]:
    """vLLM gives each of the n answers of a request its own seed, counted up from the request's."""
    found = []
    for i in range(NUM_SAMPLES // _AT_ONCE):
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": OPEN_PROMPT}],
            max_tokens=3,
            temperature=1,
            n=_AT_ONCE,
            seed=seed + i * _AT_ONCE,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        found += [tuple(choice.model_extra["token_ids"]) for choice in answer.choices]
    assert {len(sample) for sample in found} == {3}
    return found


class _Counters(NamedTuple):
    """Of the whole server since its start."""

    prompt_tokens: int
    output_tokens: int
    acceptance: Acceptance | None

    @classmethod
    def read(cls, endpoint: Endpoint) -> "_Counters":
        text = requests.get(f"{endpoint.base_url}/metrics", timeout=60).text

        def total(name: str) -> int:
            return int(sum(map(float, re.findall(rf"^vllm:{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE))))

        return cls(total("prompt_tokens"), total("generation_tokens"), endpoint.acceptance_counters())


def _check_counters(endpoint: Endpoint, before: _Counters, answers: list[Any]) -> None:
    """Tokens and accepted tokens by `/metrics` are the sums over the answers."""
    prompt_tokens = before.prompt_tokens + sum(answer.usage.prompt_tokens for answer in answers)
    output_tokens = before.output_tokens + sum(answer.usage.completion_tokens for answer in answers)
    accepted = before.acceptance
    for answer in answers if accepted else ():
        told = answer.model_extra["metrics"]["speculative_decoding"]
        if told:  # ngram and suffix may find nothing to propose
            accepted += Acceptance(histogram=tuple(told["acceptance_histogram"]), drafted=told["num_draft_tokens"])
    wanted = _Counters(prompt_tokens, output_tokens, accepted)
    deadline = time.monotonic() + _SETTLE_S
    while (found := _Counters.read(endpoint)) != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == wanted
