"""GSPO is written in the keys of every framework that runs it, and read from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhfsim.api import cluster_of
from rlhfsim.interchange.configuration.keys import key_table
from rlhfsim.interchange.export import export
from rlhfsim.interchange.table import bare
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.runs import runs_of
from rlhfsim.specs.workload.workload import CLIP_RANGES
from rlhfsim.what_if.estimate import planned, priced_placement
from tests.frameworks.test_dapo import plain
from tests.frameworks.test_round_trip import differences, read_back
from tests.what_if.test_doctor_of_exports import plans

RATIO = {
    "areal": ("actor.importance_sampling_level", "sequence"),
    "nemo-rl": ("loss_fn.sequence_level_importance_ratios", "true"),
    "openrlhf": ("--actor.policy_loss_type", "gspo"),
    "slime": ("--advantage-estimator", "gspo"),
    "trl": ("importance_sampling_level", "sequence"),
    "verl": ("actor_rollout_ref.actor.policy_loss.loss_mode", "gspo"),
}
"""The key that makes one ratio of a response."""


def gspo(name: str) -> Plan:
    """A plan of GRPO without a reference, trained by GSPO."""
    drawn = next(p for p in plans(name, 80) if plain(p.workload) and p.workload.old_logprobs == "recompute")
    priced = priced_placement(drawn.placement, replace(drawn.workload, algorithm="gspo"), cluster_of(drawn))
    return planned(priced, priced.iteration, None)


@pytest.mark.parametrize("name", sorted(RATIO))
def test_gspo_is_written_with_its_clip_range_and_read_back(name: str, tmp_path: Path) -> None:
    runs = runs_of(name)
    assert runs is not None
    assert "gspo" in (runs.algorithms or ())
    plan, (key, value) = gspo(name), RATIO[name]
    values = export(plan, name, frozenset()).written.values
    assert str(values[key]).lower() == value
    assert key_table(name).at(bare(key), len(key_table(name).releases) - 1) is not None
    written = " ".join(str(v) for k, v in values.items() if "clip" in k or "epsilon" in k).split()
    assert {f"{end:g}" for end in CLIP_RANGES["gspo"]} <= {f"{float(end):g}" for end in written}
    assert not list(differences(plan, *read_back(plan, name, tmp_path)))
