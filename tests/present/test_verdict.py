"""The verdict on a plan: the same sentences on the first screen and on the page, whatever was asked."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rlhfsim.plan import AskedRun, Plan, RunOdds, RunTarget, read_plan, write_plan
from rlhfsim.present.answers.design import page as design_page
from rlhfsim.present.answers.design_details import Extras
from rlhfsim.present.pages.headline import tiles
from rlhfsim.present.pages.plan import plan_page
from rlhfsim.present.terminal.page import show
from rlhfsim.present.verdict import assumed
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import Requirement, requirement
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.verdict import verdict
from rlhfsim.what_if.design import Design, design
from rlhfsim.what_if.risk.odds import asked_run, odds
from rlhfsim.what_if.risk.run import outlook_for

QUESTIONS, RUNS = 5, 10
"""Drawn questions, and drawn runs of each."""
TARGETS = ("step_time<{}s", "cost_per_step<{}mUSD", "memory<{}%", "oom<{}%", "tokens_per_s>{}")


def answer_to(drawn: np.random.Generator) -> Design:
    """A drawn question on one or two GPUs."""
    work = Workload(
        algorithm=drawn.choice(["grpo", "rloo"]),
        model="0.5b",
        prompts=int(drawn.choice([8, 16, 32])),
        samples=2,
        prompt_len=Fixed(value=64),
        response_len=Fixed(value=float(drawn.choice([32, 64, 128]))),
    )
    cluster = parse_cluster(int(drawn.integers(1, 3)), str(drawn.choice(["h100", "a100-80", "l40s"])))
    price = float(drawn.uniform(0.5, 9)) if drawn.random() < 0.5 else None
    return design(Request(cluster=cluster, workload=work, price=price), explain=False, rivals=False)


def run_of(drawn: np.random.Generator) -> tuple[list[Requirement], int | None]:
    """Targets of a step, then perhaps a run with a deadline and a budget."""
    texts = [text.format(drawn.integers(1, 90)) for text in TARGETS if drawn.random() < 0.3]
    targets = [requirement(text.replace("mUSD", "")) for text in texts]
    if drawn.random() < 0.3:
        return targets, None
    for name, quantity, most in (("deadline", "time_of_run", 1e6), ("budget", "cost_of_run", 1e4)):
        if drawn.random() < 0.6:
            value = float(drawn.uniform(1, most))
            targets.append(
                Requirement(quantity=quantity, relation="<=", value=value, text=f"{quantity}<=", name=name)
            )
    return targets, int(10 ** drawn.uniform(0, 6))


def first_sentences(answer: Design, run: AskedRun | None) -> str:
    """What the first screen says above its title."""
    screen = StringIO()
    show(Console(file=screen, width=100), design_page(answer, Extras(run=run)))
    return " ".join(screen.getvalue().split(" of qwen2.5-0.5b (0.5b) on ")[0].rsplit("\n", 1)[0].split())


def test_a_report_begins_as_the_first_screen_over_drawn_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, path = np.random.default_rng(26), tmp_path / "plan.json"
    monkeypatch.setattr("rlhfsim.present.pages.plan.sections", lambda *_: ())  # what is below the verdict
    monkeypatch.setattr("rlhfsim.present.figures.trust.scored", lambda: (1, 0.1))
    monkeypatch.setattr("rlhfsim.present.terminal.page.MOST", 99)  # nothing is cut, line by line
    said = set()
    for answer in (answer_to(drawn) for _ in range(QUESTIONS)):
        assert answer.chosen is not None
        for targets, steps in (run_of(drawn) for _ in range(RUNS)):
            run = asked_run(targets, steps, odds(targets, outlook_for(answer.request, answer.chosen, steps)))
            write_plan(path, replace(answer.chosen, run=run))
            page = plan_page(read_plan(path, as_priced=True))
            assert page.verdict == first_sentences(answer, run)
            said.add(page.verdict)
    assert len(said) >= QUESTIONS * RUNS * 0.8


@pytest.fixture(scope="module")
def plan() -> Plan:
    answer = answer_to(np.random.default_rng(1))
    assert answer.chosen is not None
    return answer.chosen


def changed(plan: Plan, run: AskedRun | None = None, **prediction: float | None) -> Plan:
    told = {"step_s": 7200.0, "usd_per_step": 10.0, "peak_memory_bytes": 75e9, "capacity_bytes": 100e9}
    risk = {"probability_out_of_memory": 0.001}
    return replace(plan, run=run, prediction=replace(plan.prediction, **{**told, **risk, **prediction}))  # type: ignore[arg-type]


def target(name: str, value: float, probability: float | None) -> RunTarget:
    return RunTarget(
        name=name,
        quantity="cost_of_run",
        relation="<=",
        value=value,
        text="step_time<9s",
        probability=probability,
    )


def test_how_much_changes_is_assumed_where_only_that_is_sent(plan: Plan) -> None:
    said = "2 % of the weights change in a step (0.5 % to 5 %): only those are sent"
    assert said not in assumed(plan)
    assert said in assumed(replace(plan, placement=replace(plan.placement, weight_path="delta")))


def test_without_a_run_only_the_step_is_said(plan: Plan) -> None:
    step = f"One {plan.workload.title} step of qwen2.5-0.5b takes 2 h on 2 GPUs"
    assert verdict(changed(plan)) == (
        f"It fits. {step} and costs 10 USD, and the fullest GPU keeps 25 % of its memory free."
    )
    assert verdict(changed(plan, usd_per_step=None)).startswith(f"It fits. {step}, and the fullest")


def test_what_does_not_fit_and_what_is_risky_is_said_first(plan: Plan) -> None:
    assert verdict(changed(plan, peak_memory_bytes=150e9)).startswith("It does not fit. ")
    assert "would need 50 % more memory than it has" in verdict(changed(plan, peak_memory_bytes=150e9))
    engine = "actor.generate: the rollout engine has KV cache for 0 tokens, the longest sequence has 1124"
    assert verdict(changed(plan, rejected_by=engine)).startswith(f"It does not fit: {engine}. One ")
    risky = verdict(changed(plan, probability_out_of_memory=0.03))
    assert risky.startswith("It fits, with a 3 % risk of running out of memory. ")


def test_a_run_is_its_steps_its_time_its_money_and_its_chances(plan: Plan) -> None:
    targets = (target("step_time<", 9, None), target("deadline", 86400, 0.62), target("budget", 4000, 1.0))
    text = verdict(changed(plan, AskedRun(steps=500, targets=targets)))
    assert ": 500 steps take 41.7 d and 5,000 USD, and" in text
    assert text.endswith(
        "The deadline of 1 d is kept with a probability of 62 %, the budget of 4,000 USD with >99 %."
    )
    assert ": 1 step takes 2 h, and" in verdict(changed(plan, AskedRun(steps=1), usd_per_step=None))
    only = AskedRun(targets=(target("step_time<", 9, 0.0),))
    assert verdict(changed(plan, only)).endswith(
        "The target step_time<9s is kept with a probability of <1 %."
    )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("deadline",), "with a probability of 62 %; it fits and keeps it with 58 %."),
        (("deadline", "budget"), "the budget of 86,400 USD with 62 %; it fits and keeps both with 58 %."),
        (
            ("deadline", "budget", "x"),
            "the target step_time<9s with 62 %; it fits and keeps all 3 with 58 %.",
        ),
    ],
)
def test_the_probability_of_all_targets_in_one_is_said(plan: Plan, names: tuple[str, ...], said: str) -> None:
    known = RunOdds(fits=0.99, together=0.58, step_s=(1, 2, 3))
    targets = tuple(target(name, 86400, 0.62) for name in names)
    assert verdict(changed(plan, AskedRun(steps=9, targets=targets, odds=known))).endswith(said)
    unknown = (target("step_time<", 9, None),)
    assert "keeps it" not in verdict(changed(plan, AskedRun(targets=unknown, odds=known)))


def test_the_tile_of_the_run_says_whether_its_targets_are_met(plan: Plan) -> None:
    assert not any(tile.label.startswith("Run") for tile in tiles(changed(plan)))
    for probability, mark in ((0.85, "good"), (0.75, "bad")):
        run = AskedRun(steps=500, targets=(target("budget", 6000.0, probability),), confidence=0.8)
        tile = next(tile for tile in tiles(changed(plan, run)) if tile.label == "Run of 500 steps")
        assert (tile.value, tile.mark) == ("41.7 d, 5,000 USD", mark)
