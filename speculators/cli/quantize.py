"""`speculators quantize`."""

from pathlib import Path

from serve.quantize import Quantization, QuantizeOptions, quantize_fp8
from speculators.cli.options import schema_command


def run(options: QuantizeOptions) -> None:
    """Write the copy, then print how far it is from the original."""
    made = quantize_fp8(Path(options.verifier), options.output, options.scaled_together())
    print(made.model_dump_json(indent=2) if options.json_output else _text(options, made))


def _text(options: QuantizeOptions, made: Quantization) -> str:
    before, after = (f"{size / (1 << 20):.0f} MiB" for size in (made.source_size_bytes, made.size_bytes))
    form = f"block FP8 {made.block[0]}x{made.block[1]}" if made.block else "FP8 by channels"
    lines = [f"{options.output}: {form}, {before} -> {after}; relative error by layer:"]
    return "\n".join([*lines, *(f"  {kind:<12} {error:.4f}" for kind, error in made.relative_error.items())])


command = schema_command(QuantizeOptions, run)
