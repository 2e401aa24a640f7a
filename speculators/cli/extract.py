"""`speculators extract`."""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from speculators.cli.options import save_resolved, schema_command
from speculators.data.extract_options import ExtractOptions, ExtractSummary, Verification

if TYPE_CHECKING:
    from speculators.data.extract import Plan


def run(options: ExtractOptions) -> None:
    """Check, fetch, store and, if asked, verify; a server is started only when something is missing."""
    from speculators.data.extract import plan

    made = plan(options)
    save_resolved(options, options.file("extract.yaml"))
    summary = _extract(options, made) if made.missing else made.summary(seconds=0.0)
    if made.to_verify:
        from speculators.data.extract_local import LocalSource
        from speculators.data.verify_states import verify

        source = LocalSource(made.verifier, made.cache.aux_layer_ids)
        summary = summary.model_copy(update={"verification": verify(made.cache, made.to_verify, source)})
    print(summary.model_dump_json(indent=2) if options.json_output else _text(summary))
    if summary.verification and not summary.verification.passed:
        raise SystemExit(1)


def _extract(options: ExtractOptions, made: "Plan") -> ExtractSummary:
    from speculators.data.extract import extract

    aux_layer_ids = made.cache.aux_layer_ids
    if options.source == "local":
        from speculators.data.extract_local import LocalSource

        return extract(made, LocalSource(made.verifier, aux_layer_ids))

    from serve.extraction import extraction_endpoints
    from speculators.data.endpoint_pool import LeastLoaded
    from speculators.data.extract_rest import RestSource

    with extraction_endpoints(options, aux_layer_ids, made.longest) as servers, ExitStack() as stack:
        sources = [
            stack.enter_context(RestSource(server.base_url, server.model, server.storage_path, len(aux_layer_ids)))
            for server in servers
        ]
        return extract(made, LeastLoaded(sources), options.concurrency * len(sources))


def _text(summary: ExtractSummary) -> str:
    layers = ", ".join(map(str, summary.aux_layer_ids))
    speed = f" ({summary.tokens:,} tokens in {summary.seconds:.0f} s, {summary.tokens_per_s:,.0f} tokens/s)"
    return (
        f"{summary.output}: {summary.samples} samples with layers {layers} and the last stream; "
        f"{summary.extracted} new"
        + (speed if summary.extracted else "")
        + (_verified(summary.verification) if summary.verification else "")
    )


def _verified(found: Verification) -> str:
    verdict = "every one is" if found.passed else "NOT every one is"
    lines = [
        f"verified {found.samples} samples ({found.tokens:,} tokens) against transformers: the cosine of each token "
        f"has to be {found.least_cosine_allowed} or more, {verdict}",
        "layer  lowest cosine  mean cosine  largest relative error",
        *(
            f"{layer.layer:>5}  {layer.lowest_cosine:13.5f}  {layer.mean_cosine:11.5f}  "
            f"{layer.largest_relative_error:22.5f}"
            for layer in found.layers
        ),
    ]
    return "".join(f"\n{line}" for line in lines)


command = schema_command(ExtractOptions, run)
