from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlhfsim import units
from rlhfsim.api import estimate_file
from rlhfsim.cli.estimate import estimate
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import read_plan
from rlhfsim.present.answers.roles import roles
from rlhfsim.specs.scenario import system_names

SMALL = [
    "--gpus",
    "4",
    "--model",
    "qwen2.5-0.5b",
    "--algorithm",
    "grpo",
    "--prompts",
    "64",
    "--samples",
    "4",
    "--no-kl",
    "--rules",
    "workers=8",
    "--architecture",
    "hybrid",
    "--actor",
    "zero=2,micro_batch=4",
    "--rollout",
    "tp=1,pp=1",
]
LARGE = ["--gpus", "64", "--model", "70b", "--backend", "megatron"]


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(estimate, arguments, catch_exceptions=False, env=env)


def refused(*arguments: str) -> RlhfsimError:
    with pytest.raises(RlhfsimError) as caught:
        run(*arguments)
    assert caught.value.place is not None
    return caught.value


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlhfsim.cli.main", *arguments], capture_output=True, text=True, check=False
    )


# --- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["100", "80"])
@pytest.mark.parametrize("system", system_names())
def test_every_shipped_system_prints_within_the_terminal(system: str, columns: str) -> None:
    result = run(system, env={"COLUMNS": columns})
    assert result.exit_code in (0, 1)
    assert max(map(len, result.output.splitlines())) <= int(columns)
    assert "actor.train" in result.output
    assert "\x1b" not in result.output


def test_text_and_json_tell_the_same_figures() -> None:
    text = run("verl").output
    data: dict[str, Any] = json.loads(run("verl", "--json").output)
    prediction = data["plan"]["prediction"]
    assert data["schema"] == "rlhfsim.estimate/1"
    assert units.format(prediction["step_s"], "s") in text
    assert units.format(prediction["usd_per_step"], "usd") in text
    assert units.format(prediction["peak_memory_bytes"], "byte") in text
    for phase in prediction["phases"]:
        if not phase["name"].endswith(("load", "unload")):
            assert phase["name"] in text


def test_phases_that_are_not_shown_alone_are_summed_in_one_line() -> None:
    moves = [
        p["seconds"]
        for p in json.loads(run("verl", "--json").output)["plan"]["prediction"]["phases"]
        if p["name"].endswith(("load", "unload"))
    ]
    line = next(line for line in run("verl").output.splitlines() if "short moves" in line)
    assert line.startswith(f"{len(moves)} short moves")
    assert f"{sum(moves):.1f}" in line


def test_a_plan_that_is_written_and_read_again_has_the_same_price(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    first = json.loads(run("verl", "--out", str(path), "--json").output)["plan"]
    assert read_plan(path).to_dict() == first
    again = json.loads(run(str(path), "--json").output)["plan"]
    assert again["prediction"] == first["prediction"]


def test_a_price_on_the_command_line_replaces_the_listed_one() -> None:
    prediction = json.loads(run("verl", "--price", "6", "--json").output)["plan"]["prediction"]
    assert prediction["usd_per_step"] == pytest.approx(6 * 8 * prediction["step_s"] / 3600)


def test_a_plan_that_does_not_fit_is_priced_and_says_what_and_how_to_help(tmp_path: Path) -> None:
    path = tmp_path / "tight.yaml"
    path.write_text(
        "cluster: {node_groups: [{gpu: h100, gpus: 8}]}\n"
        "workload: {algorithm: dpo, model: 8b, prompts: 64, prompt_len: {kind: fixed, value: 1024}}\n"
        "placement:\n"
        "  pools: [{name: all, gpus: 8}]\n"
        "  actor: {pool: all, layout: {dp: 8, zero: 3, micro_batch: 16, recompute: none}}\n"
        "  reference: {pool: all, layout: {dp: 8, zero: 3, micro_batch: 1}}\n"
    )
    result = run(str(path))
    assert result.exit_code == 1
    assert "does not fit: actor.train needs" in result.output
    assert "smallest change that fits: micro_batch 1 for actor" in result.output
    assert json.loads(run(str(path), "--json").output)["fits"] is False


def test_options_beside_a_file_are_refused() -> None:
    assert "the file says it already" in refused("verl", "--gpus", "8").message
    assert "the file says it already" in refused("verl", "--actor", "tp=2").message


def test_targets_of_a_given_plan_have_probabilities() -> None:
    asked = ("verl", "--steps", "100", "--deadline", "1d", "--require", "cost_per_step<1")
    shown = run(*asked)
    assert shown.exit_code == 1  # a step costs more than 1 USD
    assert "time_of_run<=1 d" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 100
    answer = json.loads(run(*asked, "--json").output)
    unlikely, sure = (r["probability"] for r in answer["requirements"])
    assert unlikely < 0.5 < sure
    assert answer["odds"]["together"] <= unlikely
    with pytest.raises(RlhfsimError, match="length of the run"):
        run("verl", "--budget", "1kUSD")


def test_an_unknown_system_names_the_known_ones() -> None:
    assert "verl" in (refused("verll").help or "")


# --- options ----------------------------------------------------------------------------------------


def test_options_give_a_plan_that_keeps_what_is_fixed() -> None:
    result = run(*SMALL, "--json")
    plan = json.loads(result.output)["plan"]
    assert result.exit_code == 0
    assert plan["architecture"] == "hybrid"
    assert plan["placement"]["actor"]["layout"]["zero"] == 2
    assert plan["placement"]["actor"]["layout"]["micro_batch"] == 4
    assert plan["placement"]["rollout"]["layout"]["tp"] == 1


@pytest.mark.parametrize(
    ("layout", "code", "words"),
    [
        ("tp=3", "tp-does-not-divide-heads", "64 heads"),
        ("tp=16", "tp-exceeds-node", "crosses nodes"),
        ("tp=8,pp=3", "pp-does-not-divide-layers", "80 layers"),
        ("tp=8,pp=16", "layout-exceeds-cluster", "128 GPUs"),
        ("ep=2", "ep-without-experts", "no experts"),
        ("tp=0", "bad-value", "--actor tp"),
        ("tp=", "bad-option", "name=value"),
        ("zero=4", "bad-value", "--actor zero"),
        ("recompute=some", "unknown-recompute", "some"),
        ("tpp=8", "unknown-layout-field", "tpp"),
        ("tp=8,zero=3", "backend-cannot-run", "ZeRO-3"),
    ],
)
def test_a_layout_that_cannot_exist_names_the_rule(layout: str, code: str, words: str) -> None:
    error = refused(*LARGE, "--actor", layout)
    assert error.code == code
    assert words in error.message
    assert error.help


def test_prefill_apart_is_refused_where_the_framework_does_not_run_it() -> None:
    agent = ("--gpus", "16", "--model", "8b", "--algorithm", "grpo", "--rollout", "tp=2,prefill=1")
    error = refused(*agent, "--framework", "nemo-rl")
    assert error.message == "NeMo-RL does not run prefill apart from decode"
    assert "--framework verl" in str(error.help)


def test_degrees_that_do_not_divide_the_pool_are_refused() -> None:
    nodes = ("--gpus", "32", "--model", "70b", "--backend", "megatron", "--architecture", "naive")
    error = refused(*nodes, "--framework", "any", "--actor", "tp=4,pp=5")
    assert error.code == "layout-does-not-divide"
    assert "its pool may have 8, 16, 24, 32" in error.message


def test_a_backend_that_cannot_run_the_layout_says_why() -> None:
    fsdp = refused("--gpus", "64", "--model", "70b", "--backend", "fsdp2", "--actor", "pp=2")
    assert "FSDP2 has no pipeline parallelism" in fsdp.message
    deepspeed = refused("--gpus", "64", "--model", "70b", "--actor", "tp=2,pp=2,zero=2")
    assert "DeepSpeed runs ZeRO 0, 1 with this tp and pp" in deepspeed.message


def test_a_role_that_the_algorithm_lacks_is_refused() -> None:
    assert "has no critic" in refused(*LARGE, "--algorithm", "grpo", "--critic-layout", "tp=2").message
    assert "has no rollout" in refused(*LARGE, "--algorithm", "dpo", "--rollout", "tp=2").message


def test_nothing_that_fits_shows_an_example_and_the_smallest_change() -> None:
    result = run(
        "--gpus",
        "1",
        "--model",
        "8b",
        "--algorithm",
        "dpo",
        "--architecture",
        "naive",
        "--prompts",
        "16",
        "--gpu",
        "l4",
        "--json",
    )
    answer = json.loads(result.output)
    assert result.exit_code == 1
    assert "needs" in answer["rejected_by"]
    assert answer["remedy"]
    assert answer["plan"]["prediction"]["peak_memory_bytes"] > answer["plan"]["prediction"]["capacity_bytes"]


@pytest.mark.parametrize("algorithm", ["sft", "reward_model"])
def test_what_generates_nothing_is_not_asynchronous(algorithm: str) -> None:
    error = refused("--gpus", "4", "--model", "0.5b", "--algorithm", algorithm, "--architecture", "async")
    assert "no way to share the GPUs is left by --architecture async" in error.message
    assert error.help == "leave out --architecture"


def test_neither_file_nor_cluster_tells_what_to_give() -> None:
    error = refused()
    assert "--gpus is missing" in error.message
    assert "verl" in (error.help or "")


# --- the whole process --------------------------------------------------------------------------------


def test_the_process_exits_with_0_1_and_2() -> None:
    assert process("estimate", "verl").returncode == 0
    bad = process("estimate", "--gpus", "0", "--model", "8b")
    assert bad.returncode == 2
    assert bad.stderr.startswith("error[bad-option]: --gpus: 0 is out of range\n  --> command line\nhelp: ")
    assert bad.stdout == ""


def test_a_terminal_without_unicode_gets_ascii() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlhfsim.cli.main", "estimate", "verl"],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "PATH": ""},
    )
    assert done.returncode == 0
    assert b"####" in done.stdout


def test_what_stands_in_for_the_users_own_values_is_said() -> None:
    asked = ["--gpus", "8", "--model", "7b", "--algorithm", "grpo", "--response-len", "60k", "--architecture"]
    tools = ("--environment", "turns=3,seconds_per_turn=2s,workers=9")
    shown = run(*asked, "hybrid", "--rules", "workers=8", *tools, env={"COLUMNS": "100"}).output
    assert "environments answer 3 turns a response, 2 s each, on 9 CPU workers" in " ".join(shown.split())
    assert "128 prompts x 8 responses" in shown
    assert "GRPO of qwen2.5-7b (7b) on 8 x" in shown
    assert "rules take 5 ms a sample on 8 CPU workers; environments" in shown
    assert "prompt and response reach 62,464 tokens, 1.9 times the context of qwen2.5-7b: RoPE" in shown
    pairs = run(
        "--gpus", "8", "--model", "qwen2.5-0.5b", "--algorithm", "dpo", "--samples", "8", "--prompts", "16"
    )
    assert "128 pairs; prompt" in pairs.output


def test_roles_that_are_placed_alike_share_a_row() -> None:
    plan = estimate_file("verl")
    alike = replace(plan, placement=replace(plan.placement, reward=plan.placement.role("reference")))
    names = [row[0] for row in roles(alike).rows]
    assert "reference, reward" in names
    assert {name for row in names for name in row.split(", ")} == set(alike.placement.roles)
