"""Does a bench run pass? Requirements on its numbers, and no regression against an earlier run; for CI.

A requirement looks at the estimate. A regression must be larger than what is allowed and significant: an unlucky run
does not fail, and one that is too noisy to tell says so. The trap: absolute latency needs the earlier run's machine.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from bench.assemble import Rows
from bench.compare import ALL_TASKS, Comparison, acceptance_ratios, speed_ups
from bench.merge import load
from bench.report import Report, build
from bench.summary import Cell, load_name
from speculators.errors import UserError
from speculators.schema import Strict, write_text

JUNIT_FILE = "gate.xml"
SUMMARY_FILE = "gate.md"

_METRICS: dict[str, Callable[[Cell], float | None]] = {
    "acceptance_length": lambda c: c.acceptance_length.estimate if c.acceptance_length else None,
    "acceptance_rate": lambda c: c.metrics.acceptance.rate if c.metrics.acceptance else None,
    "speed_up": lambda c: c.speed_up.estimate if c.speed_up else None,
    "tpot_ms": lambda c: c.time_per_token.estimate * 1000 if c.time_per_token else None,
    "ttft_ms": lambda c: c.metrics.ttft_s.p50 * 1000 if c.metrics.ttft_s else None,
    "output_tokens_per_s": lambda c: c.metrics.output_tokens_per_s,
    "failed": lambda c: float(c.metrics.num_failed),
}
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda seen, bound: seen >= bound,
    "<=": lambda seen, bound: seen <= bound,
    ">": lambda seen, bound: seen > bound,
    "<": lambda seen, bound: seen < bound,
}
_FORM = re.compile(r"(?P<metric>\w+)(:(?P<task>[^:<>=]+))?(:(?P<variant>[^<>=]+))?\s*(?P<op>>=|<=|>|<)\s*(?P<value>.+)")


class GateOptions(Strict):
    """Check a bench run against requirements and against an earlier run; exit code 1 when it does not pass."""

    run: Path = Field(description="Directory of the bench run.", json_schema_extra={"argument": True})
    baseline: Path | None = Field(None, description="Directory of the earlier run that this one must not fall behind.")
    require: tuple[str, ...] = Field(
        (),
        description="METRIC[:TASK[:VARIANT]] and a bound, such as 'acceptance_length:code>=2.5'; TASK is a task or a "
        f"group, VARIANT by default every one that has the metric. Metrics: {', '.join(_METRICS)}.",
    )
    no_worse_than: str = Field("3%", description="Regressions up to this share pass.")
    force: bool = Field(False, description="Compare with an earlier run of unequal conditions all the same.")
    output: Path | None = Field(None, description=f"Where {JUNIT_FILE} and {SUMMARY_FILE} go; by default into the run.")
    json_output: bool = Field(
        False, description="Print the result as one JSON document.", json_schema_extra={"flags": ["--json"]}
    )


class Check(Strict):
    """One thing that was checked; `unclear` neither passes nor fails."""

    name: str
    status: Literal["passed", "failed", "unclear"]
    message: str


class Gate(Strict):
    """All checks of a run."""

    checks: tuple[Check, ...]
    forced: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not any(check.status == "failed" for check in self.checks)


class Requirement(NamedTuple):
    """A bound on a metric of some tasks and variants (None: all of them)."""

    text: str
    metric: str
    task: str | None
    variant: str | None
    operator: str
    bound: float


def check(options: GateOptions) -> Gate:
    """Check a run and write the JUnit file and the summary.

    Raises:
        UserError: a requirement that cannot be read or matches nothing, no run there, or unequal conditions.
    """
    if not options.require and options.baseline is None:
        raise UserError("--require and --baseline are both missing, so there is nothing to check; give one of them.")
    allowed = share(options.no_worse_than)
    requirements = [parse(text) for text in options.require]
    report = build(options.run)
    checks = [found for requirement in requirements for found in _required(requirement, report)]
    forced: tuple[str, ...] = ()
    if options.baseline is not None:
        loaded = load((options.baseline, options.run), options.force)
        forced = loaded.differences
        checks += _regressions(Rows(loaded), [v.name for v in report.variants], allowed)
    gate = Gate(checks=tuple(checks), forced=forced)
    output = options.output or options.run
    write_text(output / JUNIT_FILE, to_junit(gate))
    write_text(output / SUMMARY_FILE, to_summary(gate))
    return gate


def parse(text: str) -> Requirement:
    """Read `METRIC[:TASK[:VARIANT]]>=VALUE`; raises UserError."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise UserError(
            f"--require: {text!r} is no requirement; write METRIC[:TASK[:VARIANT]] and a bound, such as "
            "acceptance_length:code>=2.5."
        )
    if found["metric"] not in _METRICS:
        raise UserError(f"--require: unknown metric {found['metric']!r}; known are {', '.join(_METRICS)}.")
    return Requirement(
        text, found["metric"], found["task"], found["variant"], found["op"], _number(found["value"], text)
    )


def share(text: str) -> float:
    """`3%` or `0.03` as 0.03; raises UserError."""
    value = _number(text.rstrip("%"), text, "--no-worse-than") / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise UserError(f"--no-worse-than: {text} is not a share from 0 up to 100%; write 3% or 0.03.")
    return value


def to_junit(gate: Gate) -> str:
    """JUnit's XML: unclear checks are skipped ones."""
    counts = {status: sum(c.status == status for c in gate.checks) for status in ("failed", "unclear")}
    numbers = {"tests": str(len(gate.checks)), "failures": str(counts["failed"]), "skipped": str(counts["unclear"])}
    suite = ET.Element("testsuite", {"name": "speculators gate", "errors": "0", **numbers})
    for one in gate.checks:
        case = ET.SubElement(suite, "testcase", {"classname": "speculators.gate", "name": one.name})
        if one.status != "passed":
            ET.SubElement(case, "failure" if one.status == "failed" else "skipped", {"message": one.message})
        ET.SubElement(case, "system-out").text = one.message
    if gate.forced:
        ET.SubElement(suite, "system-out").text = "UNEQUAL CONDITIONS (--force): " + "; ".join(gate.forced)
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def to_summary(gate: Gate) -> str:
    """Markdown for a pull request: failures first."""
    marks = {"failed": "❌", "unclear": "❔", "passed": "✅"}
    failed = sum(c.status == "failed" for c in gate.checks)
    head = "Gate passed" if gate.passed else f"Gate failed: {failed} of {len(gate.checks)} checks"
    lines = [f"**{head}**", ""]
    lines += [f"**UNEQUAL CONDITIONS, compared with --force**: {difference}" for difference in gate.forced]
    lines += ["", "| | check | result |", "| --- | --- | --- |"]
    ordered = sorted(gate.checks, key=lambda c: list(marks).index(c.status))
    lines += [f"| {marks[c.status]} | {_escaped(c.name)} | {_escaped(c.message)} |" for c in ordered]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _number(text: str, whole: str, flag: str = "--require") -> float:
    try:
        return float(text.strip().removesuffix("×"))
    except ValueError:
        raise UserError(f"{flag}: {whole!r} has {text.strip()!r} where a number is expected.") from None


def _required(requirement: Requirement, report: Report) -> list[Check]:
    cells = [cell for cell in report.cells if cell.task in _tasks(requirement, report)]
    if requirement.variant is not None:
        cells = [cell for cell in cells if cell.variant == requirement.variant]
    seen = [(cell, value) for cell in cells if (value := _METRICS[requirement.metric](cell)) is not None]
    if not seen:
        raise UserError(
            f"--require: {requirement.text!r} matches nothing in this run; it has the tasks "
            f"{', '.join(t.name for t in report.tasks)} and the variants {', '.join(report.measured)}."
        )
    checks = []
    for cell, value in seen:
        good = _OPERATORS[requirement.operator](value, requirement.bound)
        name = f"{requirement.text} ({cell.variant}, {cell.task}, {load_name(cell.point)})"
        message = f"{requirement.metric} is {value:.4g}, required {requirement.operator} {requirement.bound:g}"
        checks.append(Check(name=name, status="passed" if good else "failed", message=message))
    return checks


def _tasks(requirement: Requirement, report: Report) -> set[str]:
    if requirement.task is None:
        return {report.rows[-1]}
    return {task.name for task in report.tasks if requirement.task in (task.name, task.group)} | (
        {ALL_TASKS} if requirement.task == ALL_TASKS else set()
    )


def _regressions(rows: Rows, variants: Sequence[str], allowed: float) -> list[Check]:
    """Each variant of the new run (named `NAME (run 2)` in `rows`) against itself in the earlier one."""
    checks = []
    known = {v.name for v in rows.run.variants}
    for name in variants:
        now = f"{name} (run 2)"
        if now not in known:
            continue
        for point in rows.points:
            mine, before = rows.of(now, point), rows.of(name, point)
            found = [
                *acceptance_ratios(mine, before, rows.tasks, allowed),
                *speed_ups(mine, before, rows.tasks, allowed),
            ]
            checks += [_regression(name, c, allowed) for c in found]
    if not checks:
        raise UserError("--baseline: the two runs have no variant and prompt in common, so nothing can be compared.")
    return checks


def _regression(name: str, c: Comparison, allowed: float) -> Check:
    what = "acceptance length" if c.metric == "acceptance_length" else "speed"
    interval = (
        "no interval" if c.low is None or c.high is None else f"95% interval {c.low - 1:+.1%} to {c.high - 1:+.1%}"
    )
    message = f"{what} {c.estimate - 1:+.1%} against the baseline run ({interval}), allowed -{allowed:.1%}"
    beyond = c.estimate < 1 - allowed
    if beyond and c.verdict == "worse":
        status: Literal["passed", "failed", "unclear"] = "failed"
    elif beyond:
        status, message = "unclear", message + "; too noisy to tell"
    else:
        status = "passed"
    return Check(name=f"no worse {what} ({name}, {c.task}, {load_name(c.point)})", status=status, message=message)
