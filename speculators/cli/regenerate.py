"""`speculators regenerate`: through a given endpoint, or a vLLM server started for the length of the command."""

from speculators.cli.options import schema_command
from speculators.data.regenerate import Plan, plan, regenerate
from speculators.data.regenerate_options import RegenerateOptions, RegenerateSummary


def run(options: RegenerateOptions) -> None:
    """Answer what has no answer yet, then print the summary; no server is started when nothing is left to do."""
    todo = plan(options)
    summary = _answer(todo, options)
    print(summary.model_dump_json(indent=2) if options.json_output else _text(summary))


def _answer(todo: Plan, options: RegenerateOptions) -> RegenerateSummary:
    if not todo.pending:
        return regenerate(todo, options, "", "")
    if options.endpoint:
        from serve.endpoint import Endpoint

        endpoint = Endpoint.connect(options.endpoint)
        return regenerate(todo, options, endpoint.base_url, endpoint.model)
    from serve.spec import plain_spec
    from serve.vllm import running

    extra = ("--enforce-eager",) if options.enforce_eager else ()
    with running(plain_spec(options.verifier, extra_args=extra, vllm=options.vllm)) as endpoint:
        return regenerate(todo, options, endpoint.base_url, endpoint.model)


def _text(summary: RegenerateSummary) -> str:
    lines = [f"{summary.output}: {summary.answered} prompts answered, {summary.completion_tokens} tokens"]
    if summary.answered_before:
        lines.append(f"  answered before: {summary.answered_before}")
    if summary.unusable:
        lines.append(f"  rows without a usable prompt: {summary.unusable}")
    if summary.failed:
        lines.append(
            f"  failed: {summary.failed}, listed in {summary.failures}; start the same command to try them again"
        )
    return "\n".join(lines)


command = schema_command(RegenerateOptions, run)
