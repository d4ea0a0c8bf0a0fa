"""One content tree, three walkers: what a table says in a terminal, on a page and in JSON."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhfsim.present.answers.tree import (
    Changed,
    Column,
    FactList,
    Figure,
    Legend,
    Note,
    Page,
    Tile,
    answer,
    hidden,
    section,
    table_of,
)
from rlhfsim.present.answers.written import written
from rlhfsim.present.html.page import html
from rlhfsim.present.html.plots import spec
from rlhfsim.present.tables import (
    BAR,
    BYTES,
    COUNT,
    FIGURE,
    NAMES,
    NEVER,
    PROBABILITY,
    REST,
    SECONDS,
    Bar,
    Spark,
    Stretch,
    Word,
)
from rlhfsim.present.terminal.console import as_text
from rlhfsim.present.terminal.page import parts

ROOT = Path(__file__).parents[2]
RUNS = [
    SimpleNamespace(
        job=SimpleNamespace(name="chat"), gpus=1024, step_s=90.5, fits=0.4, seed=7, with_=["code"]
    ),
    SimpleNamespace(job=SimpleNamespace(name="code"), gpus=8, step_s=None, fits=1.0, seed=8, with_=[]),
]
TABLE = table_of(
    "Runs as priced",
    RUNS,
    Column("job", "job.name", key="job"),
    Column("GPUs of the pool", "gpus", COUNT),
    Column("step", "step_s", SECONDS),
    Column("fits", kind=PROBABILITY),
    Column("next to", "with_", NAMES, spare=1),
    *hidden("seed"),
    Column("twice", lambda run: 2 * run.gpus, COUNT),
    name="runs",
    style=lambda run: "bold" if run.step_s else "",
    notes=("steps without failures",),
)
PAGE = Page(
    schema="rlhfsim.test/1",
    title="Two runs",
    verdict="One of two fits.",
    mark="warn",
    tiles=(Tile(label="Memory", value=8e10, kind=BYTES, range=(7e10, 9e10), detail="the fullest GPU"),),
    sections=(
        section("runs", "Runs", TABLE),
        section("changes", "Changes", Changed(title="chat", lines=(("~", "step: 1 s"),)), asked=True),
        section(
            "checks",
            "Checks",
            table_of("Checks", [("a", 1.5)], Column("what", 0), Column("x", 1, FIGURE)),
            appendix=True,
        ),
    ),
    data={"meets": False, "runs": []},
)


def shown(width: int = 100, *detail: str) -> str:
    return as_text(parts(PAGE, width, detail))


def test_json_has_every_row_in_base_units_under_its_keys() -> None:
    first = {"job": "chat", "gpus": 1024, "step_s": 90.5, "fits": 0.4, "with_": ["code"], "seed": 7}
    second = {"job": "code", "gpus": 8, "step_s": None, "fits": 1.0, "with_": [], "seed": 8}
    assert PAGE.as_data == {"schema": "rlhfsim.test/1", "meets": False, "runs": [first, second]}


def test_a_table_without_a_name_and_the_table_of_a_figure_are_no_rows_of_json_twice() -> None:
    figure = Figure(key="f", title="F", alt="", how="", table=TABLE)
    assert list(answer("s/1", figure, TABLE, table_of("", RUNS, Column("gpus"))).as_data) == [
        "schema",
        "runs",
    ]


def test_the_terminal_writes_units_and_leaves_out_what_json_alone_has() -> None:
    text = shown()
    assert re.search(r"chat +1,024 +90.5 s +40 % +code +2,048", text)
    assert re.search(r"code +8 +- +>99 % +- +16", text)
    assert "seed" not in text
    assert "steps without failures" in text
    assert re.search(r"Memory +80 GB +P10-P90 70 GB to 90 GB, the fullest GPU", text)


def test_what_is_asked_for_is_shown_where_detail_names_it() -> None:
    assert "~ chat" not in shown()
    assert "--detail all also shows: changes and checks" in shown()
    assert "~ chat" in shown(100, "changes")
    assert "1.5" not in shown(100, "changes")
    assert "1.5" in shown(100, "all")


@pytest.mark.parametrize("width", [44, 50, 100])
def test_in_a_narrow_terminal_titles_break_before_a_figure_is_cut(width: int) -> None:
    text = as_text(parts(answer("s/1", TABLE), width))
    assert max(map(len, text.splitlines())) <= width
    for figure in ("1,024", "90.5 s", ">99 %", "2,048"):
        assert figure in text
    assert ("GPUs of the pool" in text) == (width == 100)


def test_a_page_has_the_same_texts_and_the_numbers_behind_them() -> None:
    page = html(PAGE)
    assert '<td class="n" data-value="90.5">90.5 s</td>' in page
    assert '<th scope="col" class="n">GPUs of the pool</th>' in page
    assert "P10-P90 70\u00a0GB to 90\u00a0GB, the fullest GPU" in page
    assert "~" in page


def test_a_spare_column_without_a_value_is_left_out() -> None:
    empty = table_of("", [("a", None)], Column("what", 0), Column("note", 1, spare=1))
    assert written(empty).titles == ("what",)
    kept = table_of("", [("a", "b")], Column("what", 0), Column("note", 1, spare=1))
    assert written(kept).titles == ("what", "note")


def test_rows_beyond_the_most_are_counted() -> None:
    many = table_of("", [(i,) for i in range(5)], Column("i", 0, COUNT), most=3)
    assert len(written(many).rows) == 3
    assert written(many).notes == ("and 2 more rows, which --json has",)
    assert written(table_of("", [(1,)], Column("i", 0, COUNT), most=3)).notes == ()


def test_items_are_objects_mappings_or_rows() -> None:
    columns = Column("x", kind=COUNT), Column("half", lambda item: 0.5)
    assert table_of("", [SimpleNamespace(x=1)], *columns).rows == ((1, 0.5),)
    assert table_of("", [{"x": 1}], *columns).rows == ((1, 0.5),)
    assert table_of("", [(1,)], Column("x", 0)).records == [{}]


def test_a_figure_is_drawn_for_pages_alone() -> None:
    plot = spec([{"type": "bar", "y": [1]}], {"height": 100})
    page = answer("s/1", Figure(key="f", title="Found", alt="a", how="h", plot=plot, table=TABLE))
    assert "Found" in as_text(parts(page))
    assert 'id="f-plot"' in html(page)


HELD = Bar([Stretch(6.0, "weights"), Stretch(3.0, "KV cache")], 10.0, limit=8.0)
DRAWN = answer(
    "s/1",
    Note("It does not fit.", "bad"),
    FactList({"next": "rlhfsim memory plan.json --gpus 64", "more": "--detail all"}, whole=True),
    table_of(
        "Held by a GPU",
        [("train", HELD, 9.0, Word("HBM", "hbm")), ("sum", None, 9.0, "")],
        Column("phase", 0, fit=NEVER),
        Column("8 GB", 1, BAR, fit=REST),
        Column("GB of the fullest GPU", 2, COUNT, narrow="GB"),
        Column("bound by", 3, narrow=""),
        summed=True,
    ),
    Legend(("weights", "KV cache"), over=True),
    table_of("Targets", [("step<9s", Word("met", "good"))], Column("", 0), Column("", 1), look="plain"),
    Note("Below all.", apart=True),
)


def test_bars_are_drawn_in_a_terminal_against_their_limit() -> None:
    lines = as_text(parts(DRAWN)).splitlines()
    head = next(line for line in lines if line.startswith("phase"))
    row = next(line for line in lines if line.startswith("train"))
    limit = head.index("8 GB") + len("8 GB")
    assert row.index("X") == limit, "beyond the limit"
    assert row.index("\u2588") == head.index("0"), "from zero on"
    assert "\u2592" in row[:limit]
    assert lines[lines.index(row) + 2].startswith("sum"), "the sum is set apart"
    assert "XX beyond the GPU" in "".join(lines)


def test_facts_that_are_copied_stay_in_one_line_and_notes_stand_apart() -> None:
    lines = as_text(parts(DRAWN, 40)).splitlines()
    assert "next      rlhfsim memory plan.json --gpus 64" in lines
    assert lines[lines.index("Below all.") - 1] == ""
    assert "  step<9s    met" in lines


def test_a_narrow_terminal_has_other_titles_and_leaves_columns_out() -> None:
    wide, narrow = (as_text(parts(DRAWN, width)) for width in (100, 80))
    assert "GB of the fullest GPU" in wide
    assert "HBM" in wide
    assert "GB of the fullest GPU" not in narrow
    assert "HBM" not in narrow


def test_a_page_says_the_same_without_drawing() -> None:
    page = html(DRAWN)
    assert '<p class="bad">It does not fit.</p>' in page
    assert "<dt>more</dt>" in page
    assert "<td>112 %</td>" in page, "a bar as its share of the limit"
    assert "<td>HBM</td>" in page
    assert str(Spark([1.0, 3.0, 2.0])) == "1 to 2"


# --- how answers are written --------------------------------------------------------------------------

WALKERS = {"tree.py", "written.py"}
ANSWERS = sorted(p for p in (ROOT / "rlhfsim/present/answers").glob("*.py") if p.name not in WALKERS)
MAX_RICH = 4
"""Modules that draw in a terminal; all others say what is to be drawn."""


@pytest.mark.parametrize("path", ANSWERS, ids=lambda p: p.stem)
def test_an_answer_formats_no_number_itself(path: Path) -> None:
    tree = ast.parse(path.read_text())
    formats = {n.lineno for n in ast.walk(tree) if isinstance(n, ast.FormattedValue) and n.format_spec}
    calls = {
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in ("format", "significant")
    }
    assert not formats | calls, f"{path.name}: a kind of present/tables.py says units and digits"


def test_answers_figures_and_pages_do_not_know_the_terminal() -> None:
    shown = [p for p in (ROOT / "rlhfsim/present").rglob("*.py") if p.parent.name != "terminal"]
    assert [p.name for p in shown if "present.terminal" in p.read_text()] == []
    assert len(shown) > len(ANSWERS)


def test_few_modules_know_how_a_terminal_draws() -> None:
    files = [p for top in ("rlhfsim", "executor") for p in (ROOT / top).rglob("*.py")]
    rich = [p.name for p in files if re.search(r"^\s*(from|import) rich\b", p.read_text(), re.M)]
    assert 0 < len(rich) <= MAX_RICH, sorted(rich)
