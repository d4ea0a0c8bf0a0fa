"""Every plan that `design` chooses, and every runner-up, passes the dry run on the cluster it was made for, or is
exported for the framework that the answer names."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from drawn_questions import SEARCH_S, question

from executor import dry_run
from executor.settings import Settings
from rlhfsim.api import cluster_of, design
from rlhfsim.cli.export import vendors_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.export import export
from rlhfsim.plan import Plan
from rlhfsim.search.request import SWITCHES, Request, switched
from rlhfsim.specs.frameworks.runs import OWN, framework
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.memory_peaks import memory_peaks

FAST = range(16)
LONG = [range(16, 28), range(28, 44), *(range(start, start + 40) for start in range(44, 324, 40))]
"""More questions than the test command has time for."""


class Judge:
    """The libraries, asked once about all distinct configurations."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], Any] = {}
        self._asked: dict[tuple[str, str], Any] = {}

    def note(self, name: dry_run.Library, requests: Sequence[Any]) -> None:
        """Keep what would be asked; None as where nothing is installed."""
        self._asked |= {(name, json.dumps(r, sort_keys=True)): r for r in requests}

    def ask(self) -> dict[str, int]:
        """Ask; the number of distinct configurations by library."""
        counts: dict[str, int] = {}
        for name in ("deepspeed", "vllm"):
            keys = [key for key in self._asked if key[0] == name]
            answers = dry_run.ask(name, [self._asked[key] for key in keys])
            assert answers is not None, f"{name} is installed"
            self._answers |= dict(zip(keys, answers, strict=True))
            counts[name] = len(keys)
        return counts

    def answer(self, name: dry_run.Library, requests: Sequence[Any]) -> list[Any]:
        """What the library said."""
        return [self._answers[name, json.dumps(r, sort_keys=True)] for r in requests]


def plans(seeds: Iterable[int]) -> list[tuple[int, Plan]]:
    """Chosen plans and runners-up with the number of their question."""
    every = []
    for seed in seeds:
        answer = design(question(seed), explain=False)
        shown = [plan for plan in (answer.chosen, answer.best, *answer.runners_up) if plan is not None]
        every += [(seed, plan) for plan in {plan.input_hash: plan for plan in shown}.values()]
    return every


def refused(every: Sequence[tuple[int, Plan]]) -> list[str]:
    """Why plans do not pass, one line each."""
    judge, lines = Judge(), []

    def outcome(seed: int, plan: Plan, ask: Any) -> str | None:
        try:
            checked = dry_run.check(plan, Settings(), cluster_of(plan), ask)
            if ask == judge.answer:
                memory_peaks(plan.placement, plan.workload, cluster_of(plan))
            assert checked["refusals"] == "none"
        except RlhfsimError as error:
            layouts = {role: placed.layout.label for role, placed in plan.placement.roles.items()}
            return f"question {seed}, {plan.architecture} {layouts}: {error.code}: {error.message}"
        return None

    ours = [(seed, plan) for seed, plan in every if plan.framework in (None, OWN)]
    lines += [f"question {seed}: {why}" for seed, plan in every if (why := unexported(plan)) is not None]
    first = [(seed, plan, outcome(seed, plan, judge.note)) for seed, plan in ours]
    judge.ask()
    for seed, plan, error in first:
        error = error or outcome(seed, plan, judge.answer)
        lines += [error] if error else []
    return lines


def unexported(plan: Plan) -> str | None:
    """Why a plan of another framework is no export of it that the dry run names; None: it is, or it is ours."""
    name = plan.framework
    if name in (None, OWN):
        return None
    try:
        export(plan, name, vendors_of(plan))
        dry_run.check(plan, Settings(), cluster_of(plan), lambda *_: None)
    except RlhfsimError as error:
        named = f"rlhfsim export --to {name}" in (error.help or "")
        return None if named else f"{error.code}: {error.message}; {error.help}"
    return f"our executor takes a plan of {name}"


def test_plans_of_drawn_questions_launch() -> None:
    every = plans(FAST)
    assert len(every) > len(FAST)  # a busy machine finds fewer runners-up in the time of a search
    assert refused(every) == []


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("backend", framework(OWN).trainers)
def test_what_design_allows_launches_with_every_training_backend(backend: Backend) -> None:
    """Each switch, and drawn pairs of them: a plan that launches, or none where the table says so."""
    draw, names = random.Random(len(backend)), sorted(SWITCHES.keys() - {"lend"})
    for switches in [*((name,) for name in names), *(draw.sample(names, 2) for _ in range(4))]:
        work = switched(Workload(model="qwen2.5-1.5b", algorithm="grpo", samples=4), frozenset(switches))
        request = Request(
            cluster=parse_cluster(8, "h100"),
            workload=work,
            backend=backend,
            allow=frozenset(switches) & {"async"},
            time_limit=SEARCH_S,
        )
        chosen = design(request, explain=False, rivals=False).chosen
        engine = RolloutLayout(precision=work.rollout_precision, kv_precision=work.kv_precision)
        lacks = framework(OWN).lacks_workload(work, backend) or framework(OWN).lacks_rollout(
            engine, one_node=True
        )
        assert (chosen is None) == (lacks is not None), switches
        if chosen is not None:
            checked = dry_run.check(chosen, Settings(), cluster_of(chosen), lambda *_: None)
            assert checked["refusals"] == "none"


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.long
@pytest.mark.parametrize("seeds", LONG, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_plans_of_many_drawn_questions_launch(seeds: range) -> None:
    assert refused(plans(seeds)) == []
