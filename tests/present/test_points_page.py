"""The page of many points: what it says alone, what a reader filters in a browser, and what it refuses."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhfsim.cli.report import report
from rlhfsim.errors import RlhfsimError
from rlhfsim.present.answers.tree import Explorer
from rlhfsim.present.html.page import write
from rlhfsim.present.pages.points import points_page
from rlhfsim.what_if.scenarios.result import COLUMNS

PROMPTS, GPUS = "workload.prompts", "cluster.node_groups.0.gpus"
HEAD = ["name", PROMPTS, GPUS, *(name for name in COLUMNS if name != "on_front")]


def lines() -> Iterator[dict[str, Any]]:
    """The base, a grid of three batches on four clusters (the smallest holds nothing), and a named point."""
    yield {"name": "base", "gpus": 16, "architecture": "hybrid", "step_s": 80.0, "usd_per_step": 1.1}
    for prompts in (64, 128, 256):
        work = {} if prompts == 128 else {"other_work": "prompts"}
        for gpus in (8, 16, 32, 64):
            point = {"name": f"prompts {prompts}, gpus {gpus}", PROMPTS: prompts, GPUS: gpus, **work}
            fits = {"gpus": gpus, "architecture": "hybrid" if gpus < 64 else "async"}
            seconds = 10 * prompts / gpus
            fits |= {"step_s": seconds, "usd_per_step": seconds * gpus**1.1 / 1200}
            yield point | (fits if gpus > 8 else {"shortage": "too large"})
    yield {"name": "<b>405B</b>", "shortage": "too large"}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "points.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEAD, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines())
    return path


def test_the_best_points_are_said_without_a_browser(table: Path) -> None:
    page = points_page(table)
    assert page.verdict == (
        "Fastest of 4 points of the base's work: prompts 128, gpus 64, 20 s a step; cheapest: base, $1.10."
    )
    assert [tile.value for tile in page.tiles] == ["14", "10", "4"]
    explorer = page.sections[0].blocks[0]
    assert isinstance(explorer, Explorer)
    assert [row[0] for row in explorer.table.rows] == ["prompts 128, gpus 64", "prompts 128, gpus 32", "base"]
    assert [(a.label, a.values, a.chosen) for a in explorer.filters] == [
        ("prompts per step", ("as in the base", "64", "128", "256"), None),
        ("number of GPUs", ("as in the base", "8", "16", "32", "64"), None),
        ("plan", ("nothing fits", "async", "hybrid"), None),
        ("other work", ("none", "prompts"), 0),
    ]
    assert explorer.map == (0, 1)


def test_a_reader_filters_points_and_sees_the_map_and_the_front(table: Path, browser: Any) -> None:
    write(table.with_suffix(".html"), points_page(table))
    page = browser.new_page()
    faults = list[str]()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(table.with_suffix(".html").as_uri())
    page.wait_for_selector("html[data-drawn=yes]")
    count = page.locator(".count")
    assert count.inner_text() == "6 of 14 points match, 4 have a plan that fits"
    page.select_option("[data-axis='3']", label="any")
    page.select_option("[data-axis='0']", label="256")
    page.wait_for_function("document.querySelector('.count').textContent.startsWith('4 of 14')")
    cells = page.evaluate("document.querySelector('.map').data[0].z")
    assert cells[2:] == [[None] * 3 + [160], [None] * 3 + [80], [None] * 3 + [40]]
    front = page.evaluate("document.querySelector('.cloud').data[1].x")
    assert front == [40, 80, 160]
    assert faults == []
    page.close()


@pytest.mark.parametrize(
    ("text", "reason"), [("a,b\n1,2\n", "no column name"), ("", "No columns"), (",".join(HEAD), "no rows")]
)
def test_another_table_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(RlhfsimError, match=reason) as caught:
        points_page(path)
    assert caught.value.code == "no-table-of-points"


@pytest.mark.parametrize(
    ("name", "cell", "reason"),
    [
        ("step_s", "inf", "step_s is 'inf'"),
        ("step_s", "-5", "step_s is '-5"),
        ("step_s", "soon", "step_s is 'soon'"),
        ("gpus", "inf", "gpus is 'inf'"),
        ("gpus", "", "seconds and no gpus"),
        ("usd_per_step", "1e300", "usd_per_step is '1e"),
    ],
)
def test_a_spoiled_cell_is_refused_with_its_line(tmp_path: Path, name: str, cell: str, reason: str) -> None:
    path = tmp_path / "points.csv"
    good = {"name": "base", "gpus": 8, "architecture": "hybrid", "step_s": 80, "usd_per_step": 1}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEAD, lineterminator="\n")
        writer.writeheader()
        writer.writerows([good, good | {name: cell}])
    with pytest.raises(RlhfsimError, match=reason) as caught:
        points_page(path)
    assert f"{path}:3" in str(caught.value)


def test_names_cannot_end_the_data_in_the_page(table: Path) -> None:
    write(table.with_suffix(".html"), points_page(table))
    text = table.with_suffix(".html").read_text()
    data = text.split('id="explorer-data">')[1].split("</script>")[0]
    assert len(json.loads(data)["seconds"]) == 14


def test_the_command_counts_no_figures_of_a_page_that_draws_its_own(table: Path) -> None:
    ran = CliRunner().invoke(report, [str(table), "--out", str(table.with_suffix(".html"))])
    assert ran.exit_code == 0
    assert "0 figures" not in ran.output
    assert f"a page in {table.with_suffix('.html')} (" in ran.output.replace("\n", "")
