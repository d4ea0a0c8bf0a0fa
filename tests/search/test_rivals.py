"""The best plan of every other kind against brute force: every plan of small random spaces is written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.search import clock
from rlhfsim.search.branch_and_bound import Search
from rlhfsim.search.candidates import Candidate, value
from rlhfsim.search.explain import kind
from rlhfsim.search.request import STALE, Request
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.design import design
from rlhfsim.what_if.engine import Question, answers, variants
from rlhfsim.what_if.rivals import ARCHITECTURES, ROLE_PLACEMENTS, TOLERANCE, PlanKind, Rivals
from rlhfsim.what_if.why_not import alternative

SEEDS = (40, 41, 54)
"""Random questions without a wish for an architecture, in which several kinds fit."""
LEAST, MOST = 150, 500
"""Plans of a question: room for several kinds."""
Plans = list[tuple[Workload, Candidate]]


def question(questions: Any, seed: int) -> Request | None:
    """A random question in which the log-probs of the rollout may compete; None where a seed has none."""
    case = questions.drawn(seed, stale=None if seed % 3 else "async", least=LEAST, most=MOST)
    if case is None or case.request.architecture or not case.request.workload.generates:
        return None
    return replace(case.request, allow=case.request.allow | {"rollout-logprobs"})


def written_out(questions: Any, request: Request) -> Plans:
    """Every plan that runs, of every workload that the switches make."""
    plans: Plans = []
    for workload in variants(request):
        case = questions.case(replace(request, workload=workload), models_of(workload))
        outcomes = (questions.outcome(case, placement) for _, placement in case.written_out())
        plans += [(workload, c) for c in outcomes if c is not None]
    return plans


def kinds(request: Request, workload: Workload, best: Candidate) -> list[PlanKind]:
    """What a table beside the best plan may show."""
    p = best.placement
    apart = [PlanKind(architecture=p.architecture, role_placement=name) for name in ROLE_PLACEMENTS]
    return [
        *(PlanKind(architecture=name) for name in ARCHITECTURES if name != p.architecture),
        *(part for part in apart if part.role_placement != p.role_placement),
        *(PlanKind(workload=other) for other in variants(request) if other != workload),
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rival_is_the_best_of_its_kind_to_one_per_cent(questions: Any, seed: int) -> None:
    request = question(questions, seed)
    assert request is not None
    plans = written_out(questions, request)
    searches = list(answers(Question(request=request)))
    met = [(w, r.best) for w, r in searches if r.best is not None]
    workload, best = min(met, key=lambda plan: value(request, plan[1]))
    rivals = Rivals(request=request, searches=searches)
    shown = list(rivals.all(workload, best))
    for part in kinds(request, workload, best):
        of_kind = [value(request, c) for w, c in plans if part.has(w, c)]
        mine = [r for r in shown if part.has(r.workload, r.candidate)]
        assert bool(of_kind) == bool(mine), part
        if of_kind:
            reached, gap = min((value(request, r.candidate), r.gap or 0.0) for r in mine)
            assert gap <= TOLERANCE, part
            assert min(of_kind) * (1 - 1e-9) <= reached <= min(of_kind) / (1 - gap) * (1 + 1e-9), part
    assert shown


def test_why_not_an_architecture_is_the_design_of_that_architecture(questions: Any) -> None:
    """The log-probs of the rollout compete in both, and the table says the same;
    no two of its rows are called alike."""
    request = question(questions, 23)
    assert request is not None
    names = [name for name in ARCHITECTURES if name not in STALE]
    answer = design(request, instead=[alternative(request, name, name) for name in names])
    assert answer.best is not None
    assert any(other.plan.workload.old_logprobs == "rollout" for other in answer.whynots if other.plan)
    for name, other in zip(names, answer.whynots, strict=True):
        alone = design(replace(request, architecture=name), explain=False, rivals=False).best
        assert (alone is None) == (other.plan is None)
        if alone is not None and other.plan is not None:
            step = alone.prediction.step_s
            assert other.plan.prediction.step_s == pytest.approx(step, rel=1e-9)
            rows = [p.prediction.step_s for p in (answer.best, *answer.runners_up) if p.architecture == name]
            assert min(rows) == pytest.approx(step, rel=1e-9)
    labels = [kind(p, request.workload) for p in (answer.best, *answer.runners_up)]
    assert len(set(labels)) == len(labels)
    assert any("rollout-logprobs" in label for label in labels)


def test_where_time_is_up_rivals_are_those_that_were_met_and_nothing_is_searched(
    questions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = question(questions, SEEDS[0])
    assert request is not None
    searches = list(answers(Question(request=request)))
    met = {id(c) for _, result in searches for c in (result.best, *result.rivals) if c is not None}
    workload, best = next((w, r.best) for w, r in searches if r.best is not None)
    monkeypatch.setattr(Search, "part", lambda *given, **also: pytest.fail("it was searched"))
    with clock.within(1e-9):
        shown = list(Rivals(request=request, searches=searches).all(workload, best))
    assert shown
    assert all(r.gap in (None, 0.0) and id(r.candidate) in met for r in shown)
