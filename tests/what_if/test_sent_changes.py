"""When it is worth a try to send only what changed of the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhfsim.api import estimate_file
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.what_if.unasked import WORTH, sent_changes

RECIPE = Path(__file__).parents[2] / "scenarios/recipes/areal-gsm8k-grpo.yaml"


def planned(folder: Path, path: str) -> Plan:
    text = RECIPE.read_text().replace("weight_path: broadcast", f"weight_path: {path}")
    file = folder / "asked.yaml"
    file.write_text(text.replace("prompts: 256", "prompts: 16"))
    return estimate_file(file)


def question(plan: Plan, framework: str = "rlhfsim") -> Request:
    backend = "megatron" if framework == "slime" else plan.placement.backend
    return Request(
        cluster=Cluster(node_groups=(node_group("h100", 8),), framework=framework),
        workload=plan.workload,
        backend=backend,
    )


def test_a_sync_that_fills_a_small_step_is_compared_with_one_of_changes(tmp_path: Path) -> None:
    plan = planned(tmp_path, "host")
    found = sent_changes(plan, question(plan))
    assert found is not None
    assert found.path == "delta"
    assert found.seconds < found.planned_s
    assert found.saved == pytest.approx((found.planned_s - found.seconds) / plan.prediction.step_s)
    assert found.saved >= WORTH
    slime = sent_changes(plan, question(plan, "slime"))
    assert slime is None or slime.path == "delta-disk", "what the framework runs"


def test_nothing_is_said_where_it_would_save_little_or_cannot_be(tmp_path: Path) -> None:
    fast = planned(tmp_path, "broadcast")
    assert sent_changes(fast, question(fast)) is None
    small = planned(tmp_path, "host")
    already = replace(small, placement=replace(small.placement, weight_path="delta-disk"))
    assert sent_changes(already, question(small)) is None
    lora = replace(small, workload=replace(small.workload, lora=Lora(rank=8)))
    assert sent_changes(lora, question(small)) is None
