"""`rlhfsim calibrate`, and what `design` and `estimate` say of the profile that it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from planted_plans import plan, run_folder

from rlhfsim.cli.calibrate import calibrate
from rlhfsim.cli.design import design
from rlhfsim.cli.estimate import estimate
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import read_plan
from rlhfsim.specs.hardware.profiles import load_profile

DOCS = Path(__file__).parents[2] / "docs"
WORLD = {"controller_time": 3.0, "rl_layer_time": 3e-3, "rollout_step_overhead": 5e-3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("runs")
    plans = (plan(gpus=4), plan(gpus=4, prompts=256), plan(gpus=4, response=3000))
    return [
        str(run_folder(root / name, made, WORLD, seed))
        for seed, (name, made) in enumerate(zip("abc", plans, strict=True))
    ]


@pytest.fixture(scope="module")
def profile(runs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "calibrated.yaml"
    say(calibrate, *runs, "--out", str(out))
    return out


def say(command: click.Command, *arguments: str) -> str:
    result = CliRunner().invoke(command, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    shown = [line.rstrip() for line in result.stdout.splitlines() if "plan.json" not in line]
    assert max(map(len, shown)) <= 100
    return result.stdout


def tell(command: click.Command, *arguments: str) -> Any:
    return json.loads(CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False).stdout)


def refused(*arguments: str) -> RlhfsimError:
    result = CliRunner().invoke(calibrate, list(arguments))
    assert isinstance(result.exception, RlhfsimError)
    assert result.exception.help
    return result.exception


def test_the_screen_says_what_changed_what_not_how_well_and_what_next(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("new.yaml")
    text = say(calibrate, *runs, "--out", str(out))
    for word in (
        "H100 SXM 80GB, calibrated on 3 runs",
        "a (3), b (3), c (3)",
        "vllm 0.11.0",
        "controller_time",
        "cannot be told from these runs",
        "moves the same phases as",
        "median error of",
        "step of",
        "all 3 runs: step 0: the first step",
        "a new profile named new",
        "rlhfsim design --gpus 4 --model qwen2.5-1.5b",
    ):
        assert word in text, word
    assert out.is_file()


def test_without_out_nothing_is_written(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "nothing; add --out FILE.yaml" in say(calibrate, *runs)
    assert list(tmp_path.iterdir()) == []


def test_json_holds_the_same_content_and_every_key_is_documented(runs: list[str]) -> None:
    data = tell(calibrate, *runs)
    assert data["schema"] == "rlhfsim.calibrate/1"
    fitted = {c["name"]: c for c in data["coefficients"]}
    assert fitted["controller_time"]["after"]["low"] <= 3.0 <= fitted["controller_time"]["after"]["high"]
    assert fitted["controller_time"]["n"] == 3
    assert data["step_error"][1] < data["step_error"][0]
    assert {e["run"] for e in data["errors"]} == {"a", "b", "c"}
    assert data["out"] is None
    documented = set(
        re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", (DOCS / "calibration.md").read_text())))
    )
    keys = {*data, *data["coefficients"][0], *data["errors"][0], *data["unidentified"][0], *data["runs"][0]}
    assert keys - documented == set()


def test_the_file_is_checked_before_the_work(runs: list[str], profile: Path) -> None:
    before = profile.read_bytes()
    assert refused("no/such/run", "--out", str(profile)).code == "file-exists"
    assert refused("no/such/run", "--out", "h100.yaml").code == "name-taken"
    assert profile.read_bytes() == before


def test_a_run_given_twice_is_refused(runs: list[str]) -> None:
    assert "given twice" in refused(runs[0], f"{runs[0]}/../a").message


def test_an_unknown_profile_and_no_run_are_refused(runs: list[str], tmp_path: Path) -> None:
    assert refused(runs[0], "--profile", "h101").code == "unknown-hardware-profile"
    assert refused(str(tmp_path)).code == "not-a-run"
    assert CliRunner().invoke(calibrate, []).exit_code == 2


def test_one_bad_run_among_good_ones_stops_it_and_writes_nothing(runs: list[str], tmp_path: Path) -> None:
    bad = run_folder(tmp_path / "bad", plan(gpus=4), {})
    (bad / "trace.json").write_text("{")
    out = tmp_path / "x.yaml"
    error = refused(*runs, str(bad), "--out", str(out))
    assert error.place is not None
    assert str(bad) in error.place.file
    assert not out.exists()


def test_calibrating_again_extends_the_calibrated_file(runs: list[str], tmp_path: Path) -> None:
    first, again = tmp_path / "first.yaml", tmp_path / "again.yaml"
    say(calibrate, runs[2], "--out", str(first))
    say(calibrate, *runs[:2], "--profile", str(first), "--out", str(again))
    found = load_profile(again).calibration
    assert found is not None
    assert found.base == "first"
    assert found.runs == ("a", "b")


# --- replan -----------------------------------------------------------------------------------------

JOB = ("--gpus", "4", "--model", "qwen2.5-1.5b", "--algorithm", "grpo", "--prompts", "64", "--samples", "8")


def test_design_says_what_calibration_changed(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(profile.parent)
    plan_file = tmp_path / "plan.json"
    text = say(design, *JOB, "--profile", str(profile), "--out", str(plan_file))
    for word in (
        "what calibration changed",
        "calibrated: h100_sxm, calibrated on 3 runs (a, b, c)",
        "controller_time",
        "# was",
        "step before",
    ):
        assert word in text, word
    assert "the choice is the same" in text or "another plan is chosen" in text
    again = say(estimate, str(plan_file))  # the plan names its profile, which lies here
    assert "no run behind profile calibrated had it" in again


def test_design_as_json_has_moves_ranks_and_steps(profile: Path, tmp_path: Path) -> None:
    found = tell(design, *JOB, "--profile", str(profile), "--out", str(tmp_path / "p.json"))
    changed = found["calibration"]
    assert changed["profiles"]["calibrated"]["base"] == "h100_sxm"
    moved = {m["name"]: m for m in changed["moved"]}
    assert moved["controller_time"]["now"]["value"] == pytest.approx(3.0, rel=0.1)
    assert moved["controller_time"]["before"]["value"] == pytest.approx(0.94)
    assert changed["ranks"][0]["place"] == 1
    assert changed["ranks"][0]["now"]["step_s"] == pytest.approx((found["best"] or found["chosen"])["step_s"])
    assert changed["same_choice"] == (changed["chosen_before_now"] is None)
    assert any("reward.score" in text for text in changed["warnings"])
    assert read_plan(tmp_path / "p.json").hardware[0].profile == "calibrated"


def test_design_without_calibration_says_nothing_of_it(tmp_path: Path) -> None:
    found = tell(design, *JOB, "--out", str(tmp_path / "p.json"))
    assert found["calibration"] is None


def test_design_names_a_profile_before_that_is_gone(profile: Path, tmp_path: Path) -> None:
    text = profile.read_text().replace("base: h100_sxm", "base: lost_profile")
    (tmp_path / "orphan.yaml").write_text(text)
    result = CliRunner().invoke(
        design, [*JOB, "--profile", str(tmp_path / "orphan.yaml"), "--out", str(tmp_path / "p.json")]
    )
    assert isinstance(result.exception, RlhfsimError)
    assert result.exception.code == "no-profile-before"


def test_the_command_is_listed() -> None:
    assert "calibrate" in CliRunner().invoke(cli, ["--help"]).output
