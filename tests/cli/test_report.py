"""`rlhfsim report`: which page is written for what, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from lab.planted import planted_trace
from rlhfsim.cli.design import design
from rlhfsim.cli.estimate import estimate
from rlhfsim.cli.report import report
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import read_plan
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.trace import dumps

SMALL = [
    "--gpus",
    "4",
    "--model",
    "0.5b",
    "--algorithm",
    "grpo",
    "--prompts",
    "64",
    "--samples",
    "2",
    "--response-len",
    "256",
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    found = CliRunner().invoke(design, [*SMALL, "--out", str(path)])
    assert found.exit_code == 0
    return path


def asked(*arguments: str | Path) -> Result:
    return CliRunner().invoke(report, [str(a) for a in arguments], catch_exceptions=False)


def test_a_searched_plan_becomes_one_page_with_its_verdict(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    found = asked(plan, "--no-sizes", "--out", out)
    assert found.exit_code == 0
    assert "GRPO step of qwen2.5-0.5b takes" in found.output
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert found.output.splitlines()[0] in out.read_text().replace("\u00a0", " ")


def test_json_has_every_finding(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    data = json.loads(asked(plan, "--no-sizes", "--out", out, "--title", "Ours", "--json").stdout)
    assert data["schema"] == "rlhfsim.present.html/1"
    assert data["title"] == "Ours"
    assert data["bytes"] == out.stat().st_size
    found = {
        figure["key"]: figure["finding"] for section in data["sections"] for figure in section["figures"]
    }
    assert {
        "nodes",
        "timeline",
        "resources",
        "memory-0",
        "pareto",
        "rival",
        "sensitivity",
        "published",
    } <= set(found)


def test_other_sizes_are_searched_with_a_bar_and_within_their_limit(plan: Path, tmp_path: Path) -> None:
    found = asked(plan, "--out", tmp_path / "page.html", "--size-limit", "0.1s", "--json")
    assert "best plans of other sizes" in found.stderr
    pareto = next(
        f for s in json.loads(found.stdout)["sections"] for f in s["figures"] if f["key"] == "pareto"
    )
    assert "GPUs" in pareto["finding"]


def test_the_page_stands_beside_its_source_by_name(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert asked(plan, "--no-sizes").exit_code == 0
    assert (tmp_path / "plan.html").is_file()


def test_a_plan_from_estimate_says_that_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    assert CliRunner().invoke(estimate, [*SMALL, "--out", str(path)]).exit_code == 0
    assert asked(path, "--out", tmp_path / "page.html").exit_code == 0
    assert "This plan was given, not searched" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"schema": "rlhfsim.trace/1"}', "nothing-to-report"),
        ("[1]", "nothing-to-report"),
        ("{", "malformed-json"),
        ('{"schema": "rlhfsim.plan/2"}', "missing-key"),
    ],
)
def test_other_files_are_refused_by_name(text: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(RlhfsimError) as error:
        asked(path)
    assert error.value.code == code


def test_a_folder_without_a_trace_points_at_its_plan(plan: Path) -> None:
    with pytest.raises(RlhfsimError, match=r"no trace\.json") as error:
        asked(plan.parent)
    assert "rlhfsim report" in (error.value.help or "")


def test_the_page_of_a_run_names_the_run_as_it_was_given(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs/a b")
    run.mkdir(parents=True)
    priced = read_plan(plan)
    trace = planted_trace(priced, load_profile("h100"), {}, np.random.default_rng(0), steps=3)
    (run / "trace.json").write_text(dumps(replace(trace, source="measured")))
    for place in (run / "plan.json", Path("plan.json")):
        shutil.copy(plan, place)
    for words, command in (
        ((run,), "rlhfsim compare 'runs/a b'"),
        (("plan.json", "--compare", run), "rlhfsim report plan.json --compare 'runs/a b'"),
    ):
        assert asked(*words, "--out", "page.html").exit_code == 0
        assert command in unescape(Path("page.html").read_text())


def test_compare_needs_a_plan_and_a_run_of_it(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"schema": "rlhfsim.whatif/1"}')
    with pytest.raises(RlhfsimError, match="goes with a plan"):
        asked(tmp_path / "w.json", "--compare", plan.parent)
    with pytest.raises(RlhfsimError) as error:
        asked(plan, "--compare", plan.parent)
    assert error.value.code == "not-a-run"
