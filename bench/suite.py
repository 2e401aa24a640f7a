"""What a bench run is asked for, and the plan that follows from it: variants, prompts, conditions and servers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PositiveInt, field_validator

from bench import prefix_cache as prefix_caches
from bench.load import Load
from bench.prompts import Prompt
from bench.records import BASELINE, BenchRun, Conditions, TaskInfo, Variant
from bench.tasks import draw, prompts_hash, select
from bench.variants import Parsed, named_drafts, parse, to_variant, verifier_of
from serve.endpoint import Endpoint
from serve.program import find
from serve.quantize import fp8_unsupported_reason
from serve.spec import ServeSpec, draft_spec, plain_spec
from speculators.errors import UserError
from speculators.provenance import Provenance
from speculators.schema import Strict
from speculators.verifier import Verifier

_PER_REQUEST_METRICS_SINCE = (0, 32)  # the oldest version checked; older servers are measured by their counters
_NGRAM_SHORTEST, _NGRAM_LONGEST = 2, 4  # tokens that must be seen again before what followed them is drafted


class BenchOptions(Strict):
    """Serve the plain verifier and each variant in turn, stream the tasks' prompts, report whether it pays."""

    compare: tuple[str, ...] = Field(
        min_length=1,
        description="Variants: eagle3, dflash (the run under --runs-dir), the path or hub id of a draft, ngram or "
        "suffix (no training), fp8, joined by + (dflash+fp8), @K for K speculative tokens (dflash@4); label=URL for a "
        "server that is running already. The plain verifier is always measured first.",
    )
    tasks: tuple[str, ...] = Field(
        ("reasoning", "code"),
        min_length=1,
        description="Tasks or groups (reasoning, code, chat, qa, rag, summarization, builtin), JSONL or parquet files "
        "with prompt, messages or turns, directories of such files, or a data set's hub id (id:subset). aime25 comes "
        "from the hub too, so it is no part of reasoning.",
    )
    verifier: str | None = Field(
        None, description="Verifier directory; by default the one that the drafts were trained for."
    )
    runs_dir: Path = Field(Path("output"), description="Where the runs that `train` wrote are looked for.")
    drafts: tuple[str, ...] = Field(
        (),
        description="ALGORITHM=PATH (or hub id): what an algorithm's name stands for, if not for the best checkpoint "
        "under --runs-dir.",
    )
    output: Path = Field(Path("output/bench"), description="Directory of the run; an interrupted one is continued.")
    num_prompts: int = Field(20, ge=1, description="Prompts for each task.")
    max_tokens: int = Field(256, ge=2, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature.")
    seed: int = Field(0, ge=0, description="Decides which prompts are drawn, in which order, and when they arrive.")
    concurrency: tuple[PositiveInt, ...] | None = Field(
        None, description="Requests in flight, each number a load point (1,4,16); 1 by default, none with --rate."
    )
    rate: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(
        (), description="Arrivals a second (Poisson), each a load point; latencies count from when a request was due."
    )
    repeats: int = Field(1, ge=1, description="How often each prompt is sent.")
    closing_baseline: bool = Field(
        True, description="Measure the plain verifier again at the end, on half of the prompts, to see drift."
    )
    thinking: Literal["on", "off"] | None = Field(
        None, description="What the chat template is told about thinking; by default nothing."
    )
    prefix_caching: bool = Field(
        False, description="Serve with prefix caching, emptied before each repeat of each point."
    )
    margin: float = Field(0.03, gt=0, lt=1, description="Differences below this share count as equivalent.")
    enforce_eager: bool = Field(False, description="Start vLLM without compilation: sooner ready, slower at decoding.")
    tensor_parallel_size: int | None = Field(
        None, ge=1, description="Devices for each server.", json_schema_extra={"flags": ["-tp"]}
    )
    port: int | None = Field(None, ge=1, le=65535, description="Port for the servers; by default a free one.")
    vllm: str | None = Field(None, description="vLLM to start: a virtual environment, a Python, or a vllm executable.")
    dry_run: bool = Field(False, description="Print what would be measured and about how long it takes, and stop.")
    json_output: bool = Field(
        False, description="Print the report as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )

    @field_validator("thinking", mode="before")
    @classmethod
    def _yaml_says_on(cls, value: object) -> object:
        """In YAML 1.1 a bare `on` is true."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class Plan(NamedTuple):
    """What will be measured, in this order."""

    variants: tuple[Variant, ...]
    prompts: dict[str, list[Prompt]]
    run: BenchRun
    loads: tuple[Load, ...] = (Load(concurrency=1),)


def make_plan(options: BenchOptions) -> Plan:
    """Resolve every name and check what can be checked before a server is started.

    Raises:
        UserError: an unknown variant or task, a draft of another verifier, no vLLM, no server at a URL.
    """
    tasks = select(options.tasks)
    drafts = named_drafts(options.drafts)
    parsed = [parse(name, options.runs_dir, drafts) for name in dict.fromkeys(options.compare) if name != BASELINE]
    _check_labels(parsed)
    verifier = Verifier.read(options.verifier or verifier_of(parsed))
    fp8_reason = fp8_unsupported_reason(options.vllm) if any(p.fp8 for p in parsed) else None
    variants = [to_variant(p, verifier, options.runs_dir, fp8_reason) for p in parsed]
    if all(variant.name != BASELINE for variant in variants):
        variants.append(Variant(name=BASELINE, verifier=verifier.path))
    variants.sort(key=lambda variant: variant.name != BASELINE)
    for variant in variants:
        if not variant.url and variant.skip_reason is None and (not variant.fp8 or Path(variant.verifier).exists()):
            server_spec(variant, options)
    prompts = {task.name: draw(task, options.num_prompts, options.seed) for task in tasks}
    loads = Load.all_of(options.concurrency, options.rate)
    conditions = _conditions(options, verifier, variants, prompts, loads)
    infos = tuple(TaskInfo(name=t.name, group=t.group, num_prompts=len(prompts[t.name])) for t in tasks)
    run = BenchRun(
        conditions=conditions,
        tasks=infos,
        variants=tuple(variants),
        margin=options.margin,
        provenance=Provenance.collect(),
    )
    return Plan(tuple(variants), prompts, run, loads)


def _check_labels(parsed: Sequence[Parsed]) -> None:
    names = [p.name for p in parsed]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"--compare: two variants are called {twice!r}; give the server another label.")


def _conditions(
    options: BenchOptions,
    verifier: Verifier,
    variants: Sequence[Variant],
    prompts: dict[str, list[Prompt]],
    loads: Sequence[Load],
) -> Conditions:
    provenance = Provenance.collect()
    baseline = variants[0]
    return Conditions(
        verifier=verifier.path,
        verifier_revision=verifier.revision,
        template_hash=verifier.template_hash,
        prompts={name: prompts_hash(drawn) for name, drawn in prompts.items()},
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        points=tuple(load.name for load in loads),
        repeats=options.repeats,
        thinking=options.thinking,
        prefix_cache=prefix_caches.RESET if options.prefix_caching else prefix_caches.OFF,
        enforce_eager=options.enforce_eager,
        server_args=() if baseline.url else _server_args(options, speculates=False),
        vllm=Endpoint.connect(baseline.url).version() if baseline.url else find(options.vllm).version,
        machine=f"{provenance.processor}, {provenance.cores} cores, {provenance.memory_bytes / 2**30:.0f} GiB",
    )


def server_spec(variant: Variant, options: BenchOptions) -> ServeSpec:
    """The server that a variant is measured on, which bench starts itself (`variant.url` is None)."""
    arguments = _server_args(options, speculates=variant.speculates)
    if variant.draft is None:
        speculation = untrained_speculation(variant)
        spec = plain_spec(
            variant.verifier,
            port=options.port,
            extra_args=(*arguments, "--speculative-config", json.dumps(speculation)) if speculation else arguments,
            tensor_parallel_size=options.tensor_parallel_size,
            vllm=options.vllm,
        )
    else:
        spec = draft_spec(
            variant.draft,
            verifier=variant.verifier,
            num_speculative_tokens=variant.num_speculative_tokens,
            port=options.port,
            extra_args=arguments,
            tensor_parallel_size=options.tensor_parallel_size,
            vllm=options.vllm,
        )
    if not options.prefix_caching:
        return spec
    return spec.model_copy(update={"environment": {**spec.environment, **prefix_caches.ENVIRONMENT}})


def untrained_speculation(variant: Variant) -> dict[str, object] | None:
    """vLLM's `--speculative-config` for drafting out of the text itself."""
    if variant.algorithm is None:
        return None
    common: dict[str, object] = {"method": variant.algorithm, "num_speculative_tokens": variant.num_speculative_tokens}
    if variant.algorithm == "suffix":
        return {**common, "suffix_decoding_max_tree_depth": variant.num_speculative_tokens}
    return {**common, "prompt_lookup_min": _NGRAM_SHORTEST, "prompt_lookup_max": _NGRAM_LONGEST}


def _server_args(options: BenchOptions, speculates: bool) -> tuple[str, ...]:
    """Prefix caching is off unless asked for: a prompt that was seen before must not look fast."""
    program = find(options.vllm)
    arguments = ["--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"]
    numbers = program.version.split(".")[:2]
    if all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) >= _PER_REQUEST_METRICS_SINCE:
        arguments.append("--enable-per-request-metrics")
        if speculates:  # refused by a server without speculation
            arguments += ["--per-request-spec-decode-metrics", "detailed"]
    if options.enforce_eager:
        arguments.append("--enforce-eager")
    return tuple(arguments)
