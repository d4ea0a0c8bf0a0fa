"""Break-evens: on the near side the chosen plan wins, on the far side the plan that is named."""

from __future__ import annotations

from functools import cache
from math import inf

import pytest

import rlhfsim
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if import break_evens as module
from rlhfsim.what_if.break_evens import (
    CLEAR,
    BreakEven,
    Quantity,
    break_evens,
    label,
    scaled,
    spread,
    with_memory,
)
from rlhfsim.what_if.engine import Question

REQUEST = Request(
    cluster=rlhfsim.parse_cluster(16, "h100"), workload=Workload(model="qwen2.5-0.5b", prompts=512)
)
MODELS = models_of(REQUEST.workload)


@cache
def ranked() -> tuple[Candidate, ...]:
    found = Search(REQUEST, MODELS).run()
    assert found.best is not None
    return (found.best, *found.rivals)


@cache
def found() -> tuple[BreakEven, ...]:
    return tuple(break_evens(REQUEST, ranked()))


def times(change: Quantity, factor: float) -> dict[str, float]:
    """Step of every kind under a change."""
    return {
        label(c.placement): change.seconds([Question(request=REQUEST, placement=c.placement)], factor)[0]
        for c in module._other_kinds(ranked())
    }


def test_some_change_break_evens_the_choice() -> None:
    assert found()


def test_a_break_even_lies_between_a_point_where_the_choice_holds_and_one_where_it_does_not() -> None:
    changes = {(c.text, c.far > 1): c for c in module._quantities(REQUEST)}
    own = label(ranked()[0].placement)
    for break_even in found():
        change = changes[break_even.change, break_even.factor > 1]
        at = times(change, break_even.factor)
        assert at[break_even.winner] == pytest.approx(break_even.step_s) == pytest.approx(min(at.values()))
        assert at[break_even.winner] * (1 + CLEAR) < at[own]
        if not change.steps:
            width = change.far ** (1 / 2**module.HALVINGS)
            before = times(change, break_even.factor / width)
            assert not min(before.values()) * (1 + CLEAR) < before[own]


def test_the_break_even_is_told_in_the_unit_of_the_quantity() -> None:
    for break_even in found():
        assert break_even.now is not None
        assert break_even.value == pytest.approx(break_even.now * break_even.factor)


def test_a_known_crossing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    best, other = module._other_kinds(ranked())[:2]
    fake = {best.placement: lambda f: 10.0 * f, other.placement: lambda f: 30.0}
    change = Quantity(text="x", far=8.0, path="workload", times=lambda workload, factor: workload, now=2.0)
    monkeypatch.setattr(Quantity, "seconds", lambda self, qs, f: [fake[q.placement](f) for q in qs])
    rivals = [Question(request=REQUEST, placement=c.placement) for c in (best, other)]
    break_even = module._break_even(change, rivals)
    assert break_even is not None
    assert break_even.factor == pytest.approx(3 * (1 + CLEAR), rel=8 ** (1 / 2**module.HALVINGS) - 1)
    assert break_even.winner == label(other.placement)
    fake[other.placement] = lambda f: inf
    assert module._break_even(change, rivals) is None


def test_more_gpus_are_more_ranks_of_the_same_cut() -> None:
    placement = ranked()[0].placement
    wide = spread(placement, 2)
    assert wide is not None
    assert sum(p.gpus for p in wide.pools) == 32
    assert all(wide.roles[n].layout.tp == s.layout.tp for n, s in placement.roles.items())
    assert all(wide.roles[n].layout.dp == 2 * s.layout.dp for n, s in placement.roles.items())
    assert spread(placement, 1 / 64) is None


def test_memory_grows_and_shrinks() -> None:
    cluster = REQUEST.cluster
    assert (
        with_memory(cluster, 2).node_group.profile.usable_memory.value
        == 2 * cluster.node_group.profile.usable_memory.value
    )
    hosts = with_memory(cluster, 0.5, hosts=True).node_group.profile.node.host_memory.value
    assert hosts == cluster.node_group.profile.node.host_memory.value / 2


def test_scaling_lengths_scales_their_mean() -> None:
    assert scaled(Fixed(value=100), 4) == Fixed(value=400)
    stretched = scaled(LogNormal(mean=100, sigma=0.5, max=1000), 0.5)
    assert isinstance(stretched, LogNormal)
    assert (stretched.mean, stretched.max) == (50, 500)
