"""`speculators prepare`."""

from speculators.cli.options import save_resolved, schema_command
from speculators.data.prepare import PrepareOptions, PrepareSummary, prepare


def run(options: PrepareOptions) -> None:
    """Prepare, then print the summary."""
    summary = prepare(options)
    save_resolved(options, options.output / "prepare.yaml")
    print(summary.model_dump_json(indent=2) if options.json_output else _text(summary))


def _text(summary: PrepareSummary) -> str:
    lines = [
        f"{summary.output}: {summary.rows} rows read, {sum(s.samples for s in summary.splits.values())} samples kept"
    ]
    for name, stats in summary.splits.items():
        lines.append(
            f"  {name}: {stats.samples} samples, {stats.tokens} tokens, {stats.supervised_tokens} of them supervised"
        )
    if summary.ready_tokens:
        lines.append(f"  rows that brought their own tokens, taken as they are: {summary.ready_tokens}")
    if summary.cut_to_max_length:
        lines.append(f"  cut to --max-length: {summary.cut_to_max_length}")
    if summary.split_into_turns:
        lines.append(
            f"  one sample per answer, because the template rewrites earlier turns: {summary.split_into_turns} rows"
        )
    if summary.without_reasoning:
        lines.append(f"  reasoning not learned, because the template leaves it out: {summary.without_reasoning} rows")
    lines += [f"  dropped, {reason}: {count}" for reason, count in summary.dropped.items()]
    shares = ", ".join(f"{size}: {share:.2%}" for size, share in summary.coverage.items())
    lines.append(f"  supervised tokens inside a draft vocabulary of {shares}")
    return "\n".join(lines)


command = schema_command(PrepareOptions, run)
