"""What a bench run is asked for, and the plan that follows from it: variants, prompts, conditions and servers."""

from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from bench.records import BASELINE, BenchRun, Conditions, TaskInfo, Variant
from bench.tasks import Prompt, draw, prompts_hash, select
from bench.variants import parse, to_variant, verifier_of
from serve.program import find
from serve.quantize import fp8_unsupported_reason
from serve.spec import ServeSpec, draft_spec, plain_spec
from speculators.provenance import Provenance
from speculators.schema import Strict
from speculators.verifier import Verifier

_PER_REQUEST_METRICS_SINCE = (0, 32)  # the oldest version checked; older servers are measured by their counters


class BenchOptions(Strict):
    """Serve the plain verifier and each variant in turn, stream the tasks' prompts, report whether it pays."""

    compare: tuple[str, ...] = Field(
        min_length=1,
        description="Variants: eagle3, dflash (the run under --runs-dir), a run or checkpoint path, fp8, joined by + "
        "(dflash+fp8), @K for K speculative tokens (dflash@4). The plain verifier is always measured first.",
    )
    tasks: tuple[str, ...] = Field(
        ("reasoning", "code"),
        min_length=1,
        description="Tasks or groups (reasoning, code, chat, qa, builtin), or JSONL files with prompt, messages or "
        "turns.",
    )
    verifier: str | None = Field(
        None, description="Verifier directory; by default the one that the drafts were trained for."
    )
    runs_dir: Path = Field(Path("output"), description="Where the runs that `train` wrote are looked for.")
    output: Path = Field(Path("output/bench"), description="Directory of the run; an interrupted one is continued.")
    num_prompts: int = Field(20, ge=1, description="Prompts for each task.")
    max_tokens: int = Field(256, ge=2, description="Longest answer, in tokens.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature.")
    seed: int = Field(0, ge=0, description="Decides which prompts are drawn and in which order.")
    concurrency: int = Field(1, ge=1, description="Requests in flight.")
    repeats: int = Field(1, ge=1, description="How often each prompt is sent.")
    margin: float = Field(0.03, gt=0, lt=1, description="Differences below this share count as equivalent.")
    enforce_eager: bool = Field(False, description="Start vLLM without compilation: sooner ready, slower at decoding.")
    tensor_parallel_size: int | None = Field(
        None, ge=1, description="Devices for each server.", json_schema_extra={"flags": ["-tp"]}
    )
    port: int | None = Field(None, ge=1, le=65535, description="Port for the servers; by default a free one.")
    vllm: str | None = Field(None, description="vLLM to start: a virtual environment, a Python, or a vllm executable.")
    dry_run: bool = Field(False, description="Print what would be measured, and stop.")
    json_output: bool = Field(
        False, description="Print the report as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )


class Plan(NamedTuple):
    """What will be measured, in this order."""

    variants: tuple[Variant, ...]
    prompts: dict[str, list[Prompt]]
    run: BenchRun


def make_plan(options: BenchOptions) -> Plan:
    """Resolve every name and check what can be checked before a server is started.

    Raises:
        UserError: an unknown variant or task, a draft of another verifier, no vLLM.
    """
    tasks = select(options.tasks)
    names = list(dict.fromkeys(name for name in options.compare if name != BASELINE))
    parsed = [parse(name, options.runs_dir) for name in names]
    verifier = Verifier.read(options.verifier or verifier_of(parsed))
    fp8_reason = fp8_unsupported_reason(options.vllm) if any(p.fp8 for p in parsed) else None
    baseline = Variant(name=BASELINE, verifier=verifier.path)
    variants = (baseline, *(to_variant(p, verifier, options.runs_dir, fp8_reason) for p in parsed))
    for variant in variants:
        if variant.skip_reason is None and (not variant.fp8 or Path(variant.verifier).exists()):
            server_spec(variant, options)
    prompts = {task.name: draw(task, options.num_prompts, options.seed) for task in tasks}
    provenance = Provenance.collect()
    conditions = Conditions(
        verifier=verifier.path,
        verifier_revision=verifier.revision,
        template_hash=verifier.template_hash,
        prompts={name: prompts_hash(drawn) for name, drawn in prompts.items()},
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        concurrency=options.concurrency,
        repeats=options.repeats,
        enforce_eager=options.enforce_eager,
        server_args=_server_args(options, speculates=False),
        vllm=find(options.vllm).version,
        machine=f"{provenance.processor}, {provenance.cores} cores, {provenance.memory_bytes / 2**30:.0f} GiB",
    )
    infos = tuple(TaskInfo(name=t.name, group=t.group, num_prompts=len(prompts[t.name])) for t in tasks)
    run = BenchRun(conditions=conditions, tasks=infos, variants=variants, margin=options.margin, provenance=provenance)
    return Plan(variants, prompts, run)


def server_spec(variant: Variant, options: BenchOptions) -> ServeSpec:
    """The server that a variant is measured on."""
    arguments = _server_args(options, speculates=variant.draft is not None)
    if variant.draft is None:
        return plain_spec(
            variant.verifier,
            port=options.port,
            extra_args=arguments,
            tensor_parallel_size=options.tensor_parallel_size,
            vllm=options.vllm,
        )
    return draft_spec(
        variant.draft,
        verifier=variant.verifier,
        num_speculative_tokens=variant.num_speculative_tokens,
        port=options.port,
        extra_args=arguments,
        tensor_parallel_size=options.tensor_parallel_size,
        vllm=options.vllm,
    )


def _server_args(options: BenchOptions, speculates: bool) -> tuple[str, ...]:
    """Prefix caching is off: a prompt that was seen before must not look fast."""
    program = find(options.vllm)
    arguments = ["--no-enable-prefix-caching"]
    numbers = program.version.split(".")[:2]
    if all(part.isdigit() for part in numbers) and tuple(map(int, numbers)) >= _PER_REQUEST_METRICS_SINCE:
        arguments.append("--enable-per-request-metrics")
        if speculates:  # refused by a server without speculation
            arguments += ["--per-request-spec-decode-metrics", "detailed"]
    if options.enforce_eager:
        arguments.append("--enforce-eager")
    return tuple(arguments)
