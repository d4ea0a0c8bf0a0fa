from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from rlhfsim import units
from rlhfsim.api import estimate_file, simulate_file
from rlhfsim.cli.search_progress import counted
from rlhfsim.cli.simulate import simulate
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import write_plan
from rlhfsim.present.answers.simulate import link_text
from rlhfsim.present.terminal.bars import merged, spark
from rlhfsim.specs.scenario import system_names
from rlhfsim.trace import busy_share, read_trace

ROOT = Path(__file__).parents[2]
ASYNC = "sample-factory"
SHORT = ("--iterations", "3")
TIGHT = (
    "cluster: {node_groups: [{gpu: h100, gpus: 8}]}\n"
    "workload: {algorithm: dpo, model: 8b, prompts: 64, prompt_len: {kind: fixed, value: 1024}}\n"
    "placement:\n"
    "  pools: [{name: all, gpus: 8}]\n"
    "  actor: {pool: all, layout: {dp: 8, zero: 3, micro_batch: 16, recompute: none}}\n"
    "  reference: {pool: all, layout: {dp: 8, zero: 3, micro_batch: 1}}\n"
)
SHARED = (  # the weight sync runs beside training, which gathers weights over the same network cards
    "cluster: {node_groups: [{gpu: h100, gpus: 32}], oversubscription: 16}\n"
    "workload: {algorithm: grpo, model: 8b, prompts: 64, samples: 2, kl: false, prompt_len: {kind: fixed, value: 256},\n"
    "           response_len: {kind: fixed, value: 512}, reward: {rules: {workers: 8}}}\n"
    "placement:\n"
    "  pools: [{name: train, gpus: 16}, {name: rollout, start: 16, gpus: 16}]\n"
    "  actor: {pool: train, layout: {dp: 16, zero: 3, micro_batch: 1}}\n"
    "  rollout: {pool: rollout, sleep: 0, layout: {tp: 1, dp: 16}}\n"
    "  weight_path: broadcast\n"
    "  schedule: {staleness: 2, overlapped_sync: true, partial_rollout: true}\n"
)


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(simulate, arguments, catch_exceptions=False, env=env)


def data_of(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json").output)
    return found


def refused(*arguments: str) -> RlhfsimError:
    with pytest.raises(RlhfsimError) as caught:
        run(*arguments)
    assert caught.value.place is not None
    assert caught.value.help
    return caught.value


# --- what is printed --------------------------------------------------------------------------------


@pytest.mark.parametrize("system", system_names())
def test_every_shipped_system_prints_within_the_terminal(system: str) -> None:
    columns = 80 if system in (ASYNC, "slime") else 100
    result = run(system, "--iterations", "2", env={"COLUMNS": str(columns)})
    assert result.exit_code in (0, 1)
    assert max(map(len, result.output.splitlines())) <= columns
    assert "\x1b" not in result.output
    assert result.exit_code or "busy" in result.output


def test_text_and_json_tell_the_same_figures() -> None:
    text, data = run("slime", *SHORT).output, data_of("slime", *SHORT)
    assert data["schema"] == "rlhfsim.simulation/1"
    assert data["fits"] is True
    for name in ("mean_s", "p10_s", "p50_s", "p90_s", "estimate_s"):
        assert units.format(data["step"][name], "s") in text
    for pool in data["pools"]:
        line = next(line for line in text.splitlines() if re.match(rf"{pool['name']} +[\d-]", line))
        assert pool["peak_bytes"] is None or units.format(pool["peak_bytes"], "byte") in line
    for phase in data["plan"]["prediction"]["phases"]:
        if not phase["name"].endswith(("load", "unload")):
            assert phase["name"] in text


def test_steps_are_drawn_from_the_seed_and_a_seed_repeats_itself() -> None:
    once, again, other = (data_of("slime", *SHORT, "--seed", s)["step_seconds"] for s in "001")
    assert once == again
    assert once != other
    assert len(set(once[0])) == 3


def test_replications_take_the_next_seeds() -> None:
    both = data_of("slime", *SHORT, "--replications", "2")
    assert both["run"]["replications"] == 2
    assert both["step_seconds"][1] == data_of("slime", *SHORT, "--seed", "1")["step_seconds"][0]
    steps = [s for run in both["step_seconds"] for s in run]
    assert both["step"]["mean_s"] == pytest.approx(sum(steps) / 6)
    assert min(steps) <= both["step"]["p10_s"] <= both["step"]["p50_s"] <= both["step"]["p90_s"] <= max(steps)


def test_expected_lengths_give_the_estimate_where_no_link_is_shared() -> None:
    told = simulate_file("slime")
    assert told.estimate.prediction.step_s == pytest.approx(estimate_file("slime").prediction.step_s)
    data = data_of("slime", *SHORT, "--expected-lengths")
    assert data["contention"] == []
    assert data["step_seconds"][0] == pytest.approx([estimate_file("slime").prediction.step_s] * 3)
    text = run("slime", *SHORT, "--expected-lengths").output
    assert "every step alike; as estimated" in text
    assert "no call waited for a link" in text


def test_links_that_calls_share_are_listed_with_what_they_cost(tmp_path: Path) -> None:
    path = tmp_path / "shared.yaml"
    path.write_text(SHARED)
    data, text = data_of(str(path), *SHORT), run(str(path), *SHORT).output
    (link,) = data["contention"]
    assert link["link"] == "nic:train"
    assert 0 < link["seconds"] < data["step"]["mean_s"]
    assert "network cards of train" in text


def test_stragglers_slow_a_synchronous_step() -> None:
    usual, slow = (
        data_of("slime", *SHORT, "--expected-lengths", *more) for more in ((), ("--straggler", "0.1:1.5"))
    )
    assert slow["step"]["mean_s"] > 1.05 * usual["step"]["mean_s"]
    assert "10 % of the GPUs take 1.5 times as long" in slow["run"]["randomness"]


def test_an_asynchronous_run_tells_staleness_and_queue() -> None:
    data = data_of(ASYNC, *SHORT)
    assert data["run"]["warmup"] == 4  # staleness 2, and 2 more
    assert 0 <= data["staleness"]["mean"] <= data["staleness"]["max"] <= 2
    assert 0 <= data["queue"]["mean"] <= data["queue"]["max"]
    assert "versions old on average" in run(ASYNC, *SHORT).output
    assert data_of("slime", *SHORT)["staleness"] is None


# --- traces -----------------------------------------------------------------------------------------


def test_the_trace_and_the_chrome_trace_are_written_and_agree_with_the_figures(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    data = data_of("slime", *SHORT, "--trace", str(path))
    trace = read_trace(path)
    assert trace.steps == 3
    assert trace.plan_hash == data["plan"]["input_hash"]
    assert trace.end_s == pytest.approx(sum(data["step_seconds"][0]))
    train = next(p for p in data["pools"] if p["name"] == "train")
    assert busy_share(trace, "train") == pytest.approx(train["busy"])
    chrome = json.loads((tmp_path / "out.chrome.json").read_text())
    assert data["chrome_trace"] == str(tmp_path / "out.chrome.json")
    assert sum(e["ph"] == "X" for e in chrome["traceEvents"]) == len(trace.spans)
    assert sum(e["ph"] == "C" for e in chrome["traceEvents"]) == len(trace.counters)


def test_one_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(ASYNC, "--iterations", "2", "--trace", str(tmp_path / f"{name}.json"))
    for end in (".json", ".chrome.json"):
        assert (tmp_path / f"a{end}").read_bytes() == (tmp_path / f"b{end}").read_bytes()


def test_a_trace_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    assert (
        refused("slime", "--iterations", "1", "--trace", str(tmp_path / "no" / "t.json")).code
        == "unwritable-file"
    )


# --- what does not fit, and bad input ---------------------------------------------------------------


def test_a_plan_that_does_not_fit_tells_phase_bytes_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "tight.yaml"
    path.write_text(TIGHT)
    result = run(str(path), "--trace", str(tmp_path / "t.json"))
    assert result.exit_code == 1
    assert re.search(
        r"does not fit: actor.train needs [\d.]+ GB of [\d.]+ GB per GPU in pool all", result.output
    )
    assert "smallest change that fits: micro_batch 1 for actor" in result.output
    assert not (tmp_path / "t.json").exists()
    data = data_of(str(path))
    assert (data["fits"], data["remedy"]) == (False, "micro_batch 1 for actor")


def test_a_plan_json_is_simulated_as_its_scenario(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", estimate_file("slime"))
    assert (
        data_of(str(tmp_path / "plan.json"), *SHORT)["step_seconds"]
        == data_of("slime", *SHORT)["step_seconds"]
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "FILE is missing"),
        (("slimee",), "unknown scenario"),
        (("slime", "--iterations", "0"), "--iterations: 0 is out of range"),
        (("slime", "--iterations", "x"), "not a whole number"),
        (("slime", "--straggler", "0.05"), "is not SHARE:SLOWDOWN"),
        (("slime", "--straggler", "2:1.5"), "out of range"),
        (("slime", "--straggler", "0.1:0.5"), "out of range"),
        (("slime", "--mtbf", "0 h"), "--mtbf: 0 h is out of range"),
        (("slime", "--mtbf", "5 GB"), "unknown unit"),
        (("slime", "--restart", "5 min"), "--restart without --mtbf"),
        (("slime", "--checkpoint-interval", "5 min"), "--checkpoint-interval without --mtbf"),
        (("slime", "--mtbf", "5000h", "--checkpoint-interval", "soon"), "--checkpoint-interval: "),
    ],
)
def test_bad_input_names_the_value_and_the_rule(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(*arguments).message


def test_a_bar_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    with counted("simulating", 3) as tick:
        tick()
    assert not screen.getvalue()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    with counted("simulating", 3) as tick:
        for _ in range(3):
            tick()
    assert "simulating" in screen.getvalue()


# --- goodput ----------------------------------------------------------------------------------------


def test_failures_cost_goodput_and_the_text_tells_the_best_interval() -> None:
    asked = ("slime", "--iterations", "1", "--mtbf", "2000h", "--restart", "10min", "--checkpoint", "60s")
    goodput = data_of(*asked)["goodput"]
    assert 0 < goodput["simulated"] < 1
    assert goodput["simulated"] == pytest.approx(goodput["first_order"], abs=0.02)
    assert goodput["interval_s"] == pytest.approx(goodput["best_interval_s"])
    text = " ".join(run(*asked).output.split())
    assert f"{goodput['simulated']:.1%} of the time".replace("%", " %") in text
    assert "(the best interval)" in text
    rare = data_of("slime", "--iterations", "1", "--mtbf", "50000h")["goodput"]
    assert rare["simulated"] > goodput["simulated"]
    fixed = data_of(*asked, "--checkpoint-interval", "3h")["goodput"]
    assert fixed["interval_s"] == 3 * 3600
    assert fixed["simulated"] < goodput["simulated"]
    assert data_of("slime", "--iterations", "1")["goodput"] is None


def test_a_job_that_fails_faster_than_it_saves_is_refused() -> None:
    error = refused("slime", "--iterations", "1", "--mtbf", "1h", "--restart", "10h")
    assert error.code == "job-makes-no-progress"
    assert "with 8 nodes the job fails every 450 s" in error.message


# --- parts of the view ------------------------------------------------------------------------------


def test_a_sparkline_is_in_proportion_and_flat_where_all_are_alike() -> None:
    assert spark([1.0, 8.0, 4.5], "12345678") == "185"
    assert spark([3.0, 3.0], "12345678") == "44"


def test_more_steps_than_columns_are_merged_to_means() -> None:
    assert merged([1.0, 3.0, 5.0, 7.0, 9.0], 3) == [2.0, 6.0, 9.0]
    assert merged([1.0, 2.0], 10) == [1.0, 2.0]


def test_links_have_words() -> None:
    assert link_text("nic:train") == "network cards of train"
    assert link_text("spine") == "the fabric between nodes"
    assert link_text("warp:drive") == "warp:drive"


# --- documentation ----------------------------------------------------------------------------------


def default_of(option: click.Option) -> str:
    plain = isinstance(option.default, str | int | float) and not isinstance(option.default, bool)
    return f" [{option.default}]" if plain else ""


def test_every_option_is_documented_explained_and_in_the_golden_file() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    options = [p for p in simulate.params if isinstance(p, click.Option)]
    assert [p.opts[0] for p in options if p.opts[0] not in text] == []
    assert [p.opts[0] for p in options if not p.help] == []
    golden = (ROOT / "tests" / "golden" / "options_simulate.txt").read_text()
    assert "".join(sorted(f"{p.opts[0]}{default_of(p)}\n" for p in options)) == golden


def test_every_top_level_key_of_the_json_is_documented() -> None:
    line = next(
        line
        for line in (ROOT / "docs" / "plan.md").read_text().splitlines()
        if line.startswith("| `simulate`")
    )
    assert set(data_of("slime", "--iterations", "1")) - {"schema"} == set(re.findall(r"`(\w+)`", line)) - {
        "simulate"
    }


def test_the_process_exits_with_0_and_2() -> None:
    program = [sys.executable, "-m", "rlhfsim.cli.main", "simulate"]
    done = subprocess.run(
        [*program, "slime", "--iterations", "1"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    bad = subprocess.run([*program, "--mtbf", "0h"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error[bad-option]: --mtbf")
