"""What must hold whatever the numbers are: drawn questions, one thing changed, and the direction of the answer.

Every question is drawn from a fixed seed; a relation says what is changed and which figure must not rise or fall.
A tolerance of one in a thousand leaves room for waves of requests that end at whole tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from rlhfsim.api import design, estimate
from rlhfsim.plan import Plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

SLACK = 1e-3
MODELS = ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
GPUS = ("h100_sxm", "a100_sxm", "h200_sxm", "b200_sxm", "h100_96gb", "mi300x")
RULES = Reward(model=None, rules=Rules())
SEEDS = range(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is priced."""

    placement: Placement
    workload: Workload
    cluster: Cluster


@cache
def drawn(seed: int) -> Question:
    """A question that can exist: GRPO or PPO of a Qwen2.5, colocated or apart, on one node or several."""
    rng = np.random.default_rng([14, seed])
    gpus, tp = int(rng.choice([8, 16, 32])), int(rng.choice([1, 2]))
    apart, ppo = bool(rng.random() < 0.3), bool(rng.random() < 0.3)
    backend = str(rng.choice(["fsdp2", "deepspeed", "megatron"]))
    megatron = backend == "megatron"
    layout = Layout(
        tp=tp if megatron else 1,
        dp=gpus // tp if megatron else gpus,
        zero=1 if megatron else 3,
        micro_batch=int(rng.choice([1, 2, 4])),
        recompute=str(rng.choice(["none", "full"])),  # type: ignore[arg-type]
    )
    pools = [ResourcePool(name="all", gpus=gpus)]
    if apart:
        pools.append(ResourcePool(name="rollout", start=gpus, gpus=gpus))
    rollout = RolloutLayout(tp=tp, dp=gpus // tp, memory_utilization=0.5)
    role = RolePlacement(pool="all", layout=layout)
    placement = Placement(
        pools=tuple(pools),
        actor=role,
        reference=role,
        rollout=RolloutPlacement(pool=pools[-1].name, layout=rollout),
        weight_path="broadcast" if apart else "ipc",
        backend=backend,  # type: ignore[arg-type]
        schedule=Schedule(staleness=float(apart and rng.choice([0, 1]))),
        **({"critic": role} if ppo else {}),
    )
    mean = float(rng.choice([300, 1000, 3000]))
    lengths = Fixed(value=mean) if rng.random() < 0.5 else LogNormal(mean=mean, max=8 * mean)
    workload = Workload(
        algorithm="ppo" if ppo else "grpo",
        model=str(rng.choice(MODELS[:-1])),
        prompts=int(rng.choice([64, 128, 256])),
        samples=1 if ppo else int(rng.choice([4, 8])),
        prompt_len=Fixed(value=float(rng.choice([100, 500]))),
        response_len=lengths,
        mini_batches=int(rng.choice([1, 2])),
        reward=RULES,
    )
    return Question(
        placement=placement,
        workload=workload,
        cluster=parse_cluster(gpus * len(pools), str(rng.choice(GPUS))),
    )


@cache
def answered(seed: int) -> Plan:
    return priced(drawn(seed))


def priced(question: Question) -> Plan:
    return estimate(question.placement, question.workload, question.cluster)


Change = Callable[[Question], Question]


def machine(change: Callable[[Profile], Profile]) -> Change:
    """The same on another kind of GPU."""

    def changed(q: Question) -> Question:
        groups = tuple(replace(g, profile=change(g.profile)) for g in q.cluster.node_groups)
        return replace(q, cluster=replace(q.cluster, node_groups=groups))

    return changed


def faster(name: str, factor: float) -> Change:
    """One rate of the GPU, its node or its links."""

    def change(profile: Profile) -> Profile:
        if name == "peak":
            peaks = {k: replace(p, value=p.value * factor) for k, p in profile.peak.items()}
            return replace(profile, peak=peaks)
        if name == "scale_up":
            rate = replace(profile.scale_up.bandwidth, value=profile.scale_up.bandwidth.value * factor)
            return replace(profile, scale_up=replace(profile.scale_up, bandwidth=rate))
        if name == "host_bandwidth":
            rate = replace(profile.node.host_bandwidth, value=profile.node.host_bandwidth.value * factor)
            return replace(profile, node=replace(profile.node, host_bandwidth=rate))
        if name == "memory":
            return replace(
                profile,
                memory=replace(profile.memory, value=profile.memory.value * factor),
                usable_memory=replace(profile.usable_memory, value=profile.usable_memory.value * factor),
            )
        rate = getattr(profile, name)
        return replace(profile, **{name: replace(rate, value=rate.value * factor)})

    return machine(change)


def work(**changes: object) -> Change:
    """Another workload; a function gives the value from the old one."""

    def changed(q: Question) -> Question:
        values = {n: v(getattr(q.workload, n)) if callable(v) else v for n, v in changes.items()}
        return replace(q, workload=replace(q.workload, **values))

    return changed


def longer(lengths: Fixed | LogNormal) -> Fixed | LogNormal:
    if isinstance(lengths, Fixed):
        return Fixed(value=2 * lengths.value)
    return replace(lengths, mean=2 * lengths.mean, max=2 * lengths.max)


def larger(name: str) -> str:
    return MODELS[MODELS.index(name) + 1]


def everywhere(change: Callable[[Layout], Layout]) -> Change:
    """Another layout of everything that is trained or scores."""

    def changed(q: Question) -> Question:
        p = q.placement
        role = replace(p.actor, layout=change(p.actor.layout))
        roles = {"actor": role, "reference": role, **({"critic": role} if p.role("critic") else {})}
        return replace(q, placement=replace(p, **roles))

    return changed


def twice_the_gpus(q: Question) -> Question:
    """Every pool and every data parallelism twice as large."""
    p = q.placement
    pools = tuple(replace(pool, start=2 * pool.start, gpus=2 * pool.gpus) for pool in p.pools)
    role = replace(p.actor, layout=replace(p.actor.layout, dp=2 * p.actor.layout.dp))
    rollout = replace(p.rollout, layout=replace(p.rollout.layout, dp=2 * p.rollout.layout.dp))
    roles = {"actor": role, "reference": role, **({"critic": role} if p.role("critic") else {})}
    groups = tuple(replace(g, gpus=2 * g.gpus) for g in q.cluster.node_groups)
    return replace(
        q,
        placement=replace(p, pools=pools, rollout=rollout, **roles),
        cluster=replace(q.cluster, node_groups=groups),
    )


def step(plan: Plan) -> float:
    return plan.prediction.step_s


def peak(plan: Plan) -> float:
    return plan.prediction.peak_memory_bytes


def risk(plan: Plan) -> float:
    return plan.prediction.probability_out_of_memory


def generation(plan: Plan) -> float:
    return sum(p.seconds for p in plan.prediction.phases if p.name == "actor.generate")


def training(plan: Plan) -> float:
    return sum(p.seconds for p in plan.prediction.phases if p.name == "actor.train")


INFINITE = 1e9
NOT_SLOWER: dict[str, Change] = {
    **{
        f"twice the {n}": faster(n, 2.0) for n in ("peak", "hbm", "scale_up", "nic", "pcie", "host_bandwidth")
    },
    **{f"infinite {n}": faster(n, INFINITE) for n in ("hbm", "scale_up", "nic", "pcie")},
    "more memory": faster("memory", 1.5),
}
NOT_FASTER: dict[str, Change] = {
    "twice the prompts": work(prompts=lambda n: 2 * n),
    "twice the samples": work(samples=lambda n: 2 * n),
    "responses twice as long": work(response_len=longer),
    "prompts twice as long": work(prompt_len=longer),
    "a larger model": work(model=larger),
    "more optimizer steps": work(mini_batches=lambda n: 4 * n),
    "a second epoch": work(epochs=2),
    "a thinner fabric": lambda q: replace(q, cluster=replace(q.cluster, oversubscription=4.0)),
    "half the HBM bandwidth": faster("hbm", 0.5),
    "half the arithmetic": faster("peak", 0.5),
}
NO_LESS_MEMORY: dict[str, Change] = {
    "a larger model": work(model=larger),
    "a larger micro-batch": everywhere(lambda x: replace(x, micro_batch=2 * x.micro_batch)),
}


def cases(relations: dict[str, Change]) -> list[object]:
    return [pytest.param(seed, name, id=f"{name}-{seed}") for name in relations for seed in SEEDS]


@pytest.mark.parametrize(("seed", "name"), cases(NOT_SLOWER))
def test_a_better_machine_is_not_slower(seed: int, name: str) -> None:
    assert step(priced(NOT_SLOWER[name](drawn(seed)))) <= step(answered(seed)) * (1 + SLACK)


@pytest.mark.parametrize(("seed", "name"), cases(NOT_FASTER))
def test_more_work_is_not_faster(seed: int, name: str) -> None:
    question = drawn(seed)
    if name == "twice the samples" and question.workload.algorithm == "ppo":
        question = replace(question, workload=replace(question.workload, samples=1))
    assert step(priced(NOT_FASTER[name](question))) >= step(answered(seed)) * (1 - SLACK)


@pytest.mark.parametrize(("seed", "name"), cases(NO_LESS_MEMORY))
def test_more_state_is_not_less_memory(seed: int, name: str) -> None:
    changed = priced(NO_LESS_MEMORY[name](drawn(seed)))
    assert peak(changed) >= peak(answered(seed)) * (1 - SLACK)
    assert risk(changed) >= risk(answered(seed)) - SLACK


@pytest.mark.parametrize("seed", SEEDS)
def test_more_memory_is_no_more_risk(seed: int) -> None:
    assert risk(priced(faster("memory", 1.5)(drawn(seed)))) <= risk(answered(seed)) + SLACK


@pytest.mark.parametrize("seed", SEEDS)
def test_twice_the_gpus_generate_and_train_no_slower(seed: int) -> None:
    before, after = answered(seed), priced(twice_the_gpus(drawn(seed)))
    assert generation(after) <= generation(before) * (1 + SLACK)
    assert training(after) <= training(before) * (1 + SLACK)


@pytest.mark.parametrize("seed", SEEDS)
def test_full_recompute_holds_no_more_and_takes_no_less(seed: int) -> None:
    none, full = (
        priced(everywhere(lambda x, how=how: replace(x, recompute=how))(drawn(seed)))
        for how in ("none", "full")
    )
    assert peak(full) <= peak(none) * (1 + SLACK)
    assert training(full) >= training(none) * (1 - SLACK)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_interval_holds_its_value_and_every_phase_lies_in_the_step(seed: int) -> None:
    p = answered(seed).prediction
    assert 0 < p.low_s <= p.step_s <= p.high_s
    for phase in p.phases:
        assert phase.low_s <= phase.seconds * (1 + SLACK)
        assert phase.high_s >= phase.seconds * (1 - SLACK)
        assert phase.start_s >= 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_price_and_energy_follow_the_seconds(seed: int) -> None:
    slow = priced(faster("hbm", 0.5)(drawn(seed))).prediction
    quick = answered(seed).prediction
    assert slow.kwh_per_step / slow.step_s == pytest.approx(quick.kwh_per_step / quick.step_s)


# --- asynchronous steps, formats and engines ------------------------------------------------------


def moe(response: float, *, staleness: float = 0.0, **rollout: object) -> Question:
    """GRPO of Qwen3-30B-A3B on 32 H100, half of them for the rollout where samples may be stale."""
    apart = staleness > 0
    gpus = 16 if apart else 32
    pools = [ResourcePool(name="all", gpus=gpus)]
    if apart:
        pools.append(ResourcePool(name="rollout", start=gpus, gpus=gpus))
    role = RolePlacement(pool="all", layout=Layout(tp=2, dp=gpus // 2, ep=8, zero=1, recompute="full"))
    layout = RolloutLayout(tp=2, dp=gpus // 2, memory_utilization=0.6, **rollout)  # type: ignore[arg-type]
    placement = Placement(
        pools=tuple(pools),
        actor=role,
        reference=role,
        rollout=RolloutPlacement(pool=pools[-1].name, layout=layout),
        weight_path="broadcast" if apart else "ipc",
        backend="megatron",
        schedule=Schedule(staleness=staleness),
    )
    workload = Workload(
        algorithm="grpo",
        model="qwen3-30b-a3b",
        prompts=64,
        samples=16,
        prompt_len=Fixed(value=200),
        response_len=LogNormal(mean=response, max=8 * response),
        reward=RULES,
    )
    return Question(placement=placement, workload=workload, cluster=parse_cluster(32, "h100_sxm"))


@pytest.mark.parametrize("staleness", [0.0, 1.0])
@pytest.mark.parametrize("response", [250, 500, 1000, 2000, 4000])
def test_shorter_responses_are_not_slower_on_a_mixture_of_experts(response: float, staleness: float) -> None:
    short, long = (step(priced(moe(r, staleness=staleness))) for r in (response, 2 * response))
    assert short <= long * (1 + SLACK)


@pytest.mark.parametrize("staleness", [1.0, 2.0])
@pytest.mark.parametrize("response", [500, 2000])
def test_the_mean_of_an_asynchronous_run_lies_in_its_interval(response: float, staleness: float) -> None:
    p = priced(moe(response, staleness=staleness)).prediction
    assert p.low_s <= p.step_s <= p.high_s


def dense(gpu: str, model: str, sequences: int, **rollout: object) -> Plan:
    """GRPO of a dense model on one node, generated with the given rollout layout."""
    role = RolePlacement(pool="all", layout=Layout(dp=32, zero=3, recompute="full"))
    layout = RolloutLayout(tp=8, dp=4, memory_utilization=0.6, **rollout)  # type: ignore[arg-type]
    placement = Placement(
        pools=(ResourcePool(name="all", gpus=32),),
        actor=role,
        reference=role,
        rollout=RolloutPlacement(pool="all", layout=layout),
        weight_path="ipc",
        backend="fsdp2",
    )
    workload = Workload(
        algorithm="grpo",
        model=model,
        prompts=sequences // 8,
        samples=8,
        prompt_len=Fixed(value=500),
        response_len=LogNormal(mean=1000, max=8000),
        reward=RULES,
    )
    return priced(Question(placement=placement, workload=workload, cluster=parse_cluster(32, gpu)))


BATCHES = (64, 256, 1024)

FORMATS = [
    (gpu, model, n)
    for gpu in ("h100_sxm", "h200_sxm", "b200_sxm")
    for model in ("qwen2.5-32b", "qwen2.5-72b")
    for n in BATCHES
]


@pytest.mark.parametrize(("gpu", "model", "sequences"), FORMATS)
def test_fp8_weights_do_not_generate_slower(gpu: str, model: str, sequences: int) -> None:
    low, full = (generation(dense(gpu, model, sequences, precision=p)) for p in ("fp8", "bf16"))
    assert low <= full * (1 + SLACK)


@pytest.mark.parametrize("sequences", BATCHES)
@pytest.mark.parametrize("model", ["qwen2.5-14b", "qwen2.5-32b"])
@pytest.mark.parametrize("gpu", ["h100_sxm", "a100_sxm", "b200_sxm"])
def test_graphs_do_not_generate_slower_than_eager_launches(gpu: str, model: str, sequences: int) -> None:
    graphs, eager = (generation(dense(gpu, model, sequences, cuda_graphs=on)) for on in (True, False))
    assert graphs <= eager * (1 + SLACK)


# --- the best plan --------------------------------------------------------------------------------

GRPO = Workload(
    algorithm="grpo",
    model="qwen2.5-7b",
    prompts=128,
    samples=8,
    prompt_len=Fixed(value=300),
    response_len=LogNormal(mean=1000, max=4000),
    reward=RULES,
)


@cache
def best(gpus: int, name: str = "") -> float:
    """Step of the fastest plan on so many H100, or on a better machine by its name."""
    cluster = parse_cluster(gpus, "h100_sxm")
    if name:
        empty = Question(placement=drawn(0).placement, workload=GRPO, cluster=cluster)
        cluster = NOT_SLOWER[name](empty).cluster
    found = design(Request(cluster=cluster, workload=GRPO), explain=False, rivals=False, simplest_s=None)
    assert found.best is not None
    return found.best.prediction.step_s


@pytest.mark.parametrize(("few", "many"), [(8, 16), (16, 17), (16, 24), (16, 32)])
def test_more_gpus_have_no_slower_best_plan(few: int, many: int) -> None:
    assert best(many) <= best(few) * (1 + SLACK)


@pytest.mark.parametrize("name", ["twice the peak", "twice the hbm", "twice the nic", "more memory"])
def test_a_better_machine_has_no_slower_best_plan(name: str) -> None:
    assert best(16, name) <= best(16) * (1 + SLACK)
