"""The doctor's checks of the text: template, thinking, loss mask, mask token, vocabulary, anchors, duplicates, rope.

Each takes the facts and gives a finding, None where it does not apply. Large data is sampled, evenly over the split.
"""

import re
from typing import Any, NamedTuple

import numpy as np

from speculators.data.samples import TokenizedSample, sample_id
from speculators.data.vocab import VocabMap
from speculators.doctor_facts import Chat, Facts, Finding, share

THINKING: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    ("<|channel>thought", "<channel|>"),
)
"""How families mark thinking: its beginning and its end, as the tokenizer decodes them."""

_SAMPLES = 64
_MANY_SAMPLES = 2000
_DATE = re.compile(r"\d{1,2} [A-Z][a-z]{2,8} \d{4}|\d{4}-\d{2}-\d{2}")
_SENTINEL = "QQQQ"
_LOW_COVERAGE, _LOW_ANCHOR_SHARE = 0.9, 0.5


def template(facts: Facts) -> Finding | None:
    """Prompts of the data begin and end as the template, and so the chat endpoint, renders them."""
    name = "template"
    chat = Chat.of(facts.verifier)
    if chat is None:
        return Finding.ok(name, "the verifier has no chat template, so prompts are served as they were tokenised.")
    prompts = [chat.tokenizer.decode(_prompt(sample)) for sample in facts.samples(_SAMPLES) if len(_prompt(sample))]
    if not prompts:
        return None
    heads, end = _beginnings(chat), _end(chat)
    other_start = sum(not any(_dateless(prompt).startswith(head) for head in heads) for prompt in prompts)
    other_end = [prompt for prompt in prompts if not prompt.rstrip().endswith(end)]
    if other_end:
        tails = {
            thinking: _end(chat, enable_thinking=thinking)
            for thinking in (True, False)
            if _end(chat, enable_thinking=thinking) != end
        }
        for thinking, tail in tails.items():
            if all(prompt.rstrip().endswith(tail) for prompt in other_end):
                mode = str(thinking).lower()
                return Finding.warning(
                    name,
                    f"{share(len(other_end), len(prompts))} of the prompts were rendered with enable_thinking={mode}, "
                    f"which is not the template's default; serve with --default-chat-template-kwargs "
                    f"'{{\"enable_thinking\": {mode}}}' or regenerate in the mode that is served.",
                )
        return Finding.warning(
            name,
            f"{share(len(other_end), len(prompts))} of the prompts do not end in the template's generation prompt "
            f"{end[-40:]!r} (one ends in {other_end[0][-40:]!r}); the chat endpoint will feed something else than what "
            "is trained on, so run `speculators prepare` on the conversations.",
        )
    if other_start:
        return Finding.warning(
            name,
            f"{share(other_start, len(prompts))} of the prompts begin otherwise than the template renders them (with "
            f"{heads[0][:40]!r}); the chat endpoint will feed something else, so run `speculators prepare` again.",
        )
    return Finding.ok(name, f"{len(prompts)} sampled prompts begin and end as the chat template renders them.")


def thinking(facts: Facts) -> Finding | None:
    """A template that knows thinking and data without it do not go together, nor the other way round."""
    name = "thinking"
    chat = Chat.of(facts.verifier)
    samples = [sample for sample in facts.samples(_SAMPLES) if sample.loss_mask.any()]
    if chat is None or not samples:
        return None
    knows = "enable_thinking" in chat.template or any(
        mark in chat.template for open_close in THINKING for mark in open_close
    )
    count = sum(_thinks(chat.tokenizer, sample) for sample in samples)
    seen = f"{share(count, len(samples))} of the sampled answers contain thinking"
    if knows and not count:
        return Finding.warning(
            name,
            "the chat template knows thinking but no sampled answer contains any; served with thinking on, the draft "
            "meets text it never saw, so regenerate with thinking on or serve with it off (nothing to do for a "
            "verifier that never thinks).",
        )
    if count and not knows:
        return Finding.warning(
            name,
            f"{seen} but the chat template does not know it, so the verifier may never write any; regenerate the "
            "answers with this verifier.",
        )
    return Finding.ok(name, f"{seen}; the template {'knows' if knows else 'does not know'} thinking.")


def loss_mask(facts: Facts) -> Finding:
    """Some tokens are targets, and prompts are not."""
    name = "loss-mask"
    stats = facts.data.manifest.splits["train"]
    part = share(stats.supervised_tokens, stats.tokens)
    if not stats.supervised_tokens:
        return Finding.error(
            name,
            f"none of the {stats.tokens} training tokens is supervised, so nothing would be learned; run `speculators "
            "prepare` on conversations that have answers.",
        )
    samples = facts.samples(_MANY_SAMPLES)
    whole = sum(bool(sample.loss_mask.all()) for sample in samples)
    if whole:
        return Finding.warning(
            name,
            f"{share(whole, len(samples))} of the samples are supervised from their first token on, so prompts are "
            f"trained on, which is never drafted when served; set their loss_mask to 0 up to the answer.",
        )
    return Finding.ok(name, f"{part} of the training tokens are supervised, in no sample the whole text.")


def mask_token(facts: Facts) -> Finding | None:
    """The token in a block's empty slots never occurs in text."""
    name = "mask-token"
    token = getattr(facts.config, "mask_token_id", None)
    if token is None:
        return None
    special = {facts.verifier.pad_token_id: "pad", facts.verifier.bos_token_id: "BOS"}
    special |= dict.fromkeys(facts.verifier.eos_token_ids, "EOS")
    advice = "choose a token that never occurs (--mask-token-id) or leave the option out"
    if token in special:
        return Finding.error(name, f"{token} is the verifier's {special[token]} token, which text contains; {advice}.")
    found = sum(int(np.count_nonzero(sample.ids == token)) for sample in facts.samples(_MANY_SAMPLES))
    found = max(found, int(facts.data.token_counts[token]))
    if found:
        seen = f"{token} occurs at least {found} times in the data, so a slot looks like text"
        if facts.options.from_pretrained:
            return Finding.warning(name, f"{seen}; the draft to start from brings this token, so it stays.")
        return Finding.error(name, f"{seen}; {advice}.")
    return Finding.ok(name, f"{token} is no pad, EOS or BOS token and does not occur in the data.")


def rope(facts: Facts) -> Finding | None:
    """The draft rotates as the verifier does."""
    name = "rope"
    if facts.config is None:
        return None
    draft, verifier = facts.config.rope_parameters, facts.verifier.rope_parameters
    if _numbers(draft) != _numbers(verifier):
        keys = [key for key in sorted({*draft, *verifier}) if draft.get(key) != verifier.get(key)]
        return Finding.warning(
            name,
            f"the draft's {', '.join(f'{key} {draft.get(key)}' for key in keys)} differs from the verifier's "
            f"{', '.join(str(verifier.get(key)) for key in keys)}; vLLM rotates the draft as its own config says, so "
            "this is right only for a draft that was trained so.",
        )
    seen = f"the draft has the verifier's rotary parameters (theta {draft.get('rope_theta')})"
    if facts.verifier.rope_left_out:
        return Finding.ok(
            name,
            f"{seen}, without its {facts.verifier.rope_left_out} scaling, which training and vLLM compute differently.",
        )
    return Finding.ok(name, f"{seen}.")


def vocabulary(facts: Facts) -> Finding | None:
    """What the draft cannot propose it never gets right."""
    name = "vocabulary"
    if facts.vocab is None or np.isnan(facts.vocab.coverage):
        return None
    size, total = facts.vocab.draft_vocab_size, facts.verifier.vocab_size
    seen = f"a draft vocabulary of {size} covers {facts.vocab.coverage:.1%} of the supervised tokens"
    if size == total:
        return Finding.ok(name, f"the draft has the verifier's whole vocabulary of {total} tokens.")
    double = min(2 * size, total)
    better = VocabMap.from_counts(facts.data.token_counts, double, facts.verifier.eos_token_ids).coverage
    hint = f"--draft-vocab-size {double} would cover {better:.1%}"
    if facts.vocab.coverage < _LOW_COVERAGE:
        return Finding.warning(name, f"{seen}, the others are never proposed and end a draft; {hint}.")
    return Finding.ok(name, f"{seen}; {hint}.")


def anchors(facts: Facts) -> Finding | None:
    """A pass over the data trains on enough of it."""
    name = "anchors"
    block = getattr(facts.config, "block_size", None)
    samples = facts.samples(_MANY_SAMPLES)
    if block is None or not any(sample.loss_mask.any() for sample in samples):
        return None
    most, row_length = facts.options.max_anchors, facts.options.row_length
    covered = anchor_coverage(samples, most, block - 1, row_length)
    supervised = sum(int(sample.loss_mask.sum()) for sample in samples)
    a_row = supervised / max(1, sum(len(sample.ids) for sample in samples)) * row_length
    seen = f"{most} anchors for about {a_row:.0f} supervised tokens a row cover {covered:.0%} of them in a pass"
    if covered < _LOW_ANCHOR_SHARE:
        return Finding.warning(
            name, f"{seen}, the rest teaches nothing; raise --max-anchors, shorten --row-length or add --epochs."
        )
    return Finding.ok(name, f"{seen}.")


def duplicates(facts: Facts) -> Finding | None:
    """Validation text is not training text."""
    name = "duplicates"
    held_out = [_Marks.of(sample) for sample in facts.data.split("validation")]
    if not held_out:
        return None
    marks = {mark for sample in facts.data.split("train") for mark in _Marks.of(sample)}
    both = sum(any(mark in marks for mark in sample) for sample in held_out)
    if both:
        return Finding.warning(
            name,
            f"{share(both, len(held_out))} of the validation samples share conversation, prompt or tokens with a "
            "training sample, so validation looks better than serving will be; give the rows of one conversation one "
            "id and run `speculators prepare` again.",
        )
    return Finding.ok(name, f"none of the {len(held_out)} validation samples has its conversation in training.")


def anchor_coverage(samples: list[TokenizedSample], most: int, reach: int, row_length: int) -> float:
    """Expected share of supervised tokens that lie in a block, when a row draws `most` of its n candidate anchors.

    A token with w candidates among the `reach` tokens before it is missed with probability (1 - most / n) ** w, for
    large n; n is the mean over rows of `row_length` tokens.
    """
    tokens = sum(len(sample.ids) for sample in samples)
    windows = []
    candidates = 0
    for sample in samples:
        target = np.asarray(sample.loss_mask[1:], dtype=np.int64)
        candidates += int(target.sum())
        total = np.concatenate([[0], np.cumsum(target)])
        ends = np.arange(1, len(target) + 1)
        windows.append((total[ends] - total[np.maximum(0, ends - reach)])[target > 0])
    n = candidates / max(1, tokens) * row_length
    missed = (1 - min(1.0, most / n)) ** np.concatenate(windows)
    return float(1 - missed.mean())


class _Marks(NamedTuple):
    """What two copies of a conversation share: its id, all its tokens, or the tokens of its prompt."""

    conversation: tuple[str, str]
    tokens: tuple[str, str]
    prompt: tuple[str, str]

    @classmethod
    def of(cls, sample: TokenizedSample) -> "_Marks":
        prompt = _prompt(sample)
        # Samples without a prompt would all share the empty one.
        asked = sample_id(prompt) if len(prompt) else sample.sample_id
        return cls(("conversation", sample.conversation_id), ("tokens", sample.sample_id), ("prompt", asked))


def _prompt(sample: TokenizedSample) -> np.ndarray:
    """Tokens before the first supervised one."""
    return sample.ids[: int(sample.loss_mask.argmax())] if sample.loss_mask.any() else sample.ids[:0]


def _render(chat: Chat, messages: list[dict[str, str]], **options: Any) -> str:
    from jinja2 import TemplateError

    try:
        made = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except (TemplateError, TypeError, ValueError):
        return ""
    return str(made)


def _beginnings(chat: Chat) -> list[str]:
    """What comes before the user's words, or before a system message of one's own, dates left out."""
    user = {"role": "user", "content": _SENTINEL}
    plain = _render(chat, [user])
    own = _render(chat, [{"role": "system", "content": _SENTINEL}, user])
    return [_dateless(text.partition(_SENTINEL)[0]) for text in (plain, own) if _SENTINEL in text] or [""]


def _end(chat: Chat, **options: Any) -> str:
    """What comes after the user's words: the end of the turn and the generation prompt."""
    return _render(chat, [{"role": "user", "content": _SENTINEL}], **options).rpartition(_SENTINEL)[2].rstrip()


def _dateless(text: str) -> str:
    return _DATE.sub("DATE", text).lstrip()


def _thinks(tokenizer: Any, sample: TokenizedSample) -> bool:
    """Whether the sample's answers contain thinking that is not empty."""
    prompt, answer = tokenizer.decode(_prompt(sample)), tokenizer.decode(sample.ids[sample.loss_mask])
    for opening, closing in THINKING:
        _, opened, rest = answer.partition(opening)
        if not opened and prompt.rstrip().endswith(opening):
            opened, rest = opening, answer
        if opened and rest.partition(closing)[0].strip():
            return True
    return False


def _numbers(rope_parameters: dict[str, Any]) -> dict[str, Any]:
    """Equal values compare equal, whether written as 10000 or 10000.0; a key that says nothing counts for nothing."""
    return {key: value for key, value in rope_parameters.items() if value is not None}
