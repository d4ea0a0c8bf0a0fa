"""Keys of router replay and of drafts that are trained: written, and read back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.export import export
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.speculation import Speculation
from tests.frameworks.test_accepted import plan, workload
from tests.frameworks.test_round_trip import read_back

KEYS = {
    "slime": ("--use-rollout-routing-replay",),
    "verl": ("enable_rollout_routing_replay=True", "megatron.router_replay.mode=R3"),
    "nemo-rl": ("router_replay", "enabled"),
    "skyrl": ("moe_enable_routing_replay=true", "enable_return_routed_experts=true"),
}
DRAFTS = {
    "slime": ("mtp", ("--enable-mtp-training", "--mtp-num-layers")),
    "verl": ("mtp", ("model.mtp.enable_train=True",)),
    "nemo-rl": ("eagle", ("policy.draft.enabled=true",)),
    "skyrl": ("mtp", ("trainer.mtp.enabled=true",)),
}


def small(name: str, **changes: object) -> Plan:
    """A plan on 8 GPUs that the framework runs."""
    work = workload("grpo", model="qwen3-30b-a3b", **changes)
    return plan(
        work, "megatron", {"tp": 2, "dp": 4, "ep": 4, "zero": 1, "micro_batch": 1}, {"tp": 2, "dp": 4}
    )


@pytest.mark.parametrize("name", KEYS)
def test_router_replay_is_written_and_read(name: str, tmp_path: Path) -> None:
    replayed, plain = small(name, router_replay=True), small(name)
    text = "".join(export(replayed, name, frozenset()).files.values())
    assert all(key in text for key in KEYS[name])
    work, _ = read_back(replayed, name, tmp_path)
    assert work.router_replay
    assert not read_back(plain, name, tmp_path)[0].router_replay


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_that_is_trained_is_written_and_read(name: str, tmp_path: Path) -> None:
    method, keys = DRAFTS[name]
    trained = Speculation(
        method=method, draft_tokens=2, acceptance=0.6, low=0.5, high=0.7, drift=-0.001, trained=True
    )
    drawn = small(name, speculation=trained)
    role = drawn.placement.rollout
    assert role is not None
    drafting = replace(role, layout=replace(role.layout, speculation=trained))
    drawn = replace(drawn, placement=replace(drawn.placement, rollout=drafting))
    text = "".join(export(drawn, name, frozenset()).files.values())
    assert all(key in text for key in keys), text
    if name in ("verl", "nemo-rl"):
        _, placed = read_back(drawn, name, tmp_path)
        assert placed.rollout is not None
        assert placed.rollout.layout.speculation == trained


def test_a_framework_is_not_asked_to_train_what_it_does_not() -> None:
    eagle = Speculation(method="eagle", draft_tokens=2, acceptance=0.6, trained=True)
    with pytest.raises(RlhfsimError, match="EAGLE-3"):
        export(small("verl", speculation=eagle), "verl", frozenset())
