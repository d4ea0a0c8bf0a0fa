"""Every plan that `design` chooses, and every runner-up, passes the dry run on the cluster it was made for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from drawn_questions import question

from executor import dry_run
from executor.settings import Settings
from rlhfsim.api import cluster_of, design
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.what_if.memory_peaks import memory_peaks

FAST, SLOW = range(16), range(16, 44)
LONG = [range(start, start + 40) for start in range(44, 324, 40)]
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
            assert checked.lines["refusals"] == "none"
        except RlhfsimError as error:
            layouts = {role: placed.layout.label for role, placed in plan.placement.roles.items()}
            return f"question {seed}, {plan.architecture} {layouts}: {error.code}: {error.message}"
        return None

    first = [(seed, plan, outcome(seed, plan, judge.note)) for seed, plan in every]
    judge.ask()
    for seed, plan, error in first:
        error = error or outcome(seed, plan, judge.answer)
        lines += [error] if error else []
    return lines


def test_plans_of_drawn_questions_launch() -> None:
    every = plans(FAST)
    assert len(every) > 2 * len(FAST)
    assert refused(every) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [SLOW, *(pytest.param(seeds, marks=pytest.mark.long) for seeds in LONG)],
    ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}",
)
def test_plans_of_many_drawn_questions_launch(seeds: range) -> None:
    assert refused(plans(seeds)) == []
