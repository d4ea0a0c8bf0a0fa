"""`rlhfsim design` as a user runs it: text, JSON, exit codes, the written plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import rlhfsim
from rlhfsim.cli import main as entry
from rlhfsim.cli.design import design
from rlhfsim.cli.launch import launch
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import PlannedHardware, read_plan
from rlhfsim.present.answers.choices import front_table
from rlhfsim.present.answers.design import _nodes
from rlhfsim.present.terminal.page import MOST
from rlhfsim.search.pareto import front
from rlhfsim.search.request import Request
from rlhfsim.specs.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("designs_once")
SMALL = ["--gpus", "8", "--model", "qwen3-4b", "--algorithm", "grpo", "--prompts", "64", "--samples", "4"]


TINY = ["--gpus", "2", "--model", "qwen2.5-0.5b", "--algorithm", "grpo", "--prompts", "32", "--samples", "2"]


TARGET_LINES = 6
"""Lines that two targets add to the first screen: all of them together, each, and the run in draws."""


def run(*arguments: str, out: Path) -> Result:
    return CliRunner().invoke(design, [*arguments, "--out", str(out)])


def widest(output: str) -> int:
    """Columns; a command stays in one line, however long the path of its plan is."""
    return max(len(line) for line in output.splitlines() if "plan.json" not in line)


VERDICT = ("cost", "plan", "proof", "learning", "memory", "assumed", "measured", "next", "more")


def test_the_first_screen_is_the_answer(tmp_path: Path) -> None:
    result = run(*SMALL, out=tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    shown = result.output.splitlines()
    assert len(shown) <= MOST
    assert widest("\n".join(shown)) <= 100
    labels = [line.split("  ")[0] for line in shown]
    assert [label for label in labels if label in VERDICT] == list(VERDICT)
    assert "step" not in labels  # the verdict and the line of who runs it say it
    for word in (
        "every sample comes from the policy that trains on it",
        "reward model of the policy's size; every response has exactly 1,024 tokens",
        "per node; risk of running out",
        "of peak",
        "run on CPUs, never compared",
        "--assume-cluster",
        "--gains",
        "ZeRO-",
    ):
        assert word in result.output
    assert "certificate" not in result.output


def test_every_kind_of_plan_is_on_the_first_screen_and_none_is_cut_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--allow", "async,rollout-logprobs", "--steps", "100", "--deadline", "1d", "--budget", "1MUSD")
    machine = json.loads(tiny(*asked, "--json", out=tmp_path).output)
    kinds = [other["kind"] for other in machine["runners_up"]]
    assert len(kinds) > 2
    for width in (100, 80, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = tiny(*asked, out=tmp_path).output
        assert width < 100 or len(shown.splitlines()) <= MOST + TARGET_LINES
        words = " ".join(shown.split())
        for kind in kinds:
            assert kind.replace(", roles", ",").replace(" with ", ", ") in words


def test_a_plan_without_another_side_says_its_step_in_a_line(tmp_path: Path) -> None:
    shown = run(*TINY, "--framework", "any", out=tmp_path / "plan.json").output
    assert re.search(r"^step +\S+ s \((P50 \S+, )?P10-P90 ", shown, re.MULTILINE)


def test_rivals_of_a_plan_with_fp32_sums_say_that_theirs_are_in_bf16(tmp_path: Path) -> None:
    asked = ("--gpus", "2", "--model", "qwen2.5-3b", "--algorithm", "grpo")
    out = tmp_path / "plan.json"
    machine = json.loads(run(*asked, "--json", out=out).output)
    assert machine["chosen"]["workload"]["gradients"] == "fp32"
    rivals = [other["workload"]["gradients"] for other in (machine["best"], *machine["runners_up"])]
    assert "backend" in rivals
    assert run(*asked, out=out).output.count("BF16 sums") == rivals.count("backend")


@pytest.mark.parametrize("how", [("--architecture", "naive"), ("--why-not", "naive")], ids=" ".join)
def test_a_kind_that_the_framework_does_not_run_names_those_that_do(
    tmp_path: Path, how: tuple[str, str]
) -> None:
    result = tiny("--framework", "nemo-rl", *how, out=tmp_path)
    text = f"{result.output} {getattr(result.exception, 'help', '')}"
    said = " ".join(text.split())
    assert "NeMo-RL runs no such plan; these do: --framework rlhfsim --backend fsdp2" in said


def test_what_changes_learning_stands_in_the_verdict_and_the_screen_stays_one(tmp_path: Path) -> None:
    asked = ("--allow", "async,rollout-logprobs", "--architecture", "async", "--max-staleness", "2")
    more = ("--steps", "100", "--require", "step_time<1h", "--require", "oom<50%")
    result = tiny(*asked, *more, out=tmp_path)
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) <= MOST + TARGET_LINES
    assert "samples are up to" in result.output
    assert "nothing here changes what is learnt" not in result.output


def test_the_dry_run_is_told_the_gpus_that_there_are() -> None:
    def pool(gpus: int) -> PlannedHardware:
        return PlannedHardware(profile="h100_sxm", profile_hash="", gpus=gpus, gpus_per_node=8)

    assert _nodes([pool(65), pool(16)]) == "8x8xh100_sxm+1x1xh100_sxm+2x8xh100_sxm"
    assert _nodes([pool(4)]) == "1x4xh100_sxm"


def test_the_rest_stands_behind_detail(tmp_path: Path) -> None:
    result = run(*SMALL, "--detail", "all", out=tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    assert widest(result.output) <= 100
    for word in ("start s", "why", "< peak", "certificate", "would change the choice", "how sure"):
        assert word in result.output
    one = run(*TINY, "--detail", "memory", out=tmp_path / "plan.json").output
    assert "< peak" in one
    assert "certificate" not in one


def test_what_a_framework_cannot_be_told_stands_in_the_answer(tmp_path: Path) -> None:
    """SkyRL has no reward model: what it runs of the plan is not all of it."""
    result = run(*SMALL, "--framework", "skyrl", out=tmp_path / "plan.json")
    assert "but what its keys cannot say: a reward model" in " ".join(result.output.split())
    ruled = run(
        *SMALL, "--framework", "verl", "--rules", "seconds_per_sample=1ms", out=tmp_path / "plan.json"
    )
    assert ruled.exit_code == 0, ruled.output
    assert "cannot say" not in ruled.output


def test_no_export_is_recommended_that_would_be_refused(tmp_path: Path) -> None:
    """AReaL trains on given answers; its keys are written for algorithms that generate."""
    asked = ("--gpus", "2", "--model", "qwen2.5-0.5b", "--framework", "areal")
    shown = run(*asked, "--algorithm", "sft", out=tmp_path / "plan.json").output
    assert "rlhfsim export does not write it" in " ".join(shown.split())
    assert "next      rlhfsim export" not in shown
    assert "next      rlhfsim export" in run(*asked, "--algorithm", "grpo", out=tmp_path / "plan.json").output


def test_a_plan_that_ours_does_not_run_says_for_whom_it_is(tmp_path: Path) -> None:
    result = run(*SMALL, "--backend", "megatron", out=tmp_path / "plan.json")
    assert "NeMo-RL: its users run all of it on GPUs" in result.output
    assert "next      rlhfsim launch" not in result.output
    dry = CliRunner().invoke(
        launch, [str(tmp_path / "plan.json"), "--dry-run", "--assume-cluster", "1x8xh100"]
    )
    assert isinstance(dry.exception, RlhfsimError)
    assert dry.exception.code == "backend-not-run"


def test_a_backend_left_out_is_one_line_where_it_is_faster(tmp_path: Path) -> None:
    asked = ("--gpus", "8", "--model", "8b", "--algorithm", "dpo", "--backend", "fsdp2")
    shown = run(*asked, out=tmp_path / "plan.json").output
    found = json.loads(run(*asked, "--json", out=tmp_path / "plan.json").output)["elsewhere"]
    assert found is not None
    assert found["saved"] > 0.01
    assert found["option"] in " ".join(shown.split())


def test_json_has_the_promised_keys_and_matches_the_written_plan(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run(*SMALL, "--json", out=out)
    answer = json.loads(result.output)
    assert answer["schema"] == "rlhfsim.design/4"
    assert {"chosen", "runners_up", "certificate", "requirements", "why_not", "break_evens"} <= set(answer)
    wanted = {
        "architecture",
        "role_placement",
        "step_s",
        "tokens_per_s_per_gpu",
        "peak_memory_bytes",
        "usd_per_step",
        "phases",
        "placement",
    }
    for plan in (answer["chosen"], *answer["runners_up"]):
        assert wanted <= set(plan)
    proof = answer["certificate"]
    parts = ("infeasible", "dominated", "bounded", "simulated", "unexplored")
    assert proof["space"] == sum(proof[name] for name in parts)
    assert proof["gap"] == 0
    assert answer["framework"] == "rlhfsim"
    assert answer["known"]["DeepSpeed"] == "run on CPUs"
    assert answer["elsewhere"] is None or answer["elsewhere"]["saved"] > 0
    written = read_plan(out)
    assert written.prediction.step_s == pytest.approx(answer["chosen"]["step_s"])
    assert written.architecture == answer["chosen"]["architecture"]


def test_a_cluster_on_which_nothing_fits_exits_with_1_and_names_a_change(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = run("--gpus", "1", "--gpu", "a100-40", "--model", "8b", "--prompts", "64", out=out)
    assert result.exit_code == 1
    assert "smallest change that fits" in result.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "h101"), "h101"),
        (("--model", "llama-9-70b"), "llama-9-70b"),
        (("--gpus", "0"), "0"),
        (("--gpus", "-8"), "-8"),
        (("--prompts", "0"), "prompts"),
        (("--response-len", "nan"), "response"),
        (("--response-len", "-3"), "response"),
        (("--response-len", "lognormal:mean=10,sgma=1,max=20"), "sgma"),
        (("--fix", "actor.tp"), "actor.tp"),
        (("--fix", "actor.tpp=8"), "tpp"),
        (("--fix", "actor.tp=0"), "actor.tp: 0 is out of range"),
        (("--fix", "actr.tp=8"), "actr"),
        (("--fix", "critic.tp<=2"), "no critic"),
        (("--fix", "critic.tp=2"), "--fix critic: grpo has no critic"),
        (("--framework", "nemo-rl", "--fix", "critic.tp=2"), "--fix critic: grpo has no critic"),
        (("--fix", "actor.tp=3"), "--fix actor: tensor parallelism 3"),
        (("--fix", "actor.recompute<=full"), "recompute"),
        (("--fix", "actor.tp=2,actor.tp=4"), "both 2 and 4"),
        (("--fix", "rollout.gpus=9"), "rollout.gpus=9"),
        (("--fix", "rollout.sleep=3"), "sleep"),
        (("--fix", "actor.shards=1"), "actor.shards: 1 is out of range"),
        (("--fix", "actor.offload_fraction=0.6"), "did you mean 0.5"),
        (("--fix", "actor.offload_fraction<=0.5"), "write = or !="),
        (("--architecture", "hybrd"), "hybrd"),
        (("--architecture", "naive", "--forbid", "naive"), "naive"),
        (("--architecture", "hybrid", "--weight-path", "broadcast"), "GPUs of their own"),
        (("--weight-path", "lora"), "--allow lora"),
        (("--weight-path", "p2p"), "--framework nemo-rl --backend megatron"),
        (("--weight-path", "pigeon"), "pigeon"),
        (("--max-gpus-per-role", "0"), "max-gpus-per-role"),
        (("--time-limit", "-3"), "time-limit"),
        (("--objective", "speed"), "speed"),
        (("--require", "step_time"), "step_time"),
        (("--require", "steptime<3s"), "steptime"),
        (("--require", "step_time<3GB"), "3GB"),
        (("--require", "cost_of_run<3"), "--steps"),
        (("--why-not", "asinc"), "asinc"),
        (("--why-not", "actor.tpp=2"), "tpp"),
        (("--why-not", "actor.tp=3"), "3"),
        (("--why-not", "critic.tp=2"), "no critic"),
        (("--why-not", "no-everything"), "no-everything"),
        (("--why-not", "actor=tp2;rolout=tp2"), "rolout"),
        (("--why-not", "actor=tp2,pipeline"), "pipeline"),
        (("--why-not", "rollout=zero1"), "zero"),
        (("--why-not", "critic=tp2"), "no critic"),
        (("--steps", "0"), "steps"),
        (("--allow", "asinc"), "asinc"),
        (("--forbid", "everything"), "everything"),
        (("--max-oom", "2"), "max-oom"),
        (("--mini-batches", "7"), "7 mini-batches"),
        (("--gpu", "mi250x", "--objective", "cost"), "--price"),
        (("--gpu", "l4", "--price", "spot"), "no spot price of l4"),
    ],
)
def test_bad_input_is_one_clear_error_and_writes_nothing(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "plan.json"
    monkeypatch.setattr("sys.argv", ["rlhfsim", "design", *SMALL, *arguments, "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    told = capsys.readouterr().err
    assert stopped.value.code == 2
    assert told.startswith("error[") or "Error:" in told
    assert said in told
    assert "Traceback" not in told
    assert not out.exists()


def test_an_unwritable_place_is_an_error_of_the_user(tmp_path: Path) -> None:
    result = run(*TINY, out=tmp_path / "no" / "plan.json")
    assert isinstance(result.exception, RlhfsimError)
    assert "cannot write" in str(result.exception)


def test_help_lists_every_command_without_importing_numpy() -> None:
    result = CliRunner().invoke(entry.cli, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in entry.COMMANDS)


def tiny(*arguments: str, out: Path) -> Result:
    return CliRunner().invoke(design, [*TINY, *arguments, "--out", str(out / "plan.json")])


def test_targets_are_shown_and_set_the_exit_code(tmp_path: Path) -> None:
    met = tiny("--require", "step_time<1h", "--require", "oom<5%", "--steps", "10", out=tmp_path)
    assert met.exit_code == 0, met.output
    assert met.output.count("  met  ") == 3
    assert "fits and meets all" in met.output
    assert ": 10 steps take" in met.output
    missed = tiny(
        "--require", "step_time<1ms", "--require", "memory<1%", "--time-limit", "2s", "--json", out=tmp_path
    )
    assert missed.exit_code == 1
    verdicts = json.loads(missed.output)["requirements"]
    assert [v["met"] for v in verdicts] == [False, False]
    assert verdicts[0]["actual"] > 0.001
    assert (tmp_path / "plan.json").exists()


def test_a_deadline_and_a_budget_are_answered_with_probabilities(
    tmp_path: Path, designs_once: dict[bytes, Any]
) -> None:
    asked = ("--steps", "1000", "--deadline", "7d", "--budget", "50kUSD")
    shown = tiny(*asked, out=tmp_path).output
    assert "time_of_run<=7 d" in shown
    assert "cost_of_run<=50,000 USD" in shown
    assert shown.count("probability ") >= 2
    assert widest(shown) <= 100
    answer = json.loads(tiny(*asked, "--json", out=tmp_path).output)
    odds, each = answer["odds"], [r["probability"] for r in answer["requirements"]]
    assert odds["together"] <= min(each) <= 1
    assert odds["run_s"][0] < answer["run"]["seconds"] < odds["run_s"][2]
    designs_once.clear()  # searched anew, it is the same
    assert tiny(*asked, "--json", out=tmp_path).output == json.dumps(answer, indent=1) + "\n"
    for given in (("--deadline", "7d"), ("--budget", "1", "--steps", "3x"), ("--deadline", "7 weeks")):
        assert isinstance(tiny(*given, out=tmp_path).exception, RlhfsimError)


def test_money_as_objective_says_that_it_is_time(tmp_path: Path) -> None:
    result = tiny("--objective", "cost", "--price", "2", out=tmp_path)
    assert "rented" in result.output
    assert "2 USD per GPU-hour" in result.output


def test_why_not_shows_what_it_costs_and_which_calls_make_the_difference(tmp_path: Path) -> None:
    choices = ("--why-not", "disaggregated", "--why-not", "actor.zero=3", "--why-not", "actor.tp>=16")
    result = tiny(*choices, out=tmp_path)
    assert result.exit_code == 0, result.output
    assert widest(result.output) <= 100
    for words in (
        "why not disaggregated",
        "why not actor.zero=3",
        "longer",
        "seconds of the step in",
        "no layout of the actor",
    ):
        assert words in result.output
    answer = json.loads(tiny(*choices, "--json", out=tmp_path).output)
    slow, same, none = answer["why_not"]
    gap = slow["plan"]["step_s"] - (answer["best"] or answer["chosen"])["step_s"]
    assert slow["slower_s"] == pytest.approx(gap)
    assert sum(t["other_s"] - t["chosen_s"] for t in slow["terms"]) == pytest.approx(gap, abs=1e-6)
    assert same["plan"]["placement"]["actor"]["layout"]["zero"] == 3
    assert none["plan"] is None
    assert "no layout" in none["reason"]


def test_why_not_takes_a_plan_in_part_or_whole(tmp_path: Path) -> None:
    tiny("--fastest", out=tmp_path)
    whole = str((tmp_path / "plan.json").rename(tmp_path / "before.json"))
    part = "hybrid;actor=TP1 ZeRO-3,mb1;rollout=tp1"
    choices = ("--fastest", "--why-not", part, "--why-not", whole)
    result = tiny(*choices, out=tmp_path)
    assert result.exit_code == 0, result.output
    for words in (f"why not {part}", "its best plan: hybrid", "exactly this plan", "that is the chosen plan"):
        assert words in result.output
    named, same = json.loads(tiny(*choices, "--json", out=tmp_path).output)["why_not"]
    layout = named["plan"]["placement"]["actor"]["layout"]
    assert (layout["tp"], layout["zero"], layout["micro_batch"]) == (1, 3, 1)
    assert named["excluded"]["kind"] in ("dominated", "bounded", "slower")
    assert (same["is_chosen"], same["excluded"]["kind"]) == (True, "chosen")


def near(*arguments: str, out: Path) -> Result:
    """A question whose fastest plan is not the simplest within 3 %."""
    asked = ("--gpus", "4", "--model", "llama-2-7b", "--prompts", "32")
    return CliRunner().invoke(design, [*asked, *arguments, "--out", str(out / "plan.json")])


def test_the_simplest_plan_is_written_and_the_fastest_is_shown_beside_it(tmp_path: Path) -> None:
    result = near("--detail", "time,proof", out=tmp_path)
    assert "% faster; the simplest within 3 %" in result.output
    assert "* is recommended: the simplest plan within 3 % of plan 1" in result.output
    assert "the fastest plan takes" in result.output
    written = read_plan(tmp_path / "plan.json")
    assert written.choice is not None
    assert written.choice.best is not None
    assert written.prediction.step_s <= 1.03 * written.choice.best.step_s
    whole = str((tmp_path / "plan.json").rename(tmp_path / "before.json"))
    answer = json.loads(near("--why-not", whole, "--json", out=tmp_path).output)
    assert answer["best"]["step_s"] == pytest.approx(written.choice.best.step_s)
    [same] = answer["why_not"]
    assert (same["is_chosen"], same["excluded"]["kind"] != "chosen") == (True, True)


def test_the_fastest_plan_is_written_where_it_is_asked_for_or_a_target_needs_it(tmp_path: Path) -> None:
    free = json.loads(near("--json", out=tmp_path).output)
    fastest = json.loads(near("--json", "--fastest", out=tmp_path).output)
    assert fastest["best"] is None
    assert fastest["chosen"]["step_s"] == pytest.approx(free["best"]["step_s"])
    seconds = (free["best"]["step_s"] + free["chosen"]["step_s"]) / 2
    within = near("--json", "--require", f"step_time<{seconds}s", out=tmp_path)
    assert within.exit_code == 1  # by its own figure, not with 80 %
    assert json.loads(within.output)["requirements"][0]["probability"] < 0.8
    assert json.loads(within.output)["chosen"]["step_s"] <= seconds


def test_why_not_says_which_rule_a_named_plan_breaks(tmp_path: Path) -> None:
    result = tiny("--why-not", "actor=zero1;rollout=tp3", "--json", out=tmp_path)
    assert result.exit_code == 0, result.output
    [refused] = json.loads(result.output)["why_not"]
    assert refused["plan"] is None
    assert refused["excluded"]["kind"] == "refused"
    assert "3" in refused["excluded"]["text"]


def test_bounds_and_paths_are_kept(tmp_path: Path) -> None:
    result = tiny(
        "--fix",
        "actor.zero<=1,rollout.gpus=1",
        "--weight-path",
        "disk",
        "--max-gpus-per-role",
        "1",
        "--json",
        out=tmp_path,
    )
    assert result.exit_code == 0, result.output
    placement = json.loads(result.output)["chosen"]["placement"]
    assert placement["actor"]["layout"]["zero"] <= 1
    assert placement["weight_path"] == "disk"
    assert {p["gpus"] for p in placement["pools"]} == {1}


def test_the_front_is_shown_on_request(tmp_path: Path) -> None:
    result = tiny("--pareto", out=tmp_path)
    assert result.exit_code == 0, result.output
    assert widest(result.output) <= 100
    _, rest = result.output.split("plans between which you may choose")
    rows = [line for line in rest.splitlines() if " GB " in line]
    assert len(rows) >= 2


def test_the_front_in_json_holds_whole_plans() -> None:
    request = Request(
        cluster=rlhfsim.parse_cluster(1, "h100"),
        workload=Workload(model="qwen2.5-0.5b", algorithm="dpo", prompts=16),
    )
    points = front_table(front(request)).records
    assert points
    for point in points:
        assert point["plan"]["step_s"] == point["step_s"]
        assert {"memory_bytes", "staleness", "probability_out_of_memory"} <= set(point)
