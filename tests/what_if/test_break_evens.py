"""Break-evens: on the near side the chosen plan wins, on the far side the plan that is named."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from math import inf

import pytest

import rlhfsim
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.candidates import Candidate
from rlhfsim.search.request import Request
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if import break_evens as module
from rlhfsim.what_if.break_evens import CLEAR, BreakEven, Quantity, break_evens, label, scaled, spread
from rlhfsim.what_if.engine import Question
from rlhfsim.what_if.points import Line, with_memory

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


def test_some_change_break_evens_the_choice() -> None:
    assert found()


def test_at_a_break_even_no_plan_of_the_chosen_kind_is_as_fast() -> None:
    """Both designed anew: proven by searches of their own."""
    changes = {(c.text, c.far > 1): c for c in module._quantities(REQUEST)}
    own = ranked()[0].placement
    for break_even in found()[:1]:
        there = changes[break_even.change, break_even.factor > 1].changed(REQUEST, break_even.factor)
        best = Search(there, models_of(there.workload)).run().best
        kept = Search(replace(there, architecture=own.architecture), models_of(there.workload)).run()
        assert best is not None
        assert (label(best.placement), best.seconds) == (break_even.winner, pytest.approx(break_even.step_s))
        mine = [c.seconds for c in (kept.best, *kept.rivals) if c and label(c.placement) == label(own)]
        assert all(break_even.step_s * (1 + CLEAR) < seconds for seconds in mine)


def test_what_other_layouts_of_the_chosen_kind_answer_is_no_break_even() -> None:
    """With layouts kept the split plan of 70B overtakes from 256 GPUs on; designed anew it does not."""
    request = Request(cluster=rlhfsim.parse_cluster(64, "h100"), workload=Workload(model="70b"))
    search = Search(request, models_of(request.workload)).run()
    assert search.best is not None
    rivals = module._other_kinds((search.best, *search.rivals))
    questions = [Question(request=request, placement=c.placement) for c in rivals]
    [more] = [q for q in module._quantities(request) if q.text == "GPUs" and q.far > 1]
    assert module._crossing(more, Line(partial(more.seconds, questions))) == 4.0
    assert module._break_even(more, questions) is None


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
    crossing = module._crossing(change, Line(partial(change.seconds, rivals)))
    assert crossing == pytest.approx(3 * (1 + CLEAR), rel=8 ** (1 / 2**module.HALVINGS) - 1)
    fake[other.placement] = lambda f: inf
    assert module._crossing(change, Line(partial(change.seconds, rivals))) is None


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


def test_a_step_of_more_prompts_is_filled_by_larger_generation_batches() -> None:
    sampling = DynamicSampling(kept=0.5, gen_prompts=48, max_gen_batches=2)
    work = Workload(
        algorithm="grpo", prompts=32, samples=8, reward=Reward(rules=Rules()), dynamic_sampling=sampling
    )
    more = module._more_prompts(work, 8.0)
    assert (more.prompts, more.gen_prompts, more.gen_batches) == (256, 384, pytest.approx(2.0, abs=0.02))
