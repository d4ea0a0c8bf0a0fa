"""`rlhfsim choose` as a user runs it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from rlhfsim.cli.choose import choose
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.frameworks.runs import frameworks
from rlhfsim.step.measured import compared, model_error

SMALL = [
    "--model",
    "qwen2.5-0.5b",
    "--algorithm",
    "grpo",
    "--prompts",
    "32",
    "--samples",
    "4",
    "--gpus",
    "1..2",
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(choose, [*SMALL, *arguments])


def test_candidates_stand_on_one_table_with_probabilities_and_their_front() -> None:
    asked = ("--gpu", "h100,l4", "--steps", "10", "--deadline", "1d", "--budget", "1kUSD", "--gpus", "1")
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)["candidates"]
    assert {(r["gpu"], r["gpus"]) for r in rows} == {("h100_sxm", 1), ("l4", 1)}
    runs = {(x.name, backend) for x in frameworks() for backend in x.trainers}
    assert {(r["framework"], r["backend"]) for r in rows if r["gpu"] == "l4"} == runs
    fitting = [r for r in rows if r["plan"]]
    assert all("probability" in v for r in fitting for v in r["requirements"])
    values = [(r["plan"]["step_s"], r["plan"]["usd_per_step"]) for r in fitting]
    for row, mine in zip(fitting, values, strict=True):
        beaten = any(other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in values)
        assert not (row["on_front"] and beaten)
    assert rows[0]["meets"]
    doubts = {True: 1.0, False: 1 + model_error()}  # what was never compared leads by more than the error
    kept = [r for r in fitting if r["meets"]]
    costs = [r["plan"]["usd_per_step"] * doubts[bool(compared(r["framework"]))] for r in kept]
    assert costs == sorted(costs)
    assert all(r["meets"] == (r["odds"]["together"] >= 0.8) for r in fitting)


def test_the_table_is_no_wider_than_the_terminal_and_one_framework_has_its_trainers() -> None:
    result = run("--gpu", "h100", "--framework", "rlhfsim", "--require", "step_time<1h", "--gpus", "1")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 100
    assert "megatron" not in result.output
    assert "likely" in result.output
    assert "others" not in result.output
    assert "another framework" not in result.output
    asked, batch, *_ = result.output.splitlines()
    assert asked == "GRPO of qwen2.5-0.5b"
    assert batch.startswith("32 prompts x 4 responses; prompt 1,024 tokens")


def test_what_no_framework_runs_is_said() -> None:
    error = run("--framework", "slime", "--algorithm", "dpo", "--samples", "1").exception
    assert isinstance(error, RlhfsimError)
    assert error.help == "slime does not run DPO"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpus", "8..x"),
        ("--gpus", "8..4"),
        ("--gpu", "h10"),
        ("--deadline", "7d"),
        ("--gpu", "l4", "--price", "spot"),
    ],
    ids=str,
)
def test_bad_input_is_one_clear_error(arguments: tuple[str, ...]) -> None:
    assert isinstance(run(*arguments).exception, RlhfsimError)


@pytest.mark.parametrize("width", [100, 80, 40])
def test_memory_of_hosts_what_is_learnt_and_what_is_assumed_stand_in_every_table(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = run("--gpu", "h100", "--framework", "slime", "--gpus", "1", "--steps", "10", "--deadline", "1d")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= max(60, width)
    text = " ".join(result.output.split())
    assert "every sample comes from the policy that trains on it" in text
    assert "SGLang, with which slime generates, is priced with its own attention, the rest as vLLM" in text
    table = result.output[: result.output.index("assumed:")]
    assert "\u2026" not in table  # no figure is cut
    if width >= 80:
        assert all(title in table for title in ("host", "likely"))


def test_machines_read_what_is_learnt_and_assumed() -> None:
    result = run("--gpu", "h100", "--gpus", "1", "--framework", "slime", "--json")
    plan = json.loads(result.output)["candidates"][0]["plan"]
    assert plan["learning"].startswith("every sample comes from the policy")
    assert any("SGLang" in text for text in plan["assumed"])
    assert plan["host_peak_bytes"] > 0
