"""`rlhfsim size` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlhfsim.cli import main as entry
from rlhfsim.cli.size import size
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import read_plan

SMALL = [
    "--model",
    "qwen2.5-0.5b",
    "--algorithm",
    "grpo",
    "--prompts",
    "32",
    "--samples",
    "4",
    "--rules",
    "workers=8,seconds_per_sample=1ms",
    "--max-gpus",
    "2",
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(size, [*SMALL, *arguments])


def test_the_answer_names_the_size_what_was_tried_and_the_plan(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run("--require", "step_time<1h", "--gpu", "h100,a100-80", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 100
    assert result.output.startswith("1 x ")
    for word in ("what was tried", "meets the targets", "cost as little", "the plan"):
        assert word in result.output
    assert "32 prompts x 4 responses; prompt 1,024 tokens" in result.output
    assert "it fits with a probability of" in result.output
    assert sum(h.gpus for h in read_plan(out).hardware) == 1


def test_the_whole_run_has_its_interval_in_time_and_money() -> None:
    asked = ("--require", "cost_of_run<10000", "--steps", "100", "--objective", "cost")
    best = json.loads(run(*asked, "--json").output)["best"]["odds"]
    text = " ".join(run(*asked).output.split())
    assert "with failures and restarts P10-P90" in text
    assert f"to {best['usd'][2]:,.3g} USD (range of prices)" in text


def test_json_has_the_promised_keys() -> None:
    result = run("--require", "step_time<1h", "--require", "oom<5%", "--json")
    answer = json.loads(result.output)
    assert answer["schema"] == "rlhfsim.size/1"
    assert {"best", "requirements", "per_gpu", "tried", "break_even"} <= set(answer)
    assert answer["best"]["gpus"] == 1
    assert all(r["met"] for r in answer["requirements"])
    assert {"gpu", "gpus", "outcome", "floor_s"} <= set(answer["tried"][0])


def test_a_target_out_of_reach_exits_with_1_and_shows_what_was_tried() -> None:
    result = run("--require", "step_time<1ms")
    assert result.exit_code == 1
    assert "no size meets the targets" in result.output
    assert "skipped" in result.output
    assert json.loads(run("--require", "step_time<1ms", "--json").output)["best"] is None


def test_a_higher_confidence_asks_for_more(tmp_path: Path) -> None:
    step = json.loads(run("--require", "step_time<1h", "--json").output)["best"]["step_s"]
    target = f"step_time<{1.3 * step}s"
    low, high = (
        json.loads(run("--require", target, "--confidence", c, "--json").output) for c in ("50%", "95%")
    )
    assert low["best"]["gpus"] == 1
    assert low["requirements"][0]["probability"] >= 0.5
    assert high["best"] is None or high["requirements"][0]["probability"] >= 0.95
    assert {"misses", "too slow"} & {t["outcome"] for t in high["tried"]}


def test_the_front_lists_sizes() -> None:
    result = run("--pareto", "--json")
    assert result.exit_code == 0
    front = json.loads(result.output)["pareto"]
    assert front[0]["gpus"] == 1
    assert [t["step_s"] for t in front] == sorted((t["step_s"] for t in front), reverse=True)


@pytest.mark.parametrize("target", ["step_time<1s", "step_time<inf"])
def test_the_front_takes_no_target(target: str) -> None:
    error = run("--pareto", "--require", target).exception
    assert isinstance(error, RlhfsimError)
    assert "--pareto shows every size" in error.message


def test_the_front_is_a_table() -> None:
    result = run("--pareto", "--max-gpus", "1")
    assert result.exit_code == 0
    assert "no other one beats" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--require"),
        (("--require", "step_time=3"), "step_time=3"),
        (("--require", "steptime<3"), "steptime"),
        (("--require", "cost_of_run<3"), "--steps"),
        (("--require", "step_time<3", "--gpu", "h101"), "h101"),
        (("--require", "step_time<3", "--gpu", "mi250x", "--objective", "cost"), "--price"),
        (("--require", "cost_per_step<3", "--gpu", "h100,mi250x"), "--price"),
        (("--require", "step_time<3", "--objective", "time"), "time"),
        (("--require", "step_time<3", "--fix", "actor.tpp=3"), "tpp"),
        (("--require", "step_time<3", "--fix", "actor.tp=3"), "heads"),
        (("--require", "step_time<3", "--fix", "critic.zero>=1"), "no critic"),
    ],
)
def test_bad_input_is_one_clear_error(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rlhfsim", "size", *SMALL, *arguments])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    told = capsys.readouterr().err
    assert stopped.value.code == 2, told
    assert said in told
    assert "Traceback" not in told
