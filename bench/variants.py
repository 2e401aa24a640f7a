"""Names of variants become verifiers, drafts and servers.

A variant is `baseline` (the plain verifier, always measured first), an algorithm (its run under `--runs-dir`), the path
of a run or checkpoint or a hub id, `ngram` or `suffix` (which need no training), `fp8` (the quantised verifier), these
joined by `+`, with `@K` for K speculative tokens; or `label=URL`, a server that is already running.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.records import BASELINE, Variant
from bench.tasks import closest_first
from serve.endpoint import Endpoint
from speculators import checkpoint
from speculators.algorithms import ALGORITHMS
from speculators.algorithms.draft_config import DraftConfig
from speculators.errors import UserError
from speculators.schema import read_json
from speculators.verifier import Verifier, weights_revision

FP8 = "fp8"
FP8_DIRECTORY = "verifier-fp8"
# Speculation without a draft: method -> speculative tokens. For suffix it is vLLM's longest suggestion; mostly fewer.
UNTRAINED = {"ngram": 5, "suffix": 24}
_SERVER = re.compile(r"(?P<label>[\w.@+-]+)=(?P<url>https?://\S+)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Parsed(NamedTuple):
    """A variant's name taken apart. `method` is one of `UNTRAINED`; `url` belongs to a server of somebody else's."""

    name: str
    draft: Path | None = None
    config: DraftConfig | None = None
    fp8: bool = False
    num_speculative_tokens: int | None = None
    method: str | None = None
    url: str | None = None


def named_drafts(given: Sequence[str]) -> dict[str, str]:
    """`--drafts ALGORITHM=PATH` as algorithm -> path or hub id; raises UserError."""
    named = {}
    for text in given:
        algorithm, equals, draft = text.partition("=")
        if not equals or not draft or algorithm not in ALGORITHMS:
            known = closest_first(algorithm, list(ALGORITHMS))
            raise UserError(
                f"--drafts: {text!r} does not say what an algorithm's name stands for; write ALGORITHM=PATH with "
                f"one of {', '.join(known)}."
            )
        named[algorithm] = draft
    return named


def parse(name: str, runs_dir: Path, drafts: Mapping[str, str] | None = None) -> Parsed:
    """Take a name apart and find its draft.

    Args:
        drafts: algorithm -> the draft that its name stands for, in place of the best one under `runs_dir`.

    Raises:
        UserError: an unknown name (the sentence lists the known ones, the closest first), or a draft that is not there.
    """
    if server := _SERVER.fullmatch(name):
        return Parsed(server["label"], url=server["url"])
    if Path(name).exists() and name not in {FP8, *UNTRAINED, *ALGORITHMS}:
        draft = checkpoint.resolve(Path(name))
        return Parsed(name, draft, checkpoint.read_config(draft))
    stem, at, count = name.rpartition("@") if "@" in name else (name, "", "")
    if at and not (count.isdigit() and int(count) > 0):
        raise UserError(
            f"--compare: {name!r} has {count!r} after @; give a number of speculative tokens, such as dflash@4."
        )
    parts = stem.split("+")
    others = [part for part in parts if part != FP8]
    if len(others) > 1:
        raise UserError(f"--compare: {name!r} joins several drafts ({', '.join(others)}); a server runs one.")
    if not others:
        if at:
            raise UserError(f"--compare: {name!r} has no draft, so @{count} means nothing; give @K with a draft.")
        return Parsed(name, fp8=True)
    tokens = int(count) if at else None
    if others[0] in UNTRAINED:
        return Parsed(name, None, None, FP8 in parts, tokens or UNTRAINED[others[0]], method=others[0])
    draft = _find_draft((drafts or {}).get(others[0], others[0]), runs_dir)
    return Parsed(name, draft, checkpoint.read_config(draft), FP8 in parts, tokens)


def _find_draft(name: str, runs_dir: Path) -> Path:
    if name not in ALGORITHMS:
        if Path(name).exists():
            return checkpoint.resolve(Path(name))
        if _HUB_ID.fullmatch(name) and not Path(name).parent.is_dir():
            return _from_hub(name)
        known = closest_first(name, [BASELINE, FP8, *UNTRAINED, *ALGORITHMS])
        raise UserError(
            f"--compare: unknown variant {name!r}; known are {', '.join(known)}, or the path or hub id of a draft, "
            "joined by + and with @K for K speculative tokens, or label=URL for a server that is running."
        )
    runs = [run for run in _draft_runs(runs_dir) if _algorithm(run) == name]
    if not runs:
        raise UserError(
            f"--compare: {name}: no run of it under {runs_dir}; train one with `speculators train --speculator-type "
            f"{name}`, or name another place with --runs-dir."
        )
    return checkpoint.resolve(max(runs, key=lambda run: (run.name == name, _best_length(run))))


def _from_hub(name: str) -> Path:
    """The draft's files in the hub's cache, downloaded if they are not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["config.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"--compare: {name} is no directory here, and the hub does not give a draft of this id ({reason}); "
            "give the path of a run or checkpoint, or check the id and the network."
        ) from None


def _draft_runs(runs_dir: Path) -> list[Path]:
    if not runs_dir.is_dir():
        raise UserError(f"--runs-dir: {runs_dir} is not a directory; give the one that holds the runs.")
    return [path for path in sorted(runs_dir.iterdir()) if path.is_dir() and checkpoint.is_draft(path)]


def _algorithm(run: Path) -> str | None:
    try:
        return checkpoint.read_config(checkpoint.resolve(run)).algorithm
    except UserError:  # a run without a checkpoint so far is no candidate
        return None


def _best_length(run: Path) -> float:
    best = run / checkpoint.BEST
    return read_json(best, checkpoint.Best, "the best checkpoint's name").acceptance_length if best.exists() else 0.0


def verifier_of(parsed: Sequence[Parsed]) -> str:
    """The one verifier that the drafts were trained for."""
    paths = {p.config.verifier: p.name for p in parsed if p.config}
    if not paths:
        raise UserError(
            "--verifier is missing: no draft among the variants tells which verifier is meant; give its directory."
        )
    if len(paths) > 1:
        listed = ", ".join(f"{name} has {path}" for path, name in paths.items())
        raise UserError(
            f"--compare: the drafts were trained for different verifiers ({listed}); compare drafts of one."
        )
    return next(iter(paths))


def to_variant(parsed: Parsed, verifier: Verifier, runs_dir: Path, fp8_reason: str | None) -> Variant:
    """What is served under the name.

    Raises:
        UserError: a draft of another verifier, or no server at a URL.
    """
    if parsed.url:
        return _running_server(parsed.name, parsed.url)
    config = parsed.config
    if config and config.verifier_revision and config.verifier_revision != verifier.revision:
        raise UserError(
            f"--compare: {parsed.name}: {parsed.draft} was trained for another verifier (revision "
            f"{config.verifier_revision}; {verifier.path} has {verifier.revision}); give its own with --verifier."
        )
    tokens = parsed.num_speculative_tokens or (config.num_speculative_tokens if config else None)
    return Variant(
        name=parsed.name,
        verifier=str((runs_dir / FP8_DIRECTORY).resolve()) if parsed.fp8 else verifier.path,
        fp8=parsed.fp8,
        draft=str(parsed.draft.resolve()) if parsed.draft else None,
        draft_revision=weights_revision(parsed.draft) if parsed.draft else None,
        algorithm=config.algorithm if config else parsed.method,
        num_speculative_tokens=tokens,
        skip_reason=fp8_reason if parsed.fp8 else None,
    )


def _running_server(name: str, url: str) -> Variant:
    try:
        endpoint = Endpoint.connect(url)
    except UserError as error:
        raise UserError(f"--compare: {name}: {str(error).removeprefix('--endpoint: ')}") from None
    return Variant(name=name, verifier=endpoint.model, url=endpoint.base_url)
