from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlhfsim import units
from rlhfsim.cli.memory import memory


def run(*arguments: str, columns: int = 100) -> Result:
    return CliRunner().invoke(memory, arguments, catch_exceptions=False, env={"COLUMNS": str(columns)})


def data(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").output)
    return found


@pytest.mark.parametrize("columns", [100, 80])
@pytest.mark.parametrize("system", ["verl", "openrlhf", "slime"])
def test_every_shipped_system_prints_within_the_terminal(system: str, columns: int) -> None:
    output = run(system, columns=columns).output
    assert max(map(len, output.splitlines())) <= columns
    assert "< peak" in output


def test_the_peak_is_the_largest_sum_of_a_phase() -> None:
    answer = data("verl")
    sums = {p["phase"]: p["bytes"] for p in answer["pools"][0]["phases"]}
    assert max(sums, key=lambda name: sums[name]) == answer["peak"]["phase"]
    assert sums[answer["peak"]["phase"]] == pytest.approx(answer["peak"]["bytes"])


def test_the_entries_of_a_phase_add_up() -> None:
    for pool in data("openrlhf")["pools"]:
        for phase in pool["phases"]:
            assert phase["bytes"] == pytest.approx(sum(e["bytes"] for e in phase["entries"]))


def test_the_text_names_when_whose_and_what_as_the_json_does() -> None:
    answer, text = data("verl"), run("verl").output
    peak = answer["peak"]
    words = " ".join(text.split())
    assert f"in {peak['phase']}, mostly" in words
    assert f"of {peak['role']}" in words
    assert units.format(peak["bytes"], "byte") in text
    assert units.format(answer["host"]["bytes"], "byte") in text


def test_the_marked_row_is_the_fullest_of_its_pool() -> None:
    for line in run("openrlhf").output.splitlines():
        if "< peak" in line:
            break
    else:
        pytest.fail("no peak is marked")
    pool = data("openrlhf")["pools"][0]
    fullest = max(pool["phases"], key=lambda p: p["bytes"])
    assert line.startswith(fullest["phase"])


def test_bars_beyond_capacity_show_it_without_colour() -> None:
    asked = ("--gpus", "1", "--gpu", "l40s", "--model", "qwen3-4b", "--algorithm", "ppo", "--prompts", "64")
    result = run(*asked, "--architecture", "naive")
    assert result.exit_code == 1
    assert "XX beyond the GPU" in result.output
    assert "does not fit" in result.output


def test_a_plan_that_fits_has_no_bar_beyond_capacity() -> None:
    result = run("verl")
    assert result.exit_code == 0
    assert "beyond" not in result.output
