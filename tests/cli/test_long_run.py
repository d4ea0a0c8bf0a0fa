"""`rlhfsim design --run`: what is printed and written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlhfsim.cli.design import design
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import read_plan

RUN = "title: a small run\nsteps: 50\nlengths: [{step: 0, mean: 300}]\nstages: [{max: 1k}]\n"
SMALL = "--gpus 2 --model 0.5b --algorithm grpo --prompts 16 --samples 2 --run run.yaml"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)


def ask(words: str) -> Result:
    return CliRunner().invoke(design, f"{SMALL} {words}".split())


def test_the_answer_is_printed_and_written_as_plan_and_page() -> None:
    result = ask("--deadline 7d --page run.html")
    assert result.exit_code == 0, result.output
    assert "One plan runs all steps" in result.output
    assert "the deadline of 7 d is kept with a probability of" in " ".join(result.output.split())
    assert read_plan(Path("plan.json")).workload.response_len.maximum == 1024
    page = Path("run.html").read_text()
    assert "a small run" in page
    assert 'id="lengths-plot"' in page


def test_the_same_is_there_for_machines_and_a_missed_deadline_is_exit_code_1() -> None:
    result = ask("--deadline 1min --json")
    assert result.exit_code == 1
    data = json.loads(result.output)
    assert data["schema"] == "rlhfsim.long_run/1"
    assert data["changes"] == []
    assert [s["max"] for s in data["stretches"]] == [1024]
    assert data["requirements"][0]["met"] is False


@pytest.mark.parametrize("words", ["--steps 5", "--gains", "--pareto", "--objective memory"])
def test_options_about_one_step_are_refused(words: str) -> None:
    error = ask(words).exception
    assert isinstance(error, RlhfsimError)
    assert error.code == "bad-option"
    assert not Path("plan.json").exists()


def test_a_page_needs_a_run() -> None:
    error = CliRunner().invoke(design, ["--gpus", "2", "--model", "0.5b", "--page", "run.html"]).exception
    assert isinstance(error, RlhfsimError)
    assert error.code == "bad-option"
