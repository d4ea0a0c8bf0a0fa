"""One engine: a change is data, an answer is searched or priced again, and halving finds where something begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import rlhfsim
from rlhfsim.errors import RlhfsimError
from rlhfsim.search import candidates, clock
from rlhfsim.search.candidates import judged
from rlhfsim.search.request import Request
from rlhfsim.search.scope import Steps
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.engine import Prices, Question, answer, good, search_of
from rlhfsim.what_if.points import (
    Change,
    Line,
    asking,
    edge,
    first_of_each,
    geometric,
    on_gpus,
    on_larger,
    points,
    setting,
)

WORK = Workload(algorithm="grpo", model="qwen2.5-0.5b", prompts=64, samples=4, reward=Reward(rules=Rules()))
QUESTION = Question(request=Request(cluster=rlhfsim.parse_cluster(2, "h100"), workload=WORK))


def test_a_change_puts_values_and_functions_at_dotted_paths() -> None:
    change = setting(
        "half the network, twice the prompts",
        {
            "request.cluster.node_groups.*.profile.nic.value": lambda nic: nic / 2,
            "request.workload.prompts": 128,
        },
    )
    changed = change.apply(QUESTION).request
    before, after = (r.cluster.node_group.profile.nic.value for r in (QUESTION.request, changed))
    assert after == before / 2
    assert changed.workload.prompts == 128
    assert QUESTION.request.workload.prompts == 64


def test_the_first_of_each_family_is_taken() -> None:
    families = ([1, 4, 9], [2, 3], [], [16])
    even = ((-n for n in family if n % 2 == 0) for family in families)
    assert first_of_each(even) == (-4, -2, -16)


def test_points_are_asked_one_after_the_other_until_somebody_has_enough_or_time_is_up() -> None:
    asked: list[int] = []

    def ask(question: Question) -> int | None:
        asked.append(question.request.cluster.gpus)
        return asked[-1] if asked[-1] > 2 else None

    def axis() -> Iterator[Change]:
        return (setting(f"{gpus}", {"request.cluster.node_groups.*.gpus": gpus}) for gpus in (1, 4, 8))

    first = next(points(QUESTION, axis(), ask))
    assert (first.name, first.answer, first.question.request.cluster.gpus) == ("4", 4, 4)
    assert asked == [1, 4]
    assert [point.answer for point in points(QUESTION, axis(), ask)] == [4, 8]
    with clock.within(1e-9):
        assert not list(points(QUESTION, axis(), ask))


def test_a_change_that_cannot_be_put_is_skipped_only_where_that_is_said() -> None:
    axis = [asking(allow=frozenset({"nothing"})), asking("as it was")]
    some = points(QUESTION, axis, lambda _: True, skipped=(RlhfsimError,))
    assert [point.name for point in some] == ["as it was"]
    with pytest.raises(RlhfsimError):
        list(points(QUESTION, axis, lambda _: True))


def test_a_placement_is_priced_again_under_the_change() -> None:
    found = answer(QUESTION)
    assert found.best is not None
    fixed = setting("", {"placement": found.best.placement}).apply(QUESTION)
    same = good(fixed)
    assert same is not None
    assert same.seconds == pytest.approx(found.best.seconds)
    shorter = setting("", {"request.workload.response_len.value": 512})
    fast = good(shorter.apply(fixed))
    by_hand = judged(shorter.apply(fixed).request, fixed.models, found.best.placement)
    assert fast is not None
    assert by_hand is not None
    assert fast.seconds == by_hand.seconds < same.seconds


def test_roles_that_a_change_leaves_alone_keep_their_prices() -> None:
    found = answer(QUESTION)
    prices = Prices(request=QUESTION.request, pricer=found.pricer)
    fp8 = setting("", {"request.workload.rollout_precision": "fp8"}).apply(QUESTION)
    kept = prices.kept(fp8.request)
    assert kept is not None
    assert kept.tables("actor") == found.pricer.tables("actor") != []
    assert kept.tables("rollout") == []
    assert prices.kept(setting("", {"request.backend": "fsdp2"}).apply(QUESTION).request) is None


def test_many_questions_about_one_narrower_request_share_its_tables() -> None:
    found = answer(QUESTION)
    narrower = replace(QUESTION.request, max_oom=QUESTION.request.max_oom / 2)
    prices = Prices(request=QUESTION.request, pricer=found.pricer).again(narrower)
    one, other = prices.kept(narrower), prices.kept(narrower)
    assert one is not None
    assert other is not None
    assert one.tables("actor") != []
    assert all(a is b for a, b in zip(one.tables("actor"), other.tables("actor"), strict=True))
    assert prices.again(replace(narrower, backend="fsdp2")) is prices  # nothing of it is priced yet


def test_more_gpus_are_whole_nodes_and_fewer_keep_theirs() -> None:
    request = replace(QUESTION.request, cluster=rlhfsim.parse_cluster(4, "h100"))
    sized = [change.apply(QUESTION).request.cluster.node_group for change in on_gpus(request, (2, 4, 16))]
    assert [(group.gpus, group.gpus_per_node) for group in sized] == [(2, 2), (4, 4), (16, 8)]
    assert [change.name for change in on_gpus(request, (2, 16))] == ["--gpus 2", "--gpus 16"]


def test_larger_kinds_are_of_the_same_vendor_and_not_the_one_that_is_there() -> None:
    request = replace(QUESTION.request, cluster=rlhfsim.parse_cluster(8, "h200"))
    kinds = {c.name: c.apply(QUESTION).request.cluster.node_group for c in on_larger(request)}
    assert list(kinds) == ["--gpu b200", "--gpu b300"]
    assert {group.gpus for group in kinds.values()} == {8}
    least = kinds["--gpu b200"].profile.memory.value
    assert [change.name for change in on_larger(request, least)] == ["--gpu b300"]


def test_a_value_of_a_line_is_asked_once() -> None:
    asked: list[float] = []
    line = Line(lambda x: asked.append(x) or -x)  # type: ignore[func-returns-value]
    assert [line.at(x) for x in (2.0, 1.0, 2.0)] == [-2.0, -1.0, -2.0]
    assert asked == [2.0, 1.0]
    assert line.ordered == (-1.0, -2.0)


def test_halving_finds_the_edge_on_either_side_and_in_equal_factors() -> None:
    assert edge(0.0, 8.0, lambda x: x >= 3) == pytest.approx(3)
    assert edge(0.0, -8.0, lambda x: x <= -3) == pytest.approx(-3)
    assert edge(1.0, 16.0, lambda x: x >= 3, geometric, halvings=2) == 4
    assert edge(0.0, 8.0, lambda x: x >= 3, lambda low, high: high) == 8


def test_a_plan_is_simulated_again_only_where_a_higher_cutoff_asks_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = replace(QUESTION.request, allow=frozenset({"async"}), architecture="async")
    best = answer(Question(request=request)).best
    assert best is not None
    steps: Steps = {}
    cutoffs: list[float | None] = []
    simulate = candidates.simulate

    def counted(*setting: Any, **given: Any) -> Any:
        cutoffs.append(given.get("cutoff"))
        return simulate(*setting, **given)

    monkeypatch.setattr(candidates, "simulate", counted)
    low, lower = best.seconds / 2, best.seconds / 3
    for cutoff in (low, lower, low, None, best.seconds, low):
        plan = judged(request, QUESTION.models, best.placement, cutoff=cutoff, steps=steps)
        assert plan is not None
        assert plan.seconds > low if cutoff == low else plan.seconds > lower
    assert cutoffs == [low, None]
    assert plan.seconds == best.seconds


def test_what_is_asked_about_a_question_knows_the_steps_that_it_simulated() -> None:
    result = answer(QUESTION)
    prices = Prices(
        request=QUESTION.request, pricer=result.pricer, steps={QUESTION.request.workload: result.search.steps}
    )
    assert result.search.steps
    assert search_of(QUESTION, prices).steps is result.search.steps
    larger = setting("", {"request.cluster.node_groups.*.gpus": 4}).apply(QUESTION)
    assert search_of(larger, prices).steps is not result.search.steps
