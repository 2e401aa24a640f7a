"""The doctor's checks of states and room: manifest, layer ids, cached files, on-policy share, disk, memory.

Each takes the facts and gives a finding, None where it does not apply.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import torch

from speculators import checkpoint
from speculators.doctor_facts import Facts, Finding, gib, share
from speculators.training import estimate
from speculators.training.optim import resolve_hyper
from speculators.training.precision import uses_bf16

_FILES = 8
_ON_POLICY_SAMPLES, _ON_POLICY_TOKENS, _LOW_ON_POLICY = 8, 4096, 0.7
_FEW_ON_POLICY_TOKENS = 512
_CHUNK = 256


def manifest(facts: Facts) -> Finding:
    """Data, hidden states, draft and verifier belong together."""
    name = "manifest"
    if facts.refused:
        return Finding.error(name, facts.refused[0])
    draft = facts.config
    if draft and draft.verifier_revision not in ("", facts.verifier.revision):
        return Finding.error(
            name,
            f"the draft was trained for the verifier {draft.verifier_revision}, {facts.verifier.path} is "
            f"{facts.verifier.revision}; give the verifier it was trained for.",
        )
    what = "data and hidden states" if facts.cache else "data"
    return Finding.ok(name, f"{what} were made with this verifier ({facts.verifier.made_with}).")


def layer_ids(facts: Facts) -> Finding | None:
    """The draft reads layers that exist and are cached."""
    name = "layer-ids"
    if facts.config is None:
        return None
    ids, last = facts.config.aux_layer_ids, facts.verifier.num_layers
    shown = ", ".join(map(str, ids))
    if not ids or min(ids) < 0 or max(ids) > last or len(set(ids)) < len(ids):
        return Finding.error(
            name, f"layers {shown} are not distinct layers of a verifier that has 0 to {last}; set --aux-layer-ids."
        )
    if facts.cache and not set(ids) <= set(facts.cache.manifest.aux_layer_ids):
        cached = ", ".join(map(str, facts.cache.manifest.aux_layer_ids))
        return Finding.error(
            name, f"the draft reads layers {shown}, the cache holds {cached}; run `speculators extract` with these."
        )
    return Finding.ok(name, f"the draft reads layers {shown} of {last}" + (", all cached." if facts.cache else "."))


def cached_states(facts: Facts) -> Finding | None:
    """A sample of the cached files is finite, not blank, and of the right tokens."""
    name = "cached-states"
    if facts.cache is None:
        return None
    asked = facts.samples(_FILES)
    samples = [sample for sample in asked if sample.sample_id in facts.cache]
    if len(samples) < len(asked) and facts.options.missing_policy == "raise":
        return Finding.error(
            name,
            f"{facts.cache.path} lacks {len(asked) - len(samples)} of {len(asked)} sampled samples; run `speculators "
            "extract` again, it continues.",
        )
    for sample in samples:
        states = facts.cache.read(sample.sample_id, sample.ids)
        for kind, tensor in (("aux_hidden", states.aux_hidden), ("last_hidden", states.last_hidden)):
            if not tensor.any():
                return Finding.error(
                    name,
                    f"{facts.cache.file(sample.sample_id)}: {kind} is all zeros; delete it and run `speculators "
                    "extract` again.",
                )
    return Finding.ok(name, f"{len(samples)} sampled files are finite and hold the states of their tokens.")


def on_policy(facts: Facts) -> Finding | None:
    """The data's text is what this verifier would write: its next token is the most likely one."""
    return _on_policy(facts, _ON_POLICY_TOKENS)


def on_policy_briefly(facts: Facts) -> Finding | None:
    """The same on few tokens: what a run can spare before its first step."""
    return _on_policy(facts, _FEW_ON_POLICY_TOKENS)


def _on_policy(facts: Facts, most: int) -> Finding | None:
    name = "on-policy"
    if facts.cache is None or not any(Path(facts.verifier.path).glob("*.safetensors")):
        return None  # a dry run needs no weights
    agreed, seen = on_policy_counts(facts, most)
    if not seen:
        return None
    sentence = f"{share(agreed, seen)} of {seen} supervised tokens are the verifier's own first choice"
    if agreed < _LOW_ON_POLICY * seen:
        return Finding.warning(
            name,
            f"{sentence}, so this verifier did not write the text and the draft learns to predict another; run "
            "`speculators regenerate` and train on its answers.",
        )
    return Finding.ok(name, f"{sentence}.")


@torch.no_grad()
def on_policy_counts(facts: Facts, most: int = _ON_POLICY_TOKENS) -> tuple[int, int]:
    """(tokens that the verifier would have chosen, tokens looked at), over at most so many supervised tokens of a few
    samples."""
    from speculators.algorithms.verifier_head import VerifierHead

    assert facts.cache
    head = VerifierHead(facts.verifier, torch.arange(facts.verifier.vocab_size))
    agreed = seen = 0
    for sample in facts.samples(_ON_POLICY_SAMPLES):
        if sample.sample_id not in facts.cache:
            continue
        states = facts.cache.read(sample.sample_id, sample.ids)
        places = torch.from_numpy(np.flatnonzero(sample.loss_mask[1:]) + 1)[: most // _ON_POLICY_SAMPLES]
        ids = torch.from_numpy(np.asarray(sample.ids, dtype=np.int64))
        for part in places.split(_CHUNK):
            logits = head.verifier_logits(head.normalize(states.last_hidden[part - 1]))
            agreed += int((logits.argmax(-1) == ids[part]).sum())
            seen += len(part)
    return agreed, seen


def disk(facts: Facts) -> Finding | None:
    """There is room for the checkpoints."""
    name = "disk"
    if facts.config is None:
        return None
    size = estimate.checkpoint_bytes(facts.config, resolve_hyper(facts.options, facts.config).optimizer)
    there = len(checkpoint.all_checkpoints(facts.options.output))
    count = max(1, estimate.checkpoints_kept(facts.options, _steps(facts)) - there)
    free = free_bytes(facts.options.output)
    seen = f"{count} checkpoints of {gib(size)} need {gib(count * size)}, {gib(free)} are free"
    advice = "make room, choose another --output or lower --save-total-limit"
    if free < size:
        return Finding.error(name, f"{seen}, not enough for a single one; {advice}.")
    if free < count * size:
        return Finding.warning(name, f"{seen}; {advice}.")
    return Finding.ok(name, f"{seen}.")


def memory(facts: Facts) -> Finding | None:
    """Weights, optimizer and a row's activations fit."""
    name = "memory"
    if facts.config is None:
        return None
    needed = run_memory(facts).total_bytes
    free, total = memory_bytes(facts.options.device)
    seen = f"a step needs about {gib(needed)} and {gib(free)} of {gib(total)} are free"
    advice = "shorten --row-length, lower --draft-vocab-size or --max-anchors, or train on another machine"
    if needed > total:
        return Finding.error(name, f"{seen}, so it cannot fit; {advice}.")
    if needed > free:
        return Finding.warning(name, f"{seen}, so it may not fit; end what else is running, or {advice}.")
    return Finding.ok(name, f"{seen}.")


def run_memory(facts: Facts) -> estimate.Memory:
    """The estimate for a full row of this data."""
    assert facts.config
    stats = facts.data.manifest.splits["train"]
    length = facts.options.row_length
    supervised = round(length * stats.supervised_tokens / max(1, stats.tokens))
    bf16 = uses_bf16(facts.options.precision, torch.device(_device(facts.options.device)))
    row = estimate.Row(length, supervised, 2 if bf16 else 4)
    optimizer = resolve_hyper(facts.options, facts.config).optimizer
    return estimate.memory(facts.config, facts.verifier, facts.options, optimizer, row)


def free_bytes(path: Path) -> int:
    """Free space where `path` is or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def memory_bytes(device: str) -> tuple[int, int]:
    """(free, total) bytes of the device, or of this machine."""
    chosen = torch.device(_device(device))
    if chosen.type == "cuda":
        return torch.cuda.mem_get_info(chosen)
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return total, total
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024, total


def _device(name: str) -> str:
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _steps(facts: Facts) -> int:
    rows = -(-facts.data.manifest.splits["train"].tokens // facts.options.row_length)
    return max(1, estimate.total_steps(rows, facts.options))
