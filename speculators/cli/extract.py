"""`speculators extract`."""

from speculators.cli.options import save_resolved, schema_command
from speculators.data.extract_options import ExtractOptions, ExtractSummary


def run(options: ExtractOptions) -> None:
    """Check, fetch and store; the server is started only when something is missing."""
    from speculators.data.extract import extract, plan

    made = plan(options)
    save_resolved(options, options.output / "extract.yaml")
    aux_layer_ids = made.cache.manifest.aux_layer_ids
    if not made.missing:
        summary = made.summary(seconds=0.0)
    elif options.source == "local":
        from speculators.data.extract_local import LocalSource

        summary = extract(made, LocalSource(made.verifier, aux_layer_ids))
    else:
        from serve.extraction import extraction_endpoint
        from speculators.data.extract_rest import RestSource

        with (
            extraction_endpoint(options, aux_layer_ids, made.longest) as server,
            RestSource(server.base_url, server.model, server.storage_path, len(aux_layer_ids)) as fetch,
        ):
            summary = extract(made, fetch, options.concurrency)
    print(summary.model_dump_json(indent=2) if options.json_output else _text(summary))


def _text(summary: ExtractSummary) -> str:
    layers = ", ".join(map(str, summary.aux_layer_ids))
    speed = f" ({summary.tokens:,} tokens in {summary.seconds:.0f} s, {summary.tokens_per_s:,.0f} tokens/s)"
    return (
        f"{summary.output}: {summary.samples} samples with layers {layers} and the last stream; "
        f"{summary.extracted} new" + (speed if summary.extracted else "")
    )


command = schema_command(ExtractOptions, run)
