"""Options, settings and result of `speculators regenerate`; apart from the work."""

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from speculators.data.json_options import JsonObject
from speculators.schema import Strict

_DECIDED_ELSEWHERE = {
    "max_tokens": "--max-tokens",
    "max_completion_tokens": "--max-tokens",
    "temperature": "--temperature",
    "chat_template_kwargs": "--chat-template-kwargs",
    "model": "--endpoint",
    "messages": "--prompts",
    "tools": "the rows of --prompts",
}
_NOT_ALLOWED = ("n", "stream", "return_token_ids", "tool_choice")


class RegenerateOptions(Strict):
    """Let the verifier answer prompts: on-policy training data. Starts a vLLM server unless given an endpoint."""

    verifier: str = Field(description="Hugging Face directory of the verifier.")
    prompts: Path = Field(description="JSONL, JSON or parquet file; rows of `prompt`, `messages` or `conversations`.")
    output: Path = Field(description="JSONL file of answered conversations; an unfinished one is continued.")
    endpoint: str | None = Field(None, description="URL of a running server of this verifier; else one is started.")
    concurrency: int = Field(32, ge=1, description="Requests in flight.")
    max_tokens: int = Field(256, ge=1, description="Longest answer in tokens.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is the most likely token each time.")
    sampling_params: JsonObject | None = Field(
        None, description='Further sampling parameters of vLLM as JSON: \'{"top_p": 0.9, "top_k": 20}\'.'
    )
    chat_template_kwargs: JsonObject | None = Field(
        None, description="Arguments of the chat template as JSON: '{\"enable_thinking\": false}'."
    )
    enforce_eager: bool = Field(False, description="Start vLLM without compilation: sooner ready, slower at answering.")
    vllm: str | None = Field(None, description="vLLM's environment, interpreter or executable; else it is searched.")
    json_output: bool = Field(
        False, description="Print the summary as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )

    @field_validator("sampling_params")
    @classmethod
    def _sampling_only(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or {}:
            if name in _DECIDED_ELSEWHERE:
                raise ValueError(f"{name} is decided by {_DECIDED_ELSEWHERE[name]}; leave it out here")
            if name in _NOT_ALLOWED:
                raise ValueError(f"{name} is no sampling parameter of one answer; leave it out")
        return value


class AnswerSettings(Strict):
    """What the answers in a file were made with; kept beside it, and a continued run must have the same."""

    verifier_revision: str
    template_hash: str
    max_tokens: int
    temperature: float
    sampling_params: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] = {}


class RegenerateSummary(Strict):
    """What a run did; `failed` prompts are listed in `failures`."""

    output: str
    answered: int
    answered_before: int
    unusable: int
    failed: int
    failures: str | None
    completion_tokens: int
