"""`speculators replay`."""

import sys

from speculators.cli.options import schema_command
from speculators.replay_options import ReplayOptions


def run(options: ReplayOptions) -> None:
    """Walk, write `replay.json`, print the prediction."""
    from speculators.replay_files import predict

    prediction = predict(options)
    if options.json_output:
        print(prediction.model_dump_json(indent=2))
        return
    print(f"{prediction.draft}: predicted over {prediction.total.steps} steps")
    for name, acceptance in [*prediction.by_source.items(), ("total", prediction.total)]:
        rates = " ".join(f"{rate:.3f}" for rate in acceptance.marginal)
        print(f"  {name or '-':12s} acceptance length {acceptance.length:.3f}, marginal rates {rates}")
    if options.output:
        print(f"written to {options.output}", file=sys.stderr)


command = schema_command(ReplayOptions, run)
