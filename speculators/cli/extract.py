"""`speculators extract`."""

from typing import TYPE_CHECKING

from speculators.cli.options import save_resolved, schema_command
from speculators.data.extract_options import ExtractOptions, ExtractSummary, Verification

if TYPE_CHECKING:
    from speculators.data.extract import Plan

_OWN_SERVER_BACK_S = 10.0
"""A server that this command started and that died does not come back; vLLM answers late, never not at all."""


def run(options: ExtractOptions) -> None:
    """Check, fetch, store and, if asked, verify; a server is started only when something is missing."""
    from speculators.data.extract import plan

    made = plan(options)
    save_resolved(options, options.file("extract.yaml"))
    answered_by: dict[str, str] = {}
    summary = _extract(options, made, answered_by) if made.missing else made.summary(seconds=0.0)
    if options.verify and made.every:
        from speculators.data.extract_local import LocalSource
        from speculators.data.verify_states import choose, verify

        source = LocalSource(made.verifier, made.cache.aux_layer_ids)
        found = verify(made.cache, choose(made.every, options.verify, answered_by), source, answered_by)
        summary = summary.model_copy(update={"verification": found})
    print(summary.model_dump_json(indent=2) if options.json_output else _text(summary))
    if summary.verification and not summary.verification.passed:
        raise SystemExit(1)


def _extract(options: ExtractOptions, made: "Plan", answered_by: dict[str, str]) -> ExtractSummary:
    from speculators.data.extract import extract

    aux_layer_ids = made.cache.aux_layer_ids
    if options.source == "local":
        from speculators.data.extract_local import LocalSource

        return extract(made, LocalSource(made.verifier, aux_layer_ids))

    from serve.extraction import extraction_endpoints
    from speculators.data.endpoints import Endpoints
    from speculators.data.extract_rest import RestSource

    with extraction_endpoints(options, aux_layer_ids, made.longest) as servers:
        streams, timeout_s = (len(aux_layer_ids), made.verifier.hidden_size), options.request_timeout
        sources = [RestSource(server.base_url, server.storage_path, *streams, timeout_s) for server in servers]
        patience_s = None if options.endpoint else _OWN_SERVER_BACK_S
        with Endpoints(sources, options.max_consecutive_failures, patience_s, answered_by) as fetch:
            return extract(made, fetch, options.concurrency * len(sources), fetch.close)


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
        *(f"too far off: {sample}" for sample in found.differing),
    ]
    return "".join(f"\n{line}" for line in lines)


command = schema_command(ExtractOptions, run)
