"""Plans that a framework runs, drawn by changing the fields of a few that were estimated once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, Literal, TypeVar

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.export import exporter
from rlhfsim.interchange.refusal import lacks_of
from rlhfsim.plan import Plan, RoleGpus
from rlhfsim.specs.frameworks.runs import Runs, framework
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import ONLINE, Algorithm, Environment, Lora, Reward, Workload
from tests.frameworks.test_accepted import RULES, plan, workload

MODELS = ("qwen2.5-7b", "qwen2.5-7b", "qwen3-30b-a3b")


@cache
def estimated() -> Plan:
    """The plan whose prediction, models and hardware all drawn ones keep."""
    return plan(workload("grpo"), "fsdp2", {"dp": 8, "zero": 3, "micro_batch": 2}, {"tp": 2, "dp": 4})


T = TypeVar("T")
TRIES = 40
Kind = Literal["generates", "distils", "given"]
"""What trains: on responses of the policy, towards a teacher's log-probs of them, on given data."""


def drawn_plans(name: str, count: int, seed: int = 0, *, kind: Kind = "generates") -> Iterator[Plan]:
    """`count` plans that the framework runs and its export writes."""
    rng, found = random.Random(f"{name} {seed}"), 0
    while found < count:
        with suppress(RlhfsimError):  # not a batch or a sharing of GPUs of this framework
            drawn = draw(name, rng, kind)
            exporter(name).write(drawn)
            found += 1
            yield drawn


def algorithms_of(name: str, kind: Kind) -> tuple[Algorithm, ...]:
    """Algorithms of a kind that a framework trains by."""
    kinds = {"distils": {"distillation"}, "generates": ONLINE - {"distillation"}}
    trained = framework(name).algorithms or sorted(ONLINE)
    return tuple(a for a in trained if (a in kinds[kind] if kind in kinds else a not in ONLINE))


def _accepted(make: Callable[[], T], lacks: Callable[[T], object]) -> T:
    """The first drawn one that can be and that the framework runs.

    Raises:
        RlhfsimError: none of many.
    """
    for _ in range(TRIES):
        with suppress(RlhfsimError):
            made = make()
            if lacks(made) is None:
                return made
    raise RlhfsimError("not-drawn", "none of many draws can be run", help="draw again")


def draw(name: str, rng: random.Random, kind: Kind) -> Plan:
    """A plan for a training backend of the framework."""
    pick = rng.choice
    algorithm = pick(algorithms_of(name, kind))
    runs = framework(name).by(algorithm)
    backend: Backend = pick(list(runs.trainers))
    workload = _given_data if kind == "given" else _workload
    work = _accepted(lambda: workload(rng, algorithm), lambda work: runs.lacks_workload(work, backend))
    layout = _accepted(
        lambda: _layout(rng, backend, packing=work.packing),
        lambda layout: runs.lacks_layout(backend, layout, work, "actor"),
    )
    apart = pick((0, 0, 8, 16)) if work.generates else 0
    schedule = _accepted(lambda: _schedule(rng, apart), runs.lacks_schedule)
    rollout = _accepted(
        lambda: _rollout(rng, runs, work, apart or layout.gpus),
        lambda rollout: runs.lacks_rollout(rollout, one_node=True, backend=backend),
    )
    return _accepted(
        lambda: _placed(rng, work, backend, layout, rollout, apart, schedule),
        lambda plan: lacks_of(plan, runs, frozenset()) or None,
    )


def _schedule(rng: random.Random, apart: int) -> Schedule:
    lags = ({}, {"staleness": 1}, {"staleness": rng.choice((2, 4)), "partial_rollout": True})
    return Schedule(**rng.choice(lags)) if apart else Schedule()


def _placed(
    rng: random.Random,
    work: Workload,
    backend: Backend,
    layout: Layout,
    rollout: RolloutLayout,
    apart: int,
    schedule: Schedule,
) -> Plan:
    pick = rng.choice
    placed = RolePlacement(
        pool="train",
        layout=layout,
        residency=pick(("resident", "offloaded")),
        offload_between=pick((False, True)),
    )
    if work.distils:
        layout = _teacher(rng, backend, layout, packing=work.packing)
    scoring = replace(
        placed, layout=layout, residency=pick(("resident", "offloaded", "swapped")), offload_between=False
    )
    pools = [ResourcePool(name="train", start=0, gpus=layout.gpus)]
    if apart:
        pools.append(ResourcePool(name="rollout", start=layout.gpus, gpus=apart))
    placement = Placement(
        pools=tuple(pools),
        actor=placed,
        critic=placed if work.has_critic else None,
        rollout=RolloutPlacement(pool=pools[-1].name, layout=rollout, sleep=0 if apart else pick((0, 1, 2)))
        if work.generates
        else None,
        reference=scoring if work.has_reference else None,
        reward=replace(scoring, residency="resident") if work.has_reward_model else None,
        weight_path=pick(_weight_paths(work, apart)),
        backend=backend,
        schedule=schedule,
    )
    hardware = replace(estimated().hardware[0], gpus=layout.gpus + apart)
    mapped = tuple(_ranks(name, placement.pool(role.pool)) for name, role in placement.roles.items())
    return replace(estimated(), hardware=(hardware,), workload=work, placement=placement, gpu_map=mapped)


def _weight_paths(work: Workload, apart: int) -> tuple[WeightPath, ...]:
    if not work.generates:
        return ("none",)
    return ("broadcast", "p2p", "disk") if apart else ("ipc", "disk")


def _teacher(rng: random.Random, backend: Backend, actor: Layout, *, packing: bool) -> Layout:
    """A layout of a teacher on as many GPUs as the actor's."""
    while True:
        drawn = _layout(rng, backend, packing=packing)
        each = drawn.gpus // drawn.dp
        if actor.gpus % each == 0:
            with suppress(RlhfsimError):
                return replace(
                    drawn,
                    dp=actor.gpus // each,
                    vp=1,
                    recompute="none",
                    offload_optimizer="none",
                    offload_fraction=1.0,
                    shards=None,
                )


def _ranks(role: str, pool: ResourcePool) -> RoleGpus:
    ranks, each = range(pool.start, pool.start + pool.gpus), estimated().hardware[0].gpus_per_node
    return RoleGpus(
        role=role, nodes=tuple(rank // each for rank in ranks), gpus=tuple(rank % each for rank in ranks)
    )


def _given_data(rng: random.Random, algorithm: Algorithm) -> Workload:
    """Pairs, labels or responses: one update a step."""
    pick = rng.choice
    changes: dict[str, Any] = {
        "packing": pick((True, False)),
        "gradients": pick(("backend", "bf16", "fp32")),
        "lora": pick((None, None, Lora(rank=pick((8, 32)), base=pick(("bf16", "nf4"))))),
        "optimizer": pick(("adam", "adam", "adam8bit")),
        "train_precision": pick(("bf16", "bf16", "fp8")),
    }
    return Workload(
        algorithm=algorithm,
        model=pick(MODELS),
        prompts=pick((64, 96, 128, 512)),
        prompt_len=Fixed(value=pick((256, 1024))),
        response_len=Fixed(value=pick((1024, 3072))),
        **{field: value for field, value in changes.items() if rng.random() < 0.5},
    )


def _workload(rng: random.Random, algorithm: Algorithm) -> Workload:
    pick = rng.choice
    prompts, samples = pick((64, 96, 128, 512)), pick((4, 8, 16))
    changes: dict[str, Any] = {
        "model": pick(MODELS),
        "prompts": prompts,
        "samples": samples,
        "mini_batches": pick((1, 2, 4)),
        "epochs": pick((1, 1, 2)),
        "packing": pick((True, True, False)),
        "gradients": pick(("backend", "bf16", "fp32")),
        "kl": pick((True, False)),
        "old_logprobs": pick(("recompute", "recompute", "rollout", "reused")),
        "lora": pick((None, None, Lora(rank=pick((8, 32)), base=pick(("bf16", "nf4"))))),
        "optimizer": pick(("adam", "adam", "adam8bit")),
        "train_precision": pick(("bf16", "bf16", "fp8")),
        "rollout_precision": pick(("bf16", "bf16", "fp8")),
        "kv_precision": pick(("bf16", "bf16", "fp8")),
        "oversampling": pick((0.0, 0.0, 0.5)),
        "prompt_len": Fixed(value=pick((256, 1024))),
        "response_len": Fixed(value=pick((1024, 3072))),
        "reward": pick((RULES, RULES, RULES, Reward(model="qwen2.5-1.5b"))),
        "environment": pick((None, None, None, Environment(turns=2))),
        "dynamic_sampling": pick(
            (None, None, DynamicSampling(kept=0.5, gen_prompts=pick((None, 2 * prompts)), max_gen_batches=10))
        ),
    }
    kept = {
        field: value for field, value in changes.items() if rng.random() < 0.5 or field in ("prompts", "kl")
    }
    if algorithm == "distillation":
        kept |= {"reference": "qwen2.5-14b", "teacher_top": pick((0, 32, 64)), "kl": True}
        kept |= {"old_logprobs": "recompute", "lora": None, "dynamic_sampling": None, "gradients": "backend"}
    return workload(algorithm, **kept)


def _layout(rng: random.Random, backend: Backend, *, packing: bool) -> Layout:
    pick = rng.choice
    packs: dict[str, Any] = {"pack_tokens": pick((4096, 8192)), "score_pack_tokens": pick((None, 16384))}
    given: dict[str, Any] = pick((packs, {}) if packing else ({},)) or {
        "micro_batch": pick((1, 2, 4)),
        "score_micro_batch": pick((None, None, 2, 8)),
    }
    given |= {
        "dp": pick((2, 4, 8)),
        "cp": pick((1, 1, 2)) if packing else 1,
        "recompute": pick(("none", "selective", "full")),
    }
    host = {"offload_optimizer": "cpu"}
    if backend == "megatron":
        pp, ep = pick((1, 2, 4)), pick((1, 1, 2))
        tp = pick((1, 2, 4))
        given |= {"tp": tp, "pp": pp, "ep": ep, "zero": 1, "vp": pick((1, 2)) if pp > 1 else 1}
        given |= {"etp": pick((1, tp)) if ep > 1 else 1}
        given |= {"dispatcher": pick((None, "alltoall", "deepep")) if ep > 1 else None}
        given |= pick(({}, {}, host, host | {"offload_fraction": 0.5}))
        given |= {"sequence_parallel": pick((True, True, False))}
    else:
        host |= {"offload_params": "cpu"} if backend == "fsdp2" else {}
        zero = pick((2, 3))
        given |= {"zero": zero, "tp": pick((1, 1, 2)), "sequence_parallel": pick((True, False))}
        given |= {"shards": pick((None, None, 2))} | pick(({}, {}, host))
    return Layout(**given)


def _rollout(rng: random.Random, runs: Runs, work: Workload, gpus: int) -> RolloutLayout:
    pick = rng.choice
    tp, pp, groups = pick((1, 2, 4)), pick((1, 1, 2)), pick((1, 1, 2))
    fits = [
        (a, b, c)
        for a, b, c in ((tp, pp, groups), (tp, 1, groups), (tp, 1, 1), (1, 1, 1))
        if gpus % (a * b * c) == 0
    ]
    tp, pp, groups = fits[0]
    drafts = pick(
        (None, None, Speculation(method=pick(("ngram", "mtp")), draft_tokens=pick((2, 4)), acceptance=0.6))
    )
    ep = pick((1, tp * groups)) if work.model != "qwen2.5-7b" else 1
    return RolloutLayout(
        tp=tp,
        pp=pp,
        attention_dp=groups,
        ep=ep,
        dispatcher=pick((None, *runs.rollout_dispatchers)) if ep > 1 else None,
        engine=pick((None, *runs.other_engines)),
        dp=gpus // (tp * pp * groups),
        max_num_seqs=pick((128, 256, 256, 1024)),
        max_batched_tokens=pick((8192, 8192, 16384)),
        memory_utilization=pick((0.5, 0.7, 0.85)),
        cuda_graphs=pick((True, False)),
        precision=work.rollout_precision,
        kv_precision=work.kv_precision,
        speculation=drafts if rng.random() < 0.3 else None,
    )
