"""A running OpenAI-compatible vLLM server: is it there, what does it serve, and what do its counters say?

Counters are global to the server: a difference must bracket exactly one measurement.
"""

import re
from collections import defaultdict
from typing import Any, NamedTuple, Self

import requests

from speculators.acceptance import Acceptance
from speculators.errors import UserError

_TIMEOUT_S = 30.0
_PREFIX = "vllm:spec_decode_num_"
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


class Endpoint(NamedTuple):
    """Address (root, without `/v1`) and the name of the model served there."""

    base_url: str
    model: str

    @classmethod
    def connect(cls, url: str) -> Self:
        """Find out what is served at `url` (with or without `/v1`).

        Raises:
            UserError: nothing answers there, or what answers lists no model.
        """
        root = url.rstrip("/").removesuffix("/v1")
        models = _get(f"{root}/v1/models").json().get("data") or []
        if not models:
            raise UserError(f"--endpoint: {url} lists no model; is it an OpenAI-compatible server?")
        return cls(root, str(models[0]["id"]))

    def health(self) -> bool:
        """Whether the server says that it is well."""
        return is_healthy(self.base_url)

    def version(self) -> str:
        """The server's vLLM version, "unknown" if it does not say."""
        try:
            return str(_get(f"{self.base_url}/version").json()["version"])
        except (UserError, KeyError, ValueError):
            return "unknown"

    def max_model_len(self) -> int | None:
        """Longest sequence (prompt and answer) in tokens, None if the server does not say."""
        cards: list[dict[str, Any]] = _get(f"{self.base_url}/v1/models").json()["data"]
        return next((card.get("max_model_len") for card in cards if card["id"] == self.model), None)

    def acceptance_counters(self) -> Acceptance | None:
        """Everything counted since the server started; None when it serves without speculation."""
        return parse_acceptance(_get(f"{self.base_url}/metrics").text)


def is_healthy(base_url: str, timeout_s: float = 2.0) -> bool:
    """One question to `/health`; False when nothing answers in time."""
    try:
        return _session().get(f"{base_url}/health", timeout=timeout_s).status_code == 200
    except requests.RequestException:
        return False


def parse_acceptance(metrics: str) -> Acceptance | None:
    """Read vLLM's speculation counters from a Prometheus text, summed over engines.

    Counters: `vllm:spec_decode_num_{drafts,draft_tokens,accepted_tokens_per_pos}_total` (v1/spec_decode/metrics.py).
    """
    totals: dict[str, int] = defaultdict(int)
    positions: dict[int, int] = defaultdict(int)
    for sample in _SAMPLE.finditer(metrics):
        name = sample["name"].removesuffix("_total").removeprefix(_PREFIX)
        position = _POSITION.search(sample["labels"] or "")
        if name == "accepted_tokens_per_pos" and position:
            positions[int(position[1])] += int(float(sample["value"]))
        elif name in ("drafts", "draft_tokens") and sample["name"].startswith(_PREFIX):
            totals[name] += int(float(sample["value"]))
    if "drafts" not in totals or not positions:
        return None
    per_position = [positions[i] for i in range(max(positions) + 1)]
    return Acceptance.from_counters(totals["drafts"], totals["draft_tokens"], per_position)


def _session() -> requests.Session:
    """Without the environment's proxies: they don't know our own ports."""
    session = requests.Session()
    session.trust_env = False
    return session


def _get(url: str) -> requests.Response:
    try:
        answer = _session().get(url, timeout=_TIMEOUT_S)
        answer.raise_for_status()
    except requests.RequestException as error:
        reason = f"status {error.response.status_code}" if error.response is not None else type(error).__name__
        raise UserError(f"--endpoint: {url} does not answer ({reason}); is the server running?") from None
    return answer
