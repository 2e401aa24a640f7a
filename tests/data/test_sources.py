"""Decontamination and selection of training prompts (no download; tests/e2e fetches the real ones)."""

import pytest

from speculators.data.decontaminate import benchmark_grams, shares_gram, words
from speculators.data.sources import SHARES, fetch_verifier, mix_prompts, shares_of, whole_records
from speculators.errors import UserError

BENCHMARK = ["One two three four five six seven eight nine ten eleven twelve thirteen fourteen.", "Add two numbers."]


def slow_overlap(text, benchmark):
    """Every run of 13 words against every run; shorter texts whole."""
    a, b = words(text), words(benchmark)
    runs_a = [a[i : i + 13] for i in range(len(a) - 12)] or [a]
    runs_b = [b[i : i + 13] for i in range(len(b) - 12)] or [b]
    return any(x == y for x in runs_a for y in runs_b)


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        ("Say: one, TWO three four five six seven eight nine ten eleven twelve thirteen!", True),
        ("two three four five six seven eight nine ten eleven twelve thirteen fourteen", True),
        ("one two three four five six seven eight nine ten eleven twelve", False),
        ("one two three four five six SEVENTY eight nine ten eleven twelve thirteen fourteen", False),
        ("add two numbers", True),
        ("Please add two numbers.", False),
    ],
)
def test_thirteen_shared_words_drop_a_prompt_and_twelve_do_not(text, dropped):
    assert shares_gram(text, benchmark_grams(BENCHMARK)) is dropped
    assert any(slow_overlap(text, benchmark) for benchmark in BENCHMARK) is dropped


@pytest.mark.parametrize("number", [1, 2, 3, 7, 10, 1500])
def test_shares_add_up(number):
    assert sum(shares_of(number)) == number


def test_a_list_cut_off_anywhere_gives_its_whole_records():
    text = ' [\n{"a": 1}, {"b": "]}"},\n {"c": [2]}]'
    assert list(whole_records(text)) == [{"a": 1}, {"b": "]}"}, {"c": [2]}]
    whole_at = [text.index("}") + 1, text.index('"]}"}') + 5, text.index("]}]") + 2]
    for end in range(text.index("{") + 1, len(text)):
        assert len(list(whole_records(text[:end]))) == sum(end >= at for at in whole_at)


TEXTS = {name: [f"{name} question number {i} please" for i in range(50)] for name in SHARES}


def mix(number, seed=0):
    return mix_prompts(TEXTS, ["math question number 7 please"], number, seed)


def test_a_larger_mix_contains_the_smaller_and_another_seed_differs():
    small, large = mix(20)[0], mix(60)[0]
    assert len(small) == 20
    assert set(small) <= set(large)
    assert mix(20)[0] == small
    assert set(mix(20, seed=1)[0]) != set(small)


def test_what_was_dropped_for_a_benchmark_is_counted_by_source():
    prompts, counts = mix(100)
    assert {name: c.dropped_for_benchmark for name, c in counts.items()} == {"chat": 0, "math": 1, "code": 0}
    assert "math question number 7 please" not in {p.text for p in prompts}
    assert {name: c.written for name, c in counts.items()} == {"chat": 20, "math": 45, "code": 35}


def test_more_prompts_than_there_are_is_refused():
    with pytest.raises(UserError, match=r"--num-prompts: 1000 asks for .* there are"):
        mix(1000)


def test_a_foreign_directory_is_not_taken_for_the_verifier(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="not a complete verifier"):
        fetch_verifier(tmp_path)
