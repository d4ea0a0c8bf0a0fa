"""A small searched plan, a planted run, a small what-if, and their pages; a browser where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import planted_plans
import pytest
from report_pages import HOSTILE

from rlhfsim.calibration.comparison.side_by_side import SideBySide, read
from rlhfsim.plan import Plan
from rlhfsim.present.answers.compare import run_page
from rlhfsim.present.answers.tree import Page
from rlhfsim.present.answers.whatif import whatif_page
from rlhfsim.present.basis import basis
from rlhfsim.present.html.page import write
from rlhfsim.present.pages.plan import plan_page
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import load_profile, parse_cluster
from rlhfsim.specs.workload.lengths import Fixed, LogNormal, stats
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.units import HOUR
from rlhfsim.what_if.design import design
from rlhfsim.what_if.scenarios.answer import whatif
from rlhfsim.what_if.scenarios.designs import DesignResult, Designs, Runner
from rlhfsim.what_if.scenarios.result import WhatIf
from rlhfsim.what_if.sizing import Sizes, other_sizes

BASE: dict[str, Any] = {
    "cluster": {"node_groups": [{"gpu": "h100", "gpus": 4}]},
    "workload": {
        "algorithm": "grpo",
        "model": "0.5b",
        "prompts": 64,
        "samples": 2,
        "response_len": {"kind": "fixed", "value": 256},
        "reward": {"rules": {"seconds_per_sample": "5 ms"}},
    },
    "run": {"steps": 100},
}

LONG_TAIL = LogNormal(mean=2000, max=8192)


@pytest.fixture(scope="session")
def plan() -> Plan:
    """Searched, with rivals."""
    work = Workload(algorithm="grpo", model="0.5b", prompts=64, samples=2, response_len=Fixed(value=256))
    told = design(Request(cluster=parse_cluster(4), workload=work)).told
    assert told is not None
    return told


@pytest.fixture(scope="session")
def overlapping(plan: Plan) -> Plan:
    """Asynchronous, with old log-probs of the rollout: two pools of a node each."""
    work = Workload(algorithm="grpo", model="8b", prompts=64, samples=4, response_len=LONG_TAIL)
    allowed = frozenset({"async", "rollout-logprobs"})
    request = Request(
        cluster=parse_cluster(16),
        workload=work,
        backend="megatron",
        architecture="async",
        allow=allowed,
        max_staleness=2,
    )
    told = design(request).told
    assert told is not None
    return told


@pytest.fixture(scope="session")
def sizes(plan: Plan) -> Sizes:
    """Half and twice the GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhfsim.what_if.sizing.FACTORS", (0.5, 2.0))
        return other_sizes(plan, basis(plan).cluster)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> SideBySide:
    """A run on hardware whose true coefficients differ from what was believed."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    made = planted_plans.plan(model="qwen2.5-0.5b", gpus=4)
    known = planted_plans.beliefs((made,), load_profile(planted_plans.GPU))
    return read(planted_plans.run_folder(folder, made, planted_plans.truth(known, np.random.default_rng(1))))


@pytest.fixture(scope="session")
def result(plan: Plan) -> WhatIf:
    """Two points, one of which does not fit, a tornado and a break-even, on planted step times."""
    return whatif(
        {
            "title": "Small",
            "question": "What changes?",
            "base": BASE,
            "assumptions": ["the batch stays the same"],
            "points": [
                {"name": "twice", "set": {"cluster.node_groups.0.gpus": 8}},
                {"name": "too large", "set": {"workload.model": "405b"}},
            ],
            "tornado": {
                "vary": {
                    "cluster.node_groups.0.price": ["0.5x", "2x"],
                    "workload.response_len.value": ["0.5x", "2x"],
                }
            },
            "break_even": [
                {
                    "question": "At which price do eight cost as much?",
                    "vary": "cluster.node_groups.0.price",
                    "between": ["0.5 USD/h", "12 USD/h"],
                    "of": "cost_of_run",
                    "point": "twice",
                    "against": "base",
                    "vary_in": "point",
                }
            ],
        },
        Designs(planted(plan)),
    )


def planted(plan: Plan) -> Runner:
    """A step takes a second and 40 GPU-seconds at 256 tokens; 405B does not fit."""

    def run(requests: Sequence[Request]) -> Iterator[tuple[int, DesignResult] | None]:
        for i, request in enumerate(requests):
            pool, work = request.cluster.node_group, request.workload
            if work.model == "405b":
                yield i, DesignResult(plan=None, shortage="too large")
                continue
            s = 1 + 40 / pool.gpus * stats(work.response_len).mean / 256
            usd = pool.profile.price.value * pool.gpus * s / HOUR if pool.profile.price else None
            told = replace(plan.prediction, step_s=s, low_s=0.9 * s, high_s=1.2 * s, usd_per_step=usd)
            hardware = (replace(plan.hardware[0], gpus=pool.gpus),)
            yield i, DesignResult(plan=replace(plan, prediction=told, workload=work, hardware=hardware))

    return run


@pytest.fixture(scope="session")
def hostile(plan: Plan) -> Page:
    """A plan whose every name tries to break out."""
    pools = tuple(replace(p, name=HOSTILE) for p in plan.placement.pools)
    assert len(pools) == 1
    roles = {name: replace(role, pool=HOSTILE) for name, role in plan.placement.roles.items()}
    told = plan.prediction
    prediction = replace(
        told,
        phases=tuple(replace(p, pool=HOSTILE, name=p.name + HOSTILE) for p in told.phases),
        ledger=tuple(replace(e, pool=HOSTILE, phase=e.phase + HOSTILE) for e in told.ledger),
    )
    models = tuple(replace(m, name=HOSTILE, path=HOSTILE) for m in plan.models)
    assert plan.choice is not None
    rivals = tuple(replace(r, label=HOSTILE, actor=HOSTILE) for r in plan.choice.runners_up)
    choice = replace(plan.choice, reasons=(HOSTILE,), runners_up=rivals)
    bad = replace(
        plan,
        models=models,
        placement=replace(plan.placement, pools=pools, **roles),
        prediction=prediction,
        choice=choice,
    )
    return plan_page(bad, file=HOSTILE, title=HOSTILE)


@pytest.fixture(scope="session")
def pages(
    plan: Plan, overlapping: Plan, sizes: Sizes, run: SideBySide, result: WhatIf, hostile: Page
) -> dict[str, Page]:
    return {
        "plan": plan_page(plan, sizes=sizes),
        "async": plan_page(overlapping),
        "run": run_page(run, commands="rlhfsim report a"),
        "whatif": whatif_page(result, file="whatif.json"),
        "hostile": hostile,
    }


@pytest.fixture(scope="session")
def files(pages: dict[str, Page], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, page in pages.items():
        write(folder / f"{name}.html", page)
    return {name: folder / f"{name}.html" for name in pages}
