"""The run that was asked for, from the first screen into plan.json and to every command that reads it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlhfsim.cli.design import design
from rlhfsim.cli.diff import diff
from rlhfsim.cli.estimate import estimate
from rlhfsim.cli.export import export
from rlhfsim.cli.report import report
from rlhfsim.cli.simulate import simulate
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import read_plan, write_plan
from rlhfsim.present.reproduce import design_arguments
from rlhfsim.units import format

WORK = [
    *("--gpus", "2", "--model", "0.5b", "--algorithm", "grpo"),
    *("--prompts", "32", "--samples", "2", "--response-len", "128"),
]
RUN = ("--steps", "500", "--deadline", "2h", "--budget", "9USD", "--require", "step_time<1h")


def said(command: Any, *arguments: str | Path) -> str:
    result = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    return str(result.output)


def designed(out: Path, *options: str) -> str:
    return said(design, *WORK, *options, "--out", out)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The plan of a run with a deadline, and the first screen."""
    path = tmp_path_factory.mktemp("asked") / "plan.json"
    screen = designed(path, *RUN, "--framework", "verl", "--price", "reserved")
    return path, screen


def verdict_of(screen: str) -> str:
    """The sentence above the title, its lines joined."""
    return " ".join(" ".join(screen.split("\nGRPO of ")[0].split()).split())


def test_the_plan_carries_the_run_its_odds_and_the_prices_of_the_day(asked: tuple[Path, str]) -> None:
    data = json.loads(asked[0].read_text())
    run = data["run"]
    assert run["steps"] == 500
    assert [(t["name"], t["value"]) for t in run["targets"]] == [
        ("step_time<", 3600),
        ("deadline", 7200),
        ("budget", 9),
    ]
    assert all(0 <= t["probability"] <= 1 for t in run["targets"])
    assert run["odds"]["run_s"][0] < 500 * data["prediction"]["step_s"] < run["odds"]["run_s"][2]
    [hardware] = data["hardware"]
    assert hardware["market"] == "reserved"
    assert hardware["price"]["source"]
    assert hardware["price"]["date"][:2] == "20"


def test_a_report_begins_with_the_sentence_of_the_first_screen(
    asked: tuple[Path, str], tmp_path: Path
) -> None:
    path, screen = asked
    out = tmp_path / "page.html"
    page = said(report, path, "--no-sizes", "--out", out)
    assert page.splitlines()[0] == verdict_of(screen)
    assert ": 500 steps take" in page
    assert "1,000 steps" not in out.read_text().replace("\u00a0", " ")
    assert screen.split("\nGRPO of ")[0] in said(estimate, path)


def test_an_export_says_the_run_in_its_script_and_its_readme(asked: tuple[Path, str], tmp_path: Path) -> None:
    path, screen = asked
    said(export, path, "--to", "verl", "--out", tmp_path / "run")
    script, page = ((tmp_path / "run" / name).read_text() for name in ("launch.sh", "README.md"))
    assert f"# {verdict_of(screen)}\n" in script
    assert "500 steps take" in page


def test_two_plans_that_differ_in_the_run_alone_say_so(tmp_path: Path) -> None:
    one, other = tmp_path / "before.json", tmp_path / "after.json"
    designed(one, "--steps", "500", "--deadline", "2h", "--price", "3", "--max-oom", "5%")
    designed(other, "--steps", "900", "--budget", "90", "--price", "2", "--max-oom", "6%")
    found = json.loads(said(diff, one, other, "--json"))
    changed = {c["path"]: (c["before"], c["after"]) for c in found["question"]}
    assert changed["run.steps"] == (500, 900)
    assert changed["run.deadline"] == ("2 h", None)
    assert changed["run.budget"] == (None, "90 USD")
    assert changed["hardware.price.value"] == (3, 2)
    assert changed["request.max_oom"] == (0.05, 0.06)
    names = [f["name"] for f in found["outcome"]]
    assert "run" in names
    assert "price of the run" in names
    assert re.search(r"; run [\d,.]+ s -> [\d,.]+ s \(\+80 %\)", " ".join(said(diff, one, other).split()))


def test_a_run_that_was_edited_is_refused_and_priced_anew_it_is_read(
    asked: tuple[Path, str], tmp_path: Path
) -> None:
    data = json.loads(asked[0].read_text())
    data["run"]["steps"] = 5
    edited, anew = tmp_path / "edited.json", tmp_path / "anew.json"
    edited.write_text(json.dumps(data))
    with pytest.raises(RlhfsimError, match="edited after it was priced"):
        said(report, edited)
    assert ": 5 steps take" in said(estimate, edited, "--out", anew)
    run = read_plan(anew, as_priced=True).run
    assert run is not None
    assert run.steps == 5
    assert ": 7 steps take" in said(estimate, edited, "--steps", "7")


def test_a_plan_without_a_run_names_no_run(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    screen = designed(path)
    data = json.loads(path.read_text())
    assert "run" not in data
    assert "steps take" not in screen
    assert "steps take" not in said(report, path, "--no-sizes", "--out", tmp_path / "page.html")


def test_the_command_of_a_report_asks_the_same_run(asked: tuple[Path, str]) -> None:
    plan = read_plan(asked[0])
    old = replace(plan, hardware=tuple(replace(h, market=None) for h in plan.hardware))
    for one in (plan, old):
        given = design.make_context("design", design_arguments(one)).params
        assert (given["steps"], given["deadline"], given["budget"]) == (500, 7200, 9)
        assert given["require"] == ("step_time<1h",)
        assert given["price"] == "reserved"


def test_a_plan_of_an_older_release_is_read(asked: tuple[Path, str], tmp_path: Path) -> None:
    plan = read_plan(asked[0])
    write_plan(tmp_path / "new.json", plan)
    data = json.loads((tmp_path / "new.json").read_text())
    del data["run"], data["prediction_hash"], data["hardware"][0]["market"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    assert read_plan(tmp_path / "old.json", as_priced=True).run is None


def test_a_simulation_says_what_the_run_takes_at_its_pace(asked: tuple[Path, str]) -> None:
    shown = said(simulate, asked[0], "--iterations", "2", "--expected-lengths")
    step_s = read_plan(asked[0]).prediction.step_s
    assert f"500 steps take {format(500 * step_s, 's')} at this pace" in shown
    failing = said(simulate, asked[0], "--iterations", "2", "--expected-lengths", "--mtbf", "20h")
    assert "at this pace with failures and checkpoints" in " ".join(failing.split())
    plan = json.loads(said(simulate, asked[0], "--iterations", "2", "--json"))["plan"]
    assert plan["run"]["steps"] == 500
    assert plan["run"]["odds"] is None
