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
from rlhfsim.what_if import flips as module
from rlhfsim.what_if.flips import CLEAR, Change, Flip, flips, label, scaled, spread, with_memory

REQUEST = Request(cluster=rlhfsim.parse_cluster(16, "h100"), workload=Workload(model="qwen2.5-0.5b", prompts=256))  # fmt: skip
MODELS = models_of(REQUEST.workload)


@cache
def ranked() -> tuple[Candidate, ...]:
    found = Search(REQUEST, MODELS).run()
    assert found.best is not None
    return (found.best, *found.rivals)


@cache
def found() -> tuple[Flip, ...]:
    return tuple(flips(REQUEST, MODELS, ranked()))


def times(change: Change, factor: float) -> dict[str, float]:
    """Step of every kind under a change."""
    there = change.apply(REQUEST, factor)
    return {
        label(c.placement): module._after(change, there, MODELS, c.placement, factor)
        for c in module._other_kinds(ranked())
    }


def test_some_change_flips_the_choice() -> None:
    assert found()


def test_a_flip_lies_between_a_point_where_the_choice_holds_and_one_where_it_does_not() -> None:
    changes = {(c.text, c.far > 1): c for c in module._changes(REQUEST)}
    own = label(ranked()[0].placement)
    for flip in found():
        change = changes[flip.change, flip.factor > 1]
        at = times(change, flip.factor)
        assert at[flip.winner] == pytest.approx(flip.seconds) == pytest.approx(min(at.values()))
        assert at[flip.winner] * (1 + CLEAR) < at[own]
        if not change.steps:
            width = change.far ** (1 / 2**module.HALVINGS)
            before = times(change, flip.factor / width)
            assert not min(before.values()) * (1 + CLEAR) < before[own]


def test_the_break_even_is_told_in_the_unit_of_the_quantity() -> None:
    for flip in found():
        assert flip.now is not None
        assert flip.value == pytest.approx(flip.now * flip.factor)


def test_a_known_crossing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    best, other = module._other_kinds(ranked())[:2]
    fake = {best.placement: lambda f: 10.0 * f, other.placement: lambda f: 30.0}
    change = Change(text="x", far=8.0, apply=lambda request, factor: request, now=2.0)
    monkeypatch.setattr(module, "_after", lambda c, r, m, p, f: fake[p](f))
    flip = module._flip(change, REQUEST, MODELS, [best, other])
    assert flip is not None
    assert flip.factor == pytest.approx(3 * (1 + CLEAR), rel=8 ** (1 / 2**module.HALVINGS) - 1)
    assert flip.winner == label(other.placement)
    fake[other.placement] = lambda f: inf
    assert module._flip(change, REQUEST, MODELS, [best, other]) is None


def test_more_gpus_are_more_ranks_of_the_same_cut() -> None:
    placement = ranked()[0].placement
    wide = spread(placement, 2)
    assert wide is not None
    assert sum(p.gpus for p in wide.pools) == 32
    assert all(wide.seats[n].layout.tp == s.layout.tp for n, s in placement.seats.items())
    assert all(wide.seats[n].layout.dp == 2 * s.layout.dp for n, s in placement.seats.items())
    assert spread(placement, 1 / 64) is None


def test_memory_grows_and_shrinks() -> None:
    cluster = REQUEST.cluster
    assert with_memory(cluster, 2).pool.profile.usable_memory.value == 2 * cluster.pool.profile.usable_memory.value  # fmt: skip
    hosts = with_memory(cluster, 0.5, hosts=True).pool.profile.node.host_memory.value
    assert hosts == cluster.pool.profile.node.host_memory.value / 2


def test_scaling_lengths_scales_their_mean() -> None:
    assert scaled(Fixed(value=100), 4) == Fixed(value=400)
    stretched = scaled(LogNormal(mean=100, sigma=0.5, max=1000), 0.5)
    assert isinstance(stretched, LogNormal)
    assert (stretched.mean, stretched.max) == (50, 500)
