from __future__ import annotations

import pytest

from lab.scoreboard.assumed import check
from lab.scoreboard.rows import rows_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.validation import assumptions
from rlhfsim.validation.rows import Row, parse_csv

HEADER = b"model,gpus,gpu_type,seq_len,framework,tp,micro_batch,source\n"


def row(cells: bytes = b"m,8,H100,4096,NeMo 1.0,,,s") -> Row:
    return parse_csv(HEADER + cells + b"\n", "t.csv")[0]


def parsed(*entries: str) -> dict[str, tuple[assumptions.Assumption, ...]]:
    text = "training:\n" + "".join(f"  - {{{entry}}}\n" for entry in entries)
    check(text, "a.yaml")
    return dict(assumptions.parse(text))


def test_a_prefix_and_a_list_match_and_only_blanks_are_filled() -> None:
    entries = parsed(
        "id: a, match: {framework: 'NeMo*', gpus: [8, 16]}, set: {tp: 2, seq_len: 1}, source: doc"
    )
    filled, shown = assumptions.apply("training", row(), entries)
    assert (filled.number("tp"), filled.number("seq_len")) == (2, 4096)
    assert shown == ("tp=2 (a)",)


def test_a_row_that_does_not_match_is_left_alone() -> None:
    entries = parsed("id: a, match: {framework: NeMo}, set: {tp: 2}, source: doc")
    it = row()
    assert assumptions.apply("training", it, entries) == (it, ())


def test_an_empty_match_value_means_blank() -> None:
    entries = parsed("id: a, match: {tp: null}, set: {micro_batch: 1}, source: doc")
    assert assumptions.apply("training", row(), entries)[1] == ("micro_batch=1 (a)",)
    assert assumptions.apply("training", row(b"m,8,H100,4096,f,1,,s"), entries)[1] == ()


def test_two_entries_with_different_values_for_one_blank_conflict() -> None:
    entries = parsed(
        "id: a, match: {model: m}, set: {tp: 2}, source: doc",
        "id: b, match: {gpus: 8}, set: {tp: 4}, source: doc",
    )
    with pytest.raises(RlhfsimError, match="a and b of training fill tp"):
        assumptions.apply("training", row(), entries)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("id: a, match: {model: m}, set: {tp: 2}", "needs exactly id, match, set and source"),
        ("id: a, match: {model: m}, set: {tp: 2}, source: ''", "needs exactly id, match, set and source"),
        ("id: a, match: {model: m}, set: {}, source: doc", "set must map columns"),
        ("id: a, match: {model: m}, set: {tpp: 2}, source: doc", "unknown column 'tpp'"),
        ("id: a, match: {modell: m}, set: {tp: 2}, source: doc", "unknown column 'modell'"),
        ("id: a, match: m, set: {tp: 2}, source: doc", "match must map columns"),
        ("id: a, match: {model: m}, set: {tp: 2}, source: doc, note: x", "needs exactly id, match, set"),
    ],
)
def test_an_entry_without_source_or_with_unknown_names_is_refused(entry: str, said: str) -> None:
    with pytest.raises(RlhfsimError, match=said):
        parsed(entry)


def test_an_id_that_stands_twice_is_refused() -> None:
    entry = "id: a, match: {model: m}, set: {tp: 2}, source: doc"
    with pytest.raises(RlhfsimError, match="two entries"):
        parsed(entry, entry)


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="trainning"):
        check("trainning: []\n", "a.yaml")


def test_the_shipped_file_holds_entries() -> None:
    check(assumptions.shipped_text(), "assumptions.yaml")


def test_the_shipped_entries_never_conflict_on_the_shipped_rows() -> None:
    for kind, table in assumptions.TABLE_OF.items():
        for it in rows_of(table):
            filled, _ = assumptions.apply(kind, it)
            kept = {c: v for c, v in it.values.items() if v}
            assert kept.items() <= filled.values.items()


def test_the_recipe_of_a_release_gives_the_gpu_split_of_an_async_row() -> None:
    (it,) = [r for r in rows_of("rlhf") if (r.file, r.line) == ("rlhf.csv", 7)]
    filled, _ = assumptions.apply("rlhf", it)
    assert (filled.integer("gpus_train"), filled.integer("gpus_gen")) == (128, 64)


@pytest.mark.parametrize(("line", "share"), [(6, 0.3), (9, 0.4), (10, 0.6), (12, 0.6), (24, 0.6)])
def test_recipes_of_gb200_have_shares_of_their_own(line: int, share: float) -> None:
    (it,) = [r for r in rows_of("rlhf") if (r.file, r.line) == ("rlhf_nemo_rl.csv", line)]
    assert assumptions.apply("rlhf", it)[0].number("gpu_memory_utilization") == share
