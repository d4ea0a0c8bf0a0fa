"""What a sleeping engine keeps, said where training leaves less."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from rlhfsim.memory.components import ENGINE, EngineState, MemoryEntry, engine_components, entry
from rlhfsim.memory.findings import RETAINED, logits_findings, sleep_findings
from rlhfsim.memory.kv_cache import engine_bytes
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.units import GIB


@dataclass(frozen=True)
class Phase:
    name: str = "actor.train"
    pool: str = "all"
    capacity: float = 80 * GIB
    entries: tuple[MemoryEntry, ...] = ()

    @property
    def bytes(self) -> float:
        return sum(entry.bytes for entry in self.entries)


@dataclass(frozen=True)
class Ledger:
    phases: tuple[Phase, ...] = field(default=())


def ledger(training: float) -> Ledger:
    sizes = (("actor", "activations", training), ("rollout", "framework", 2 * GIB))
    entries = tuple(MemoryEntry(role=r, component=c, bytes=b, low=b, high=b) for r, c, b in sizes)
    return Ledger(phases=(Phase(entries=entries),))


def placement(tp: int, sleep: int) -> Placement:
    return Placement(
        pools=(ResourcePool(name="all", start=0, gpus=8),),
        actor=RolePlacement(pool="all", layout=Layout(dp=8, zero=3)),
        rollout=RolloutPlacement(pool="all", layout=RolloutLayout(tp=tp, dp=8 // tp), sleep=sleep),
        weight_path="ipc",
        backend="fsdp2",
    )


@pytest.mark.parametrize(
    ("training", "tp", "sleep", "found"),
    [(75 * GIB, 2, 2, True), (60 * GIB, 2, 2, False), (75 * GIB, 1, 2, False), (75 * GIB, 2, 0, False)],
)
def test_a_sleeping_engine_is_named_where_training_leaves_less_than_others_saw(
    training: float, tp: int, sleep: int, found: bool
) -> None:
    told = list(sleep_findings(ledger(training), placement(tp, sleep)))
    assert bool(told) == found
    assert RETAINED[0] < RETAINED[1]


def test_what_a_sleeping_engine_keeps_is_in_the_ledger_of_training_alone() -> None:
    profile = load_profile("h100")
    model = resolve_model("qwen2.5-7b")
    kept = profile["sleeping_engine_bytes"]

    def retained(tp: int, sleep: int, state: EngineState) -> float:
        rollout = placement(tp, sleep).rollout
        assert rollout is not None
        rows = np.array([engine_bytes(model, rollout, profile=profile)], dtype=ENGINE)
        return float(engine_components(rows, state)["retained"][0])

    assert [retained(2, 2, state) for state in ("idle", "ready", "running")] == [kept, kept, 0]
    assert retained(1, 2, "idle") == retained(2, 0, "idle") == 0
    item = entry(profile, "rollout", "retained", kept)
    assert (item.low / GIB, item.high / GIB) == pytest.approx((0.1, 1.0))


@pytest.mark.parametrize(
    ("phase", "tokens"), [("actor.train", 4 * 2048 / 2), ("actor.logprob", 8 * 2048 / 2)]
)
def test_large_logits_are_said_with_the_tokens_of_their_call(phase: str, tokens: float) -> None:
    layout = Layout(dp=4, cp=2, zero=3, micro_batch=4, score_micro_batch=8)
    placed = replace(placement(2, 2), actor=RolePlacement(pool="all", layout=layout))
    logits = MemoryEntry(role="actor", component="logits", bytes=40 * GIB, low=40 * GIB, high=40 * GIB)
    work = Workload(model="qwen2.5-7b", algorithm="grpo")
    [found] = logits_findings(Ledger(phases=(Phase(name=phase, entries=(logits,)),)), placed, work)
    assert f" {tokens:,.0f} tokens " in found.what
