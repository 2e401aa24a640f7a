"""The options of `speculators replay`. No torch here."""

from pathlib import Path

from pydantic import Field

from speculators.schema import Strict


class ReplayOptions(Strict):
    """Predict served acceptance by walking text that the verifier itself wrote, exactly as serving would."""

    draft: Path = Field(description="Run or checkpoint directory.", json_schema_extra={"argument": True})
    answers: tuple[Path, ...] = Field(
        (),
        description="Conversations with the verifier's own answers; its states are computed here, with transformers.",
    )
    data: Path | None = Field(None, description="Data directory whose validation split is walked instead.")
    hidden_states: Path | None = Field(None, description="Cache with the states of --data.")
    verifier: str | None = Field(None, description="Verifier directory (default: the one the draft was trained for).")
    max_length: int = Field(2048, ge=2, description="Longest sample of --answers in tokens.")
    output: Path | None = Field(None, description="Also write the prediction here as JSON, with every sample.")
    json_output: bool = Field(False, description="Print the result as JSON.", json_schema_extra={"flags": ["--json"]})
