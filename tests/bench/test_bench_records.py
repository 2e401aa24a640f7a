"""Rows survive crashes, and a run continues from what is on disk."""

from pathlib import Path

import pytest

from bench.records import REQUESTS_FILE, RecordWriter, RequestRecord, finished_keys, read_records
from speculators.acceptance import Acceptance
from speculators.errors import UserError


def record(prompt: str, **fields: object) -> RequestRecord:
    return RequestRecord.model_validate({"variant": "dflash", "task": "gsm8k", "prompt_id": prompt, **fields})


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [
        record(
            "0",
            tpot_s=0.03,
            token_ids=(1, 2, 3),
            prompt_token_ids=(4, 5),
            acceptance=Acceptance.from_histogram([4, 3, 1]),
        ),
        record("1", text="line\u2028separator\nand newline", chunk_gaps_s=(0.1, 0.2)),
        record("2", error="500"),
    ]
    with RecordWriter(tmp_path) as writer:
        for row in rows:
            writer.append(row)
    assert read_records(tmp_path) == rows


def test_a_row_cut_anywhere_loses_that_row_only(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        writer.append(record("0", text="first"))
        writer.append(record("1", text="second"))
    whole = (tmp_path / REQUESTS_FILE).read_bytes()
    first_end = whole.index(b"\n") + 1
    for end in range(first_end, len(whole)):
        (tmp_path / REQUESTS_FILE).write_bytes(whole[:end])
        assert [row.prompt_id for row in read_records(tmp_path)] == ["0"]
        with RecordWriter(tmp_path) as writer:
            writer.append(record("2"))
        assert [row.prompt_id for row in read_records(tmp_path)] == ["0", "2"]


def test_a_failure_is_tried_again_and_the_last_row_counts(tmp_path: Path) -> None:
    with RecordWriter(tmp_path) as writer:
        writer.append(record("0", error="connection dropped"))
        writer.append(record("1", tpot_s=0.1))
    assert [key.prompt_id for key in finished_keys(read_records(tmp_path))] == ["1"]
    with RecordWriter(tmp_path) as writer:
        writer.append(record("0", tpot_s=0.2))
    rows = read_records(tmp_path)
    assert [(row.prompt_id, row.tpot_s) for row in rows] == [("0", 0.2), ("1", 0.1)]
    assert len(finished_keys(rows)) == 2


@pytest.mark.parametrize("line", ["{broken", "[1, 2]", '{"variant": "a"}', '{"surprise": 1}'])
def test_a_wrong_row_in_the_middle_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    good = record("0").model_dump_json()
    (tmp_path / REQUESTS_FILE).write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(UserError, match="line 2"):
        read_records(tmp_path)


def test_nothing_written_yet_is_no_rows(tmp_path: Path) -> None:
    assert read_records(tmp_path) == []
