"""Parts of pages: the picture of nodes, contributions, sizes, verdicts, commands, assumptions."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import planted_plans
import pytest

from rlhfsim.api import estimate
from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.choice import AskedBound, AskedLimit
from rlhfsim.cli.design import design as design_command
from rlhfsim.cli.design import question as asked_request
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.plan import Plan
from rlhfsim.present.answers.tree import Figure, Listing, Page
from rlhfsim.present.answers.written import written
from rlhfsim.present.assumptions import tables, unknowns
from rlhfsim.present.basis import basis, states
from rlhfsim.present.figures import choice
from rlhfsim.present.figures import run as figures_run
from rlhfsim.present.figures import steps as figures_steps
from rlhfsim.present.figures import trust as figures_trust
from rlhfsim.present.figures.iteration import resources
from rlhfsim.present.figures.picture import meaning, node_groups
from rlhfsim.present.figures.whatif import changed
from rlhfsim.present.html import plots
from rlhfsim.present.pages.plan import GIVEN, plan_page
from rlhfsim.present.plan_words import header_rows, trained
from rlhfsim.present.reproduce import design_arguments
from rlhfsim.present.words import lengths, pools, signed
from rlhfsim.search.explain import own_kind
from rlhfsim.search.planning import asked_again
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.lengths import LogNormal, Truncated
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if import sizing
from rlhfsim.what_if.scenarios.result import WhatIf
from rlhfsim.what_if.sizing import Sizes

# --- the picture --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def apart() -> Plan:
    """Two nodes train with TP2, three nodes of the five generate with TP8."""
    placement = Placement(
        pools=(ResourcePool(name="train", gpus=16), ResourcePool(name="rollout", start=16, gpus=24)),
        actor=RolePlacement(pool="train", layout=Layout(tp=2, dp=8, zero=1)),
        rollout=RolloutPlacement(pool="rollout", layout=RolloutLayout(tp=8, dp=3)),
        weight_path="broadcast",
        backend="deepspeed",
    )
    work = Workload(
        algorithm="grpo", model="8b", prompts=64, samples=4, reference="none", reward=Reward(rules=Rules())
    )
    return estimate(placement, work, parse_cluster(40))


def test_equal_nodes_stand_once(apart: Plan) -> None:
    first, second = node_groups(apart)
    assert (first.title, second.title) == (
        "Nodes 0 to 1: 2 equal nodes of 8 GPUs (× 2)",
        "Nodes 2 to 4: 3 equal nodes of 8 GPUs (× 3)",
    )
    assert [(lane.role, lane.pieces) for lane in first.lanes] == [
        ("actor", ((0, 2, "TP2"), (2, 2, "TP2"), (4, 2, "TP2"), (6, 2, "TP2")))
    ]
    assert [(lane.role, lane.pieces) for lane in second.lanes] == [("rollout", ((0, 8, "TP8"),))]


def test_stages_of_a_pipeline_are_told_apart_where_they_are_few(apart: Plan) -> None:
    def staged(pp: int) -> list[str]:
        actor = RolePlacement(pool="all", layout=Layout(tp=4, pp=pp, dp=8 // pp, zero=1))
        rollout = RolloutPlacement(pool="all", layout=RolloutLayout(tp=4, pp=2, dp=4))
        pool = ResourcePool(name="all", gpus=32)
        roles = {"actor": actor, "rollout": rollout}
        placement = replace(
            apart.placement, pools=(pool,), backend="megatron", weight_path="reshard", **roles
        )
        groups = node_groups(estimate(placement, apart.workload, parse_cluster(32)))
        assert all(lane.layout == roles[lane.role].layout.label for g in groups for lane in g.lanes)
        return [f"{lane.role} {label}" for g in groups for lane in g.lanes for _, _, label in lane.pieces]

    engines = ["rollout TP4 PP 1/2", "rollout TP4 PP 2/2"]
    assert staged(2) == [*engines, *["actor TP4 PP 1/2"] * 2, *engines, *["actor TP4 PP 2/2"] * 2]
    assert staged(8)[:4] == [*engines, "actor TP4 PP 1/8", "actor TP4 PP 2/8"]


def test_layouts_in_words(apart: Plan) -> None:
    roles = apart.placement.roles
    assert meaning(roles["rollout"]) == "3 engines, each over 8 GPUs"
    assert (
        meaning(roles["actor"])
        == "8 copies of the model, each over 2 GPUs; optimizer states are split among the copies"
    )
    assert (
        meaning(RolePlacement(pool="a", layout=Layout(dp=64, zero=3)))
        == "one copy of weights and optimizer, spread over 64 GPUs"
    )


# --- doubts -------------------------------------------------------------------------------------------


def test_parts_on_one_coefficient_move_together_and_add_up_to_the_interval() -> None:
    cost = Cost(
        parts=(
            part("compute", 10.0, "a", spread=(0.9, 1.2)),
            part("hbm", 5.0, "a", spread=(0.8, 1.2)),
            part("network", 4.0, "b", spread=(0.5, 2.0)),
            part("host", 1.0, "sure"),
        )
    )
    found = figures_trust.contributions(cost)
    assert [(p.name, round(p.down_s, 6), round(p.up_s, 6)) for p in found] == [
        ("b", 2.0, 4.0),
        ("a", 2.0, 3.0),
    ]
    assert sum(p.share for p in found) == pytest.approx(1.0)
    low, high = cost.interval
    assert math.hypot(*(p.down_s for p in found)) == pytest.approx(cost.seconds - low)
    assert math.hypot(*(p.up_s for p in found)) == pytest.approx(high - cost.seconds)


def test_the_step_priced_again_is_the_plans_own(plan: Plan) -> None:
    known = basis(plan)
    assert known.notes == ()
    assert known.cost is not None
    assert known.cost.seconds == pytest.approx(plan.prediction.step_s)


def test_a_profile_that_changed_is_said(plan: Plan) -> None:
    other = replace(plan, hardware=tuple(replace(h, profile_hash="0" * 64) for h in plan.hardware))
    assert "not the one the plan was made with" in basis(other).notes[0]
    missing = replace(plan, hardware=tuple(replace(h, profile="no_such_gpu") for h in plan.hardware))
    known = basis(missing)
    assert known.cost is None
    page = plan_page(missing)
    assert [s.key for s in page.sections][-1] == "reproduce"
    assert any("no_such_gpu" in item for item in unknowns(known).items)


def test_every_coefficient_in_use_has_value_interval_and_source(plan: Plan) -> None:
    _, coefficients, _ = tables(basis(plan))
    assert len(coefficients.rows) > 5
    for name, value, low, high, source, *_ in written(coefficients).rows:
        if value.value is not None:
            assert low.value is not None
            assert high.value is not None
            assert low.value <= value.value <= high.value, name.text
            assert len(source.text) > 5


def test_published_steps_are_drawn_with_the_fitted_ones_apart() -> None:
    figure = figures_trust.scatter()
    assert figure.plot is not None
    assert (
        sum(len(t["x"]) for t in figure.plot["data"] if t.get("meta") != "guide")
        == len(figures_trust.published())
        == len(figure.table.rows)
    )
    assert [t["name"] for t in figure.plot["data"]].count("used for fitting") == 1


# --- sizes --------------------------------------------------------------------------------------------


def test_sizes_are_whole_nodes_or_powers_inside_one(plan: Plan) -> None:
    def of(gpus: int) -> tuple[int, ...]:
        return sizing.other_counts(
            replace(plan, hardware=(replace(plan.hardware[0], gpus=gpus, gpus_per_node=8),))
        )

    assert of(4) == (1, 2, 8, 16)
    assert of(64) == (16, 32, 128, 256)
    assert of(24) == (6, 16, 48, 96)
    assert of(1) == (2, 4)
    assert sizing.other_counts(replace(plan, choice=None)) == ()


def test_other_sizes_are_searched_with_the_same_question(plan: Plan, sizes: Sizes) -> None:
    assert [s.gpus for s in sizes.tried] == [2, 8]
    assert all(p.workload == plan.workload for p in sizes.found)
    by_size = {sum(h.gpus for h in p.hardware): p.prediction.step_s for p in sizes.found}
    assert by_size[8] < plan.prediction.step_s < by_size[2]


def test_a_size_whose_search_ran_out_of_time_is_said(plan: Plan) -> None:
    note = sizing._notes([sizing.Size(gpus=8, plan=plan, gap=0.12), sizing.Size(gpus=2, plan=None)])
    assert note == [
        "2 GPUs: nothing fits",
        "8 GPUs: its search ended early; a plan could be up to 12.0% shorter",
    ]


# --- verdicts -----------------------------------------------------------------------------------------


def test_a_given_plan_says_that_nobody_searched(plan: Plan) -> None:
    page = plan_page(replace(plan, choice=None))
    assert GIVEN in page.sure
    assert not {f.key for f in page.figures} & {"pareto", "rival", "break_evens"}
    listings = [b for s in page.sections for b in s.blocks if isinstance(b, Listing)]
    assert sum(GIVEN in b.items for b in listings) == 2


def test_a_plan_that_does_not_fit_says_so_first(plan: Plan) -> None:
    over = replace(plan.prediction, peak_memory_bytes=1.2 * plan.prediction.capacity_bytes)
    page = plan_page(replace(plan, prediction=over))
    assert page.mark == "bad"
    assert page.verdict.startswith("It does not fit. ")
    assert "20 % more memory than it has" in page.verdict


def test_a_plan_without_a_price_shows_gpu_hours(plan: Plan) -> None:
    free = replace(plan, prediction=replace(plan.prediction, usd_per_step=None), choice=None)
    page = plan_page(free)
    assert "$" not in page.verdict
    assert page.tiles[1].value == "unknown"
    assert choice.cost_of(free) == pytest.approx(4 * plan.prediction.step_s / 3600)


def test_the_peak_of_the_figure_is_the_peak_of_the_plan(plan: Plan) -> None:
    shown = [state for pool in plan.placement.pools for state in states(plan, pool.name)]
    assert max(state.bytes for state in shown) == pytest.approx(plan.prediction.peak_memory_bytes)
    for state in shown:
        assert sum(state.groups.values()) == pytest.approx(state.bytes)


def test_the_bridge_of_a_run_adds_up(run: SideBySide) -> None:
    assert run.gap is not None
    figure = figures_steps.gap(run.gap)
    assert figure.plot is not None
    first, *parts, last = figure.plot["data"][0]["y"]
    assert first + sum(parts) == pytest.approx(last, rel=1e-4)


def test_both_sides_of_the_run_start_at_zero(run: SideBySide) -> None:
    work = figures_run.both(run)
    for side in ("predicted", "measured"):
        assert min(w.start_s for w in work if w.side == side) == pytest.approx(0.0, abs=1e-9)


def test_a_call_of_two_groups_counts_once() -> None:
    def work(where: str, seconds: float) -> figures_run.TimedCall:
        return figures_run.TimedCall(
            side="measured", name="actor.sync", where=where, start_s=0.0, seconds=seconds
        )

    assert figures_run._totals([work("train", 2.0), work("rollout", 3.0), work("train", 0.5)]) == {
        "actor.sync": 3.0
    }


def test_a_table_of_points_has_inputs_in_words(result: WhatIf) -> None:
    assert changed(result.points[0]) == "number of GPUs: 8"
    assert changed(result.base) == "as it is"


def test_a_point_that_does_not_fit_is_told(pages: dict[str, Page]) -> None:
    assert any(t.value == "2 of 3" and "too large" in t.detail for t in pages["whatif"].tiles)


# --- commands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "objective": "memory",
            "max_oom": 0.05,
            "forbid": ("recompute", "split"),
            "fix": {"actor": {"tp": 2}},
            "price": 2.5,
        },
        {
            "limits": (
                AskedLimit(role="rollout", field="tp", relation="<=", value=2),
                AskedLimit(role="actor", field="offload_between", relation="=", value=False),
            )
        },
        {
            "architecture": "hybrid",
            "weight_path": "ipc",
            "time_limit": 30.0,
            "max_staleness": 2.0,
            "max_gpus_per_role": 4,
        },
    ],
)
def test_the_command_of_the_page_asks_the_same_question(plan: Plan, changes: dict[str, object]) -> None:
    assert plan.choice is not None
    asked = AskedBound(
        **{**{f: getattr(plan.choice.asked, f) for f in AskedBound.__dataclass_fields__}, **changes}
    )
    told = replace(plan, choice=replace(plan.choice, asked=asked))
    context = design_command.make_context("design", design_arguments(told))
    known = basis(told)
    assert known.cluster is not None
    again = asked_again(told, known.cluster)
    assert asked_request(context.params) == replace(again, price=None)  # it stands in the profile


@pytest.mark.parametrize(
    "work",
    [
        Workload(algorithm="ppo", model="0.5b", prompts=32, epochs=2, mini_batches=4, critic="1.5b", seed=7),
        Workload(
            algorithm="grpo",
            model="0.5b",
            prompts=32,
            samples=4,
            kl=False,
            packing=False,
            reward=Reward(rules=Rules(seconds_per_sample=0.01)),
            response_len=LogNormal(mean=300, max=1024),
        ),
        Workload(
            algorithm="rloo",
            model="0.5b",
            prompts=32,
            samples=4,
            reward=Reward(model="1.5b", rules=Rules()),
            prompt_len=Truncated(mean=200, std=50, max=400),
        ),
    ],
)
def test_the_command_tells_every_workload(plan: Plan, work: Workload) -> None:
    context = design_command.make_context("design", design_arguments(replace(plan, workload=work)))
    assert asked_request(context.params).workload == work


def test_plotly_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="no_such"):
        plots.checked(plots.spec([{"type": "bar", "no_such": 1}], {}))


def test_planted_plans_have_a_page_for_every_architecture() -> None:
    for made in planted_plans.six_plans():
        page = plan_page(made)
        assert page.verdict
        assert len(page.figures) >= 5


def test_a_streaming_plan_says_so_on_the_terminal_and_on_its_page(apart: Plan) -> None:
    streaming = replace(
        apart, placement=replace(apart.placement, schedule=replace(apart.placement.schedule, streaming=True))
    )
    for one, said in ((apart, False), (streaming, True)):
        assert ("finished samples are scored while others" in header_rows(one)["plan"]) is said
        assert ("finished samples are scored while others" in plan_page(one).subtitle) is said


def test_words_of_a_placement_say_who_has_which_gpus_and_nothing_against_it(apart: Plan, plan: Plan) -> None:
    """A rollout on GPUs of its own stood beside `all roles in one pool`, which was about the others."""
    for one in (apart, plan):
        text = " ".join(header_rows(one).values())
        alone = len(one.placement.pools) == 1
        assert pools(one) in text
        assert ("all roles" in text) is alone
        assert ("GPUs of their own" in text) is not alone
        for pool in one.placement.pools:
            assert f"{pool.gpus} GPU" in text


def test_the_page_of_the_simplest_plan_shows_the_fastest_beside_it(plan: Plan) -> None:
    assert plan.choice is not None
    fastest = replace(plan.choice.runners_up[0], step_s=0.98 * plan.prediction.step_s, label="hybrid")
    simple = replace(plan, choice=replace(plan.choice, best=fastest))
    page = plan_page(simple)
    assert any("this one is the simplest within 3 % of it" in text for text in page.sure)
    assert any("The fastest plan is" in text for text in page.sure)
    assert "best: hybrid" in str(page.sections)
    assert "--fastest" not in design_arguments(simple)
    assert "--fastest" in design_arguments(replace(plan, choice=replace(plan.choice, fastest=True)))


def test_a_page_has_phases_in_words_and_kinds_with_their_switches(overlapping: Plan) -> None:
    assert overlapping.choice is not None
    assert own_kind(overlapping) == "async with rollout-logprobs"
    reasons = ("hybrid takes 9 s more: actor.train +4.6 s, moves +3 s, actor.generate.wait -1 s",)
    moved = {"reward.score": "reward.score.load"}
    ledger = tuple(replace(e, phase=moved.get(e.phase, e.phase)) for e in overlapping.prediction.ledger)
    prediction = replace(overlapping.prediction, ledger=ledger)
    choice = replace(overlapping.choice, reasons=reasons)
    page = plan_page(replace(overlapping, prediction=prediction, choice=choice))
    by_key = {item.key: item for s in page.sections for item in s.blocks if isinstance(item, Figure)}
    memory = [figure for key, figure in by_key.items() if key.startswith("memory")]
    drawn = {row for figure in memory for trace in (figure.plot or {})["data"] for row in trace["y"]}
    assert {"Training of the policy", "Generation"} <= drawn
    assert not [row for row in drawn if "." in row or row.startswith(("Load", "Unload"))]
    numbers = [str(row[0].text) for figure in memory for row in written(figure.table).rows]
    assert any(row.startswith("Load for ") for row in numbers)
    told = "Hybrid takes 9 s more: training of the policy +4.6 s, loads and unloads +3 s, waiting for generation -1 s"
    assert told in str(page.sections)
    assert "response lognormal (mean 2,000, at most 8,192 tokens)" in page.subtitle
    assert lengths(LogNormal(mean=292, max=512)) == "lognormal (mean 292, 250 as cut, at most 512 tokens)"
    assert "100 %" not in " ".join(page.sure)


def test_a_resource_that_takes_little_stands_in_the_numbers_alone(plan: Plan) -> None:
    whole = sum(s for f in plan.prediction.phases for s in f.by_resource_s.values())
    first, *rest = plan.prediction.phases
    little = replace(first, by_resource_s={**first.by_resource_s, "storage": whole / 1000})
    figure = resources(replace(plan, prediction=replace(plan.prediction, phases=(little, *rest))))
    assert "Disks" not in [trace["name"] for trace in (figure.plot or {})["data"]]
    assert "disks (s)" in written(figure.table).titles
    assert "less than 1 % is in the numbers" in figure.how


@pytest.mark.parametrize(
    ("share", "text"), [(0.12, "+12 %"), (-0.004, "0 %"), (0.0, "0 %"), (-0.034, "-3 %"), (12.0, "+1,200 %")]
)
def test_a_share_without_a_digit_has_no_sign(share: float, text: str) -> None:
    assert signed(share) == text


def test_the_teacher_of_a_student_is_called_so() -> None:
    work = Workload(algorithm="distillation", model="qwen3-1.7b", reference="qwen3-4b")
    models = [
        SimpleNamespace(role=role, name=name, path=name)
        for role, name in (("actor", "qwen3-1.7b"), ("reference", "qwen3-4b"))
    ]
    shown: Any = SimpleNamespace(workload=work, models=models)
    assert trained(shown) == "Distillation of qwen3-1.7b with teacher qwen3-4b"
    models[1].name, shown.workload = "qwen3-4b, qwen3-8b", replace(work, reference="qwen3-4b,qwen3-8b")
    assert trained(shown) == "Distillation of qwen3-1.7b with teachers qwen3-4b, qwen3-8b"
