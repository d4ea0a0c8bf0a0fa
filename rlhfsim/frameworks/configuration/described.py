"""What a framework's configuration says about a run, in one form, and the specs that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    Residency,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.lengths import cut_log_normal
from rlhfsim.specs.workload.workload import Algorithm, Lora, Reward, Rules, Workload

SHARED, TRAIN, ROLLOUT = "all", "train", "rollout"
"""Names of pools: one, or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """One run: what a step computes, and where."""

    algorithm: Algorithm
    model: str
    critic: str | None = None
    """None: as the policy."""
    reward_model: str | None = None
    """None: rules or a remote service."""
    prompts: int
    samples: int
    epochs: int = 1
    mini_batches: int = 1
    packing: bool
    kl: bool
    recomputes_logprobs: bool = True
    """Old log-probs come from a forward of the training engine."""
    lora_rank: int = 0
    max_response: int | None = None
    """Tokens at which a response is cut; None: not known."""
    max_prompt: int | None = None
    """Tokens of the longest prompt that is kept; None: not known."""
    backend: Backend
    gpus: int
    """GPUs that train, or that do everything."""
    gpus_per_node: int
    rollout_gpus: int | None = None
    """GPUs of the rollout alone; None: it shares those that train."""
    layout: Layout
    """Of the trained roles and those that score; see `training_layout`."""
    actor_residency: Residency = "resident"
    scoring_residency: Residency = "resident"
    optimizer_leaves: bool = False
    """Optimizer states move to the host between the actor's calls."""
    train_precision: Literal["bf16", "fp8"] = "bf16"
    """Matrix products of training and scoring."""
    rollout: RolloutLayout
    """See `rollout_layout`."""
    sleep: Literal[0, 1, 2] = 0
    weight_path: WeightPath
    staleness: float = 0.0
    partial_rollout: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpecs:
    """A run as specs."""

    workload: Workload
    placement: Placement
    cluster: Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens, means over the run: measured, or said."""

    prompt: float
    response: float
    longest: float | None
    """Longest response that was seen; None: not logged."""
    longest_prompt: float | None = None
    """Longest prompt that may come; None: all are as long as the mean."""


def training_layout(gpus: int, *, tp: int = 1, pp: int = 1, cp: int = 1, **settings: Any) -> Layout:
    """The layout in which data parallelism fills what the other degrees leave of the GPUs.

    Raises:
        RlhfsimError: the degrees do not divide the GPUs.
    """
    each = tp * pp * cp
    _check_filled(gpus, each, f"training layout TP{tp} PP{pp} CP{cp}")
    return Layout(tp=tp, pp=pp, cp=cp, dp=gpus // each, **settings)


def rollout_layout(
    gpus: int, *, tp: int = 1, pp: int = 1, replicas: int | None = None, **settings: Any
) -> RolloutLayout:
    """The layout of as many replicas as fill the GPUs, or of `replicas`.

    Raises:
        RlhfsimError: the degrees do not divide the GPUs.
    """
    each = tp * pp
    _check_filled(gpus, each, f"rollout layout TP{tp} PP{pp}")
    return RolloutLayout(tp=tp, pp=pp, dp=replicas or gpus // each, **settings)


def _check_filled(gpus: int, each: int, layout: str) -> None:
    if gpus < 1 or gpus % each:
        raise RlhfsimError(
            "layout-does-not-fill",
            f"{layout} does not fill {gpus} GPUs",
            help="check nodes, GPUs per node and parallel sizes of the configuration, or correct them with "
            "--set",
        )


def setup(run: RunDescription, lengths: Lengths, gpu: str, rollout_gpu: str | None = None) -> RunSpecs:
    """The specs of a run on a kind of GPU.

    Raises:
        RlhfsimError: layouts that do not fill the GPUs, an unknown model or GPU.
    """
    workload = workload_of(run, lengths)
    cluster = parse_cluster(
        run.gpus if rollout_gpu else run.gpus + (run.rollout_gpus or 0),
        gpu,
        gpus_per_node=min(run.gpus_per_node, run.gpus + (run.rollout_gpus or 0)),
        rollout_gpus=run.rollout_gpus if rollout_gpu else None,
        rollout_gpu=rollout_gpu,
    )
    return RunSpecs(
        workload=workload,
        placement=placement_of(run, workload, two_kinds=rollout_gpu is not None),
        cluster=cluster,
    )


def workload_of(run: RunDescription, lengths: Lengths) -> Workload:
    """What a step computes; response lengths have the measured mean and are cut where the run cuts."""
    batches = min(run.prompts * run.samples, max(1, run.mini_batches))
    while run.prompts * run.samples % batches:
        batches -= 1
    return Workload(
        algorithm=run.algorithm,
        model=run.model,
        critic=run.critic or "same",
        reference="same" if run.kl else "none",
        kl=run.kl,
        reward=Reward(model=run.reward_model) if run.reward_model else Reward(model=None, rules=Rules()),
        prompts=run.prompts,
        samples=run.samples,
        epochs=max(1, run.epochs),
        mini_batches=batches,
        prompt_len=cut_log_normal(max(1.0, lengths.prompt), lengths.longest_prompt),
        response_len=cut_log_normal(max(1.0, lengths.response), run.max_response or lengths.longest),
        packing=run.packing,
        old_logprobs="recompute" if run.recomputes_logprobs else "rollout",
        lora=Lora(rank=run.lora_rank) if run.lora_rank else None,
        rollout_precision="fp8" if run.rollout.precision == "fp8" else "bf16",
        train_precision=run.train_precision,
    )


def placement_of(run: RunDescription, workload: Workload, *, two_kinds: bool = False) -> Placement:
    """Pools, roles and schedule; without GPUs of its own the rollout shares those that train."""
    apart = run.rollout_gpus is not None
    pools = [ResourcePool(name=TRAIN if apart else SHARED, gpus=run.gpus)]
    if apart:
        pools.append(
            ResourcePool(
                name=ROLLOUT,
                start=0 if two_kinds else run.gpus,
                gpus=run.rollout_gpus or run.gpus,
                hardware=int(two_kinds),
            )
        )
    scoring = RolePlacement(pool=pools[0].name, layout=run.layout, residency=run.scoring_residency)
    actor = RolePlacement(
        pool=pools[0].name,
        layout=run.layout,
        residency=run.actor_residency,
        offload_between=run.optimizer_leaves,
    )
    return Placement(
        pools=tuple(pools),
        actor=actor,
        critic=actor if workload.has_critic else None,
        rollout=RolloutPlacement(pool=pools[-1].name, layout=run.rollout, sleep=0 if apart else run.sleep),
        reference=scoring if workload.has_reference else None,
        reward=scoring if workload.has_reward_model else None,
        weight_path=run.weight_path,
        backend=run.backend,
        schedule=Schedule(staleness=run.staleness, partial_rollout=run.partial_rollout),
    )
