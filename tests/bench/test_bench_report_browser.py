"""The page in a real browser: nothing fails or is fetched, every chart is drawn, no width makes the page scroll."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Page, find_chromium, page
from test_bench_merge import make_loaded_run

from bench.conditions import Point
from bench.records import BenchRun, RecordWriter, read_records
from bench.render import write_report
from bench.report import build
from speculators.acceptance import Acceptance
from speculators.prediction import Prediction, SamplePrediction
from speculators.schema import write_json

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium here; install one to see the page drawn")

_CHARTS = """[...document.querySelectorAll(".chart")].filter((c) => c.offsetParent).map((c) => [
  c.id, c.getBoundingClientRect().width, c.querySelectorAll(".scatterlayer .trace .point").length])"""
_DRAWN = {"speed-up-c1", "load-tpot", "load-total", "marginal", "conditional", "output", "context", "parity"}
_WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"
_CUT = """[...document.querySelectorAll("h1, h2, p, .chart text")].filter((e) => e.offsetParent || e.ownerSVGElement)
  .map((e) => [e.textContent, e.getBoundingClientRect()]).filter(([t, r]) => t && r.width && r.right > innerWidth + 1)
  .map(([t]) => t)"""


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two loads, two drafts, steps in order and a prediction, so that every chart has something to draw."""
    path = make_loaded_run(tmp_path_factory.mktemp("run"))
    run, records = BenchRun.read(path), read_records(path)
    steps = Acceptance.from_histogram((4, 3, 2, 1))
    names = dict.fromkeys((r.task, r.prompt_id) for r in records)
    predicted = [
        SamplePrediction(sample_id=f"{n:016x}", conversation_id=f"{task}/{prompt}", source=task, acceptance=steps)
        for n, (task, prompt) in enumerate(names)
    ]
    write_json(path / "predicted" / "dflash.json", Prediction.of("/runs/dflash", predicted, 3))
    nothing = {"num_failed": 0, "requests": None, "counters": None}
    measured = dict.fromkeys((r.variant, r.task, r.point) for r in records)
    points = [Point(variant=v, task=t, point=p, num_requests=12, wall_s=9.0, **nothing) for v, t, p in measured]
    run.model_copy(update={"points": tuple(points)}).write(path)
    with RecordWriter(path) as writer:
        for record in records:
            if record.acceptance:
                order = tuple(a for a, count in enumerate(record.acceptance.histogram) for _ in range(count))
                writer.append(record.model_copy(update={"accepted_per_step": order, "prompt_tokens": 60}))
    return write_report(build(path), path)


def looked_at(profile: Path, look: Callable[[Page], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with page(profile) as tab:
            return await look(tab)

    return asyncio.run(main())


def test_every_chart_is_drawn_at_every_width_and_nothing_fails(report_file: Path, tmp_path: Path) -> None:
    async def look(tab: Page) -> list[Any]:
        seen = []
        for width, dark in ((1280, False), (390, True)):
            await tab.open(report_file, width, dark)
            seen.append([await tab.run(script) for script in (_CHARTS, _WIDTHS, _CUT)])
        return [seen, tab.problems, tab.requested]

    seen, problems, requested = looked_at(tmp_path, look)
    assert problems == []
    assert {address.partition(":")[0] for address in requested} <= {"file", "data", "blob"}
    for charts, (needed, window), cut in seen:
        drawn = {name: points for name, width, points in charts if width > 100}
        assert drawn.keys() == _DRAWN
        assert min(drawn.values()) > 0
        assert needed <= window
        assert cut == []


def test_the_reader_can_sort_copy_choose_and_turn_off_the_light(report_file: Path, tmp_path: Path) -> None:
    async def look(tab: Page) -> dict[str, Any]:
        await tab.open(report_file, 1280)
        seen = {"light": await tab.run("document.querySelector('.chart .point').style.fill")}
        await tab.scheme(dark=True)
        seen["dark"] = await tab.run("document.querySelector('.chart .point').style.fill")
        details = "[...document.querySelectorAll('table')].find((t) => t.textContent.includes('first token'))"
        column = f"[...{details}.tBodies[0].rows].map((r) => parseFloat(r.cells[3].textContent))"
        await tab.run(f"{details}.tHead.rows[0].cells[3].click()")
        seen["sorted"] = await tab.run(column)
        await tab.run(f"{details}.tHead.rows[0].cells[3].click()")
        seen["reversed"] = await tab.run(column)
        await tab.run("document.execCommand = () => { window.copied = document.activeElement.value; return true; }")
        await tab.run(f"{details}.parentNode.nextElementSibling.click()")
        seen["copied"] = await tab.run("copied")
        await tab.run("load.value = 'c4'")
        await tab.run("load.dispatchEvent(new Event('change'))")
        seen["loads"] = await tab.run(
            "[...document.querySelectorAll('.at-load:not([hidden])')].map((part) => part.dataset.point)"
        )
        return seen

    seen = looked_at(tmp_path, look)
    assert seen["light"] != seen["dark"]
    assert seen["sorted"] == sorted(seen["sorted"])
    assert seen["reversed"] == sorted(seen["sorted"], reverse=True)
    lines = [line.split("\t") for line in seen["copied"].splitlines()]
    assert lines[0][:3] == ["task", "variant", "first token"]
    assert {len(line) for line in lines} == {len(lines[0])}
    assert set(seen["loads"]) == {"c4"}
