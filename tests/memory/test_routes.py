"""Router replay: bytes of the experts that a rollout chose, on hosts, on GPUs and on their way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.links import pageable_rate
from rlhfsim.memory.role_bytes import role_memory
from rlhfsim.memory.routes import COPIES, step_bytes, teacher_bytes, token_bytes
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.layout_columns import columns_of
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.estimate import estimate

WORK = Workload(
    algorithm="grpo",
    model="qwen3-30b-a3b",
    prompts=96,
    samples=16,
    kl=False,
    reward=Reward(model=None, rules=Rules()),
    prompt_len=Fixed(value=512),
    response_len=Fixed(value=32_000),
    router_replay=True,
)
LAYOUT = Layout(tp=4, cp=2, dp=1, ep=8, zero=1, micro_batch=1)


def planned(work: Workload, name: str = "slime") -> Plan:
    group = node_group("h100", 16)
    placement = Placement(
        pools=(ResourcePool(name="t", start=0, gpus=8), ResourcePool(name="r", start=8, gpus=8)),
        rollout=RolloutPlacement(pool="r", layout=RolloutLayout(tp=4, dp=2), sleep=0),
        actor=RolePlacement(pool="t", layout=LAYOUT),
        weight_path="broadcast",
        backend="megatron",
    )
    return estimate(placement, work, Cluster(node_groups=(group,), framework=name))


def test_the_batch_of_slime_2384_by_hand() -> None:
    """47 layers, 4 experts of a token, 96 x 16 responses of 32k tokens: 38 GB, at each of 8 ranks."""
    given = resolve_model("qwen3-30b-a3b")
    assert given.moe is not None
    flash = replace(given, num_layers=47, moe=replace(given.moe, top_k=4, num_moe_layers=47))
    work = replace(WORK, prompt_len=Fixed(value=1), response_len=Fixed(value=32_767))
    assert step_bytes(flash, work, "SGLang") == 96 * 16 * 32_768 * 47 * 4 * 4
    assert step_bytes(flash, work, "vLLM") == 96 * 16 * 32_768 * 47 * 4 * 2
    assert step_bytes(flash, replace(work, router_replay=False), "SGLang") == 0
    assert token_bytes(resolve_model("llama-3.1-8b"), "SGLang") == 0


def test_hosts_hold_what_every_rank_was_sent_and_gpus_a_micro_batch() -> None:
    models, profile = models_of(WORK), node_group("h100", 8).profile
    layouts = columns_of([LAYOUT, replace(LAYOUT, cp=1, dp=2)])
    off, on = (
        role_memory(models, "actor", w, backend="megatron", profile=profile, engine="SGLang").each(
            layouts, "only"
        )
        for w in (replace(WORK, router_replay=False), WORK)
    )
    whole = COPIES * step_bytes(models.actor, WORK, "SGLang")
    assert np.allclose(on.states.host - off.states.host, [whole, whole / 2])
    tokens = np.array([32_512 / 2, 32_512])
    held = tokens * 48 * 8 * 8 / 4
    gained = (on.train.activations + on.train.logits) - (off.train.activations + off.train.logits)
    assert np.allclose(gained, held, rtol=0.02)


def test_the_step_passes_them_on_and_says_so() -> None:
    plain, replayed = (planned(replace(WORK, router_replay=x)) for x in (False, True))
    seconds = {x.name: x.seconds for x in replayed.prediction.phases}
    size = step_bytes(models_of(WORK).actor, WORK, "SGLang")
    assert seconds["router.replay"] == pytest.approx(
        2 * size / pageable_rate(device_of(node_group("h100", 16)), 1).value
    )
    assert replayed.prediction.step_s == pytest.approx(
        plain.prediction.step_s + seconds["router.replay"], rel=1e-6
    )


def test_dense_models_and_frameworks_without_it_are_refused() -> None:
    with pytest.raises(RlhfsimError, match="experts"):
        models_of(replace(WORK, model="qwen3-8b"))
    lacks = framework("openrlhf").lacks_workload(WORK, "deepspeed")
    assert lacks is not None
    assert lacks.what == "router replay"
    assert framework("slime").lacks_workload(WORK, "megatron") is None


def test_the_largest_logits_of_a_teacher_are_passed_on_and_held() -> None:
    """NeMo-RL's 64 are 0.8 kB a token."""
    plain = replace(
        WORK,
        algorithm="distillation",
        model="qwen3-1.7b",
        reference="qwen3-4b",
        samples=1,
        router_replay=False,
    )
    top = replace(plain, teacher_top=64)
    assert teacher_bytes(top) == 96 * 32_512 * 768
    assert teacher_bytes(plain) == teacher_bytes(replace(WORK, teacher_top=64)) == 0
    profile = node_group("h100", 8).profile
    hosts = [
        role_memory(models_of(w), "actor", w, backend="fsdp2", profile=profile).each(
            columns_of([Layout(dp=8, zero=3)]), "only"
        )
        for w in (plain, top)
    ]
    assert hosts[1].states.host - hosts[0].states.host == pytest.approx(COPIES * teacher_bytes(top) / 8)
    role = RolePlacement(pool="t", layout=Layout(dp=8, zero=3))
    placement = Placement(
        pools=(ResourcePool(name="t", start=0, gpus=8),),
        rollout=RolloutPlacement(pool="t", layout=RolloutLayout(dp=8, memory_utilization=0.4)),
        actor=role,
        reference=role,
        weight_path="ipc",
        backend="fsdp2",
    )
    cluster = Cluster(node_groups=(node_group("h100", 8),))
    seconds = [
        {p.name: p.seconds for p in estimate(placement, w, cluster).prediction.phases} for w in (plain, top)
    ]
    assert "teacher.logits" not in seconds[0]
    assert seconds[1]["teacher.logits"] == pytest.approx(
        2 * teacher_bytes(top) / pageable_rate(device_of(node_group("h100", 8)), 1).value
    )
    lacks = framework("rlhfsim").lacks_workload(top, "fsdp2")
    assert lacks is not None
    assert lacks.what == "largest logits of a teacher"
    several = replace(plain, reference="qwen3-4b,qwen3-8b")
    other = replace(plain, reference="qwen3-8b")
    scored = [estimate(placement, w, cluster).prediction for w in (plain, other, several)]
    small, large, both = ({p.name: p.seconds for p in x.phases}["reference.logprob"] for x in scored)
    assert both == pytest.approx((small + large) / 2, rel=0.02)
    held = [
        next(e.bytes for e in x.ledger if e.role == "reference" and "weights" in e.component) for x in scored
    ]
    assert held[2] == pytest.approx(held[0] + held[1])
    lacks = framework("nemo-rl").lacks_workload(several, "fsdp2")
    assert lacks is not None
    assert lacks.what == "several teachers"
