"""`speculators train`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from speculators.cli.options import save_resolved, schema_command
from speculators.data.skipped import SKIPPED_LOG
from speculators.errors import UserError
from speculators.training.options import TrainOptions


def run(options: TrainOptions) -> None:
    """Check the options, train, print the result."""
    options.check()
    if options.dry_run:
        from speculators.training.dry_run import show

        show(options)
        return
    from speculators.training.launch import train

    repeatable = options.model_copy(update={"restart": False})
    with _served(options) as resolved:
        result = train(resolved, lambda: save_resolved(repeatable, options.output / "run.yaml"))
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
    if result.skipped:
        print(f"  {result.skipped} samples left out, listed in {options.output / SKIPPED_LOG}")


@contextmanager
def _served(options: TrainOptions) -> Iterator[TrainOptions]:
    """The options with the address of an extraction server in the place of `auto`; it lives as long as the block."""
    if options.vllm_endpoint != ("auto",):
        yield options
        return
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            "--vllm-endpoint: auto starts a server for one process, and there are several; start it with `speculators "
            "serve VERIFIER --hidden-states-path DIRECTORY` and give its address and --storage-path."
        )
    from serve.extraction import extraction_endpoints
    from speculators.data.extract_options import ExtractOptions
    from speculators.training.run_states import wanted

    asked = ExtractOptions(
        verifier=options.verifier, data=options.data, output=options.output, storage_path=options.storage_path
    )
    with extraction_endpoints(asked, *wanted(options)) as servers:
        update = {"vllm_endpoint": (servers[0].base_url,), "storage_path": servers[0].storage_path}
        yield options.model_copy(update=update)


command = schema_command(TrainOptions, run)
