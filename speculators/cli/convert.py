"""`speculators convert`."""

from speculators.cli.options import schema_command
from speculators.convert import ConvertOptions, convert


def run(options: ConvertOptions) -> None:
    """Convert, then say what was found and decided."""
    record = convert(options)
    if options.json_output:
        print(record.model_dump_json(indent=2))
        return
    print(f"{options.output}: {record.algorithm} draft for {record.verifier}, from {record.format} format")
    for note in record.notes:
        print(f"  {note}")


command = schema_command(ConvertOptions, run)
