"""`speculators regenerate`: the verifier's own answers to prompts, through any OpenAI-compatible endpoint.

A draft learns to predict what its verifier says, so training text should be the verifier's. Answers are appended line
by line, exactly as they came; started again, the command goes on with the prompts that have none.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from speculators.data.answers import Answered, Failed, Pending, answer_all
from speculators.data.conversations import Dropped, conversation_id, to_messages, tools_of
from speculators.data.progress import progress_bar
from speculators.data.regenerate_options import AnswerSettings, RegenerateOptions, RegenerateSummary
from speculators.data.row_files import read_rows
from speculators.errors import UserError
from speculators.schema import read_json, write_json
from speculators.verifier import Verifier


class Plan(NamedTuple):
    """What is left to do for an output file; `made_with` names the verifier as `Verifier.made_with` does."""

    pending: list[Pending]
    answered_before: int
    unusable: int
    made_with: str


def plan(options: RegenerateOptions) -> Plan:
    """Read the prompts and the answers that are there; cuts off a half-written last answer.

    Raises:
        UserError: no usable prompt, or answers that were made with other settings.
    """
    verifier = Verifier.read(options.verifier)
    settings = _settings(verifier, options)
    _check_settings(options.output, settings)
    prompts: dict[str, Pending] = {}
    unusable = 0
    reason = "no rows at all"
    for row in read_rows(options.prompts):
        messages = to_messages(row, with_response=False)
        if isinstance(messages, Dropped):
            unusable, reason = unusable + 1, messages.reason
            continue
        asked = [message for message in messages if message["role"] in ("system", "user")]
        if not any(message["role"] == "user" for message in asked):
            unusable, reason = unusable + 1, "no user message"
            continue
        name = conversation_id(row, asked)
        prompt = Pending(name, str(row.get("source") or ""), asked, tools_of(row))
        if prompts.setdefault(name, prompt).messages != asked:
            raise UserError(
                f"--prompts: {options.prompts}: the id {name!r} belongs to two different prompts; make ids unique."
            )
    if not prompts:
        raise UserError(
            f"--prompts: {options.prompts}: no usable prompt among {unusable} rows; each row needs `prompt`, "
            f"`messages` or `conversations` with a user's turn; found: {reason}."
        )
    answered = _answered(options.output)
    write_json(_meta_path(options.output), settings)
    pending = [prompt for name, prompt in prompts.items() if name not in answered]
    return Plan(pending, len(prompts) - len(pending), unusable, verifier.made_with)


def regenerate(todo: Plan, options: RegenerateOptions, base_url: str, model: str) -> RegenerateSummary:
    """Answer the pending prompts through `base_url` (without `/v1`), appending each answer as it comes.

    Raises:
        UserError: the endpoint does not answer any more (what was finished is kept), or it refused every prompt.
    """
    failures = options.output.with_name(f"{options.output.name}.failures.jsonl")
    failures.unlink(missing_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    answered = failed = tokens = 0
    error = ""
    with options.output.open("a", encoding="utf-8") as output, _Progress(len(todo.pending)) as progress:
        asked = answer_all(
            todo.pending,
            base_url=base_url,
            model=model,
            concurrency=options.concurrency,
            request=_request(options),
        )
        for prompt, outcome in asked:
            if isinstance(outcome, Failed):
                failed += 1
                error = outcome.error
                with failures.open("a", encoding="utf-8") as file:
                    _append(file, {"id": prompt.conversation_id, "error": outcome.error})
            else:
                answered += 1
                tokens += outcome.completion_tokens
                _append(output, _row(prompt, outcome, todo.made_with, options.chat_template_kwargs))
            progress.show(answered + failed, tokens, failed)
    if failed and not answered + todo.answered_before:
        raise UserError(f"{base_url}: refused all {failed} prompts, the last one with: {error}; see {failures}.")
    return RegenerateSummary(
        output=str(options.output),
        answered=answered,
        answered_before=todo.answered_before,
        unusable=todo.unusable,
        failed=failed,
        failures=str(failures) if failed else None,
        completion_tokens=tokens,
    )


def _settings(verifier: Verifier, options: RegenerateOptions) -> AnswerSettings:
    if verifier.template_hash == "none":
        raise UserError(f"--verifier: {verifier.path} has no chat template, so it cannot be asked; give a chat model.")
    return AnswerSettings(
        verifier_revision=verifier.revision,
        template_hash=verifier.template_hash,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        sampling_params=options.sampling_params or {},
        chat_template_kwargs=options.chat_template_kwargs or {},
    )


def _request(options: RegenerateOptions) -> dict[str, Any]:
    """What every request says beside its messages."""
    request = {"max_tokens": options.max_tokens, "temperature": options.temperature, **(options.sampling_params or {})}
    template = options.chat_template_kwargs
    return {**request, "chat_template_kwargs": template} if template else request


def _meta_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.meta.json")


def _check_settings(output: Path, wanted: AnswerSettings) -> None:
    if not output.exists() or output.stat().st_size == 0:
        return
    seen = read_json(_meta_path(output), AnswerSettings, f"the settings that the answers in {output} were made with")
    for name in AnswerSettings.model_fields:
        before, now = getattr(seen, name), getattr(wanted, name)
        if before != now:
            raise UserError(
                f"--output: {output} holds answers made with {name} = {before}, this run has {now}; "
                "use the same settings to continue it, or another output file."
            )


def _answered(output: Path) -> set[str]:
    """Ids that have an answer. A last line without its newline was being written when the run died: it is cut off."""
    if not output.exists():
        return set()
    data = output.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with output.open("r+b") as file:
            file.truncate(whole)
    return {str(json.loads(line)["id"]) for line in data[:whole].split(b"\n") if line}


def _row(prompt: Pending, outcome: Answered, made_with: str, template_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """The answer as `prepare` reads it: exact tokens where the server told them, the text in any case."""
    fields = {"id": prompt.conversation_id, "source": prompt.source, **outcome._asdict()}
    if prompt.tools:
        fields["tools"] = prompt.tools
    if template_kwargs:
        fields["chat_template_kwargs"] = template_kwargs
    if outcome.input_ids is None:
        return {name: value for name, value in fields.items() if name not in ("input_ids", "loss_mask")}
    return {**fields, "made_with": made_with}


def _append(file: Any, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


class _Progress:
    """A progress bar on stderr: prompts, tokens a second, failures."""

    def __init__(self, total: int) -> None:
        self._bar = progress_bar("regenerate", "rate")
        self._task = self._bar.add_task("regenerate", total=total, rate="")

    def __enter__(self) -> "_Progress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def show(self, completed: int, tokens: int, failed: int) -> None:
        elapsed = self._bar.tasks[0].elapsed or 0
        rate = f"{tokens / elapsed:.0f} tokens/s" if elapsed else ""
        self._bar.update(self._task, completed=completed, rate=f"{rate}, {failed} failed" if failed else rate)
