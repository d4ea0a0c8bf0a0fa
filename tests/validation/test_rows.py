from __future__ import annotations

from pathlib import Path

import pytest

from lab.scoreboard.rows import rows_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.validation import rows
from rlhfsim.validation.rows import TABLES, missing, parse_csv, publication, read_csv

HEADER = b"model,gpus,gpu_type,seq_len,framework,tp,source\n"


def test_every_shipped_table_is_recognised_as_itself_without_unknown_columns() -> None:
    for name in TABLES:
        found = rows_of(name)
        assert {row.table for row in found} == {name}
        assert rows.notes(found) == []


def test_shipped_row_counts_are_those_of_the_transcription() -> None:
    tables = ("training", "memory", "rlhf", "oom_cases")
    counts = {name: sum(r.file == f"{name}.csv" for r in rows_of(name)) for name in tables}
    assert counts == {"training": 580, "memory": 128, "rlhf": 80, "oom_cases": 134}


def test_further_files_of_a_table_keep_their_own_name() -> None:
    assert {"rlhf.csv", "rlhf_nemo_rl_v03.csv"} <= {row.file for row in rows_of("rlhf")}
    assert {"training.csv", "training_prime_rl.csv"} <= {row.file for row in rows_of("training")}


def test_no_row_of_the_further_files_stands_twice_or_lacks_its_source() -> None:
    for table in ("training", "memory", "rlhf"):
        further = [r for r in rows_of(table) if r.file != f"{table}.csv"]
        seen = [tuple(sorted((k, v) for k, v in r.values.items() if k != "notes")) for r in further]
        assert len(set(seen)) == len(seen)
        assert [r.line for r in further if not (r.text("source") and r.text("as_published"))] == []


def test_a_blank_cell_is_none_and_not_zero() -> None:
    (row,) = parse_csv(HEADER + b"m,8,H100,4096,f,,s\n", "t.csv")
    assert row.number("tp") is None
    assert row.text("tp") is None
    assert row.number("gpus") == 8


def test_a_documented_column_that_the_file_lacks_reads_as_blank() -> None:
    (row,) = parse_csv(HEADER + b"m,8,H100,4096,f,1,s\n", "t.csv")
    assert row.number("step_time_s") is None


def test_the_line_is_that_of_the_file_even_after_a_quoted_line_break() -> None:
    data = HEADER + b'"m\nm",8,H100,4096,f,1,s\n\nm,8,H100,4096,f,1,s\n'
    assert [row.line for row in parse_csv(data, "t.csv")] == [2, 5]


def test_a_byte_order_mark_is_not_part_of_the_first_column() -> None:
    (row,) = parse_csv(b"\xef\xbb\xbf" + HEADER + b"m,8,H100,4096,f,1,s\n", "t.csv")
    assert row.text("model") == "m"


@pytest.mark.parametrize(
    ("data", "code", "line"),
    [
        (b"", "malformed-table", 1),
        (b"a,b,c\n1,2,3\n", "malformed-table", 1),
        (b"model,model,gpus\n", "malformed-table", 1),
        (HEADER + b"m,8,H100,4096,f,1\n", "malformed-table", 2),
        (HEADER + b"m,8,H100,4096,f,1,s,extra\n", "malformed-table", 2),
        (HEADER + b"m,8,H100\x00,4096,f,1,s\n", "malformed-table", 2),
        (HEADER + b"m,8,H100,4096,f,1,\xff\n", "malformed-table", 2),
        (HEADER + b'"m,8,H100,4096,f,1,s\n', "malformed-table", 2),
    ],
)
def test_a_malformed_table_is_refused_with_its_line(data: bytes, code: str, line: int) -> None:
    with pytest.raises(RlhfsimError) as caught:
        parse_csv(data, "t.csv")
    assert caught.value.code == code
    assert caught.value.place is not None
    assert (caught.value.place.file, caught.value.place.line) == ("t.csv", line)
    assert caught.value.help


def test_a_difference_of_two_readings_may_be_negative() -> None:
    data = (
        b"kind,model,gpu_type,peak_mem_gib_per_gpu,kv_cache_tokens,cudagraph_gib_per_gpu\nk,m,H100,,,-0.4\n"
    )
    (row,) = parse_csv(data, "t.csv")
    assert row.number("cudagraph_gib_per_gpu") == -0.4


@pytest.mark.parametrize(
    ("cell", "code"),
    [
        ("8-16", "not-a-number"),
        ("eight", "not-a-number"),
        ("nan", "not-a-number"),
        ("-inf", "not-a-number"),
        ("1e999", "not-a-number"),
        ("-1", "negative-number"),
    ],
)
def test_a_cell_that_is_no_number_makes_only_itself_unusable(cell: str, code: str) -> None:
    data = HEADER + f"m,{cell},H100,4096,f,1,s\nm,8,H100,4096,f,1,s\n".encode()
    bad, good = parse_csv(data, "t.csv")
    assert bad.text("gpus") == cell
    assert (bad.number("tp"), good.number("gpus")) == (1, 8)
    with pytest.raises(RlhfsimError) as caught:
        bad.number("gpus")
    assert caught.value.code == code
    assert caught.value.place is not None
    assert caught.value.place.line == 2
    if cell != "8-16":
        (note,) = rows.notes([bad, good])
        assert "t.csv:2" in note
        assert "gpus" in note


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("zero2, 8 ranks (zero3 in prose)", 2),
        ("(zero3 in prose) zero2", 2),
        ("(zero3)", 3),
        ("ZeRO-1", 1),
        ("FSDP", None),
        (None, None),
    ],
)
def test_the_zero_stage_is_the_stated_one_and_not_that_of_a_remark(
    text: str | None, stage: int | None
) -> None:
    assert rows.zero_stage(text) == stage


def test_a_fraction_is_not_a_whole_number() -> None:
    (row,) = parse_csv(HEADER + b"m,8.5,H100,4096,f,1,s\n", "t.csv")
    with pytest.raises(RlhfsimError, match="whole number"):
        row.integer("gpus")


def test_an_unknown_column_is_noted_with_the_near_one() -> None:
    data = HEADER.replace(b"\n", b",micro_bach\n") + b"m,8,H100,4096,f,1,s,2\n"
    (note,) = rows.notes(parse_csv(data, "t.csv"))
    assert "micro_bach" in note
    assert "micro_batch" in note


def test_the_nearest_table_and_what_it_lacks_are_named() -> None:
    with pytest.raises(RlhfsimError) as caught:
        parse_csv(b"model,gpus,gpu_type,seq_len,tp,pp,dp,mfu_pct\n", "t.csv")
    assert "training" in str(caught.value.help)
    assert "framework" in str(caught.value.help)


def test_missing_and_complete_agree() -> None:
    (row,) = parse_csv(HEADER + b"m,8,H100,4096,f,,s\n", "t.csv")
    assert missing(row, ("gpus", "tp")) == ("tp",)
    assert missing(row, ("gpus", "tp"))
    assert not missing(row, ("gpus",))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(RlhfsimError) as caught:
            read_csv(path)
        assert caught.value.code == "unreadable-file"


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    with path.open("wb") as file:
        file.truncate(rows.MAX_BYTES + 1)
    with pytest.raises(RlhfsimError, match="larger than 64 MiB"):
        read_csv(path)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("a/b@docs/x.md § Part (commit 12)", "a/b@docs/x.md"),
        ("a/b@docs/x.md (commit 12) Table 1", "a/b@docs/x.md"),
        ("arXiv:2205.05198 Table 5 (times)", "arXiv:2205.05198"),
        ("mlcommons/inference_results_v4.1@closed/AMD/log.txt", "mlcommons/inference_results_v4.1"),
        ("a/b issue #12", "a/b issue #12"),
    ],
)
def test_rows_of_one_publication_stand_together(source: str, name: str) -> None:
    assert publication(source) == name
