"""`speculators fetch verifier` and `speculators fetch prompts`."""

from speculators.cli.options import schema_command
from speculators.data.sources import FetchOptions, fetch_prompts, fetch_verifier


def run(options: FetchOptions) -> None:
    """Fetch one of the two and say what was written."""
    if options.what == "verifier":
        written = fetch_verifier(options.output)
        print(f"{options.output}: {'SmolLM2-135M-Instruct in bfloat16' if written else 'already there, nothing to do'}")
        return
    counts = fetch_prompts(options.output, options.num_prompts, options.seed)
    print(f"{options.output}: {sum(c.written for c in counts.values())} prompts")
    for source, c in counts.items():
        print(f"  {source}: {c.written} of {c.found}; {c.dropped_for_benchmark} share 13 words with a benchmark prompt")


command = schema_command(FetchOptions, run)
