"""`speculators train`."""

from speculators.cli.options import save_resolved, schema_command
from speculators.training.options import TrainOptions


def run(options: TrainOptions) -> None:
    """Check the options, train, print the result."""
    options.check()
    from speculators.training.launch import train

    repeatable = options.model_copy(update={"restart": False})
    result = train(options, lambda: save_resolved(repeatable, options.output / "run.yaml"))
    if result is None:
        return
    if options.json_output:
        print(result.model_dump_json(indent=2))
        return
    print(f"{result.run}: {result.steps} steps, {result.tokens:,} tokens in {result.seconds:.0f} s")
    if result.validation:
        rates = " ".join(f"{rate:.3f}" for rate in result.validation.conditional)
        print(f"  best checkpoint {result.best}")
        print(f"  acceptance length {result.validation.acceptance_length:.3f}, conditional rates {rates}")
    else:
        print(f"  last checkpoint {result.checkpoint}")


command = schema_command(TrainOptions, run)
