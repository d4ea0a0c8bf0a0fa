"""What a framework's configuration says about a run, in one form, and the specs that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, Offload, Recompute, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Placement,
    Residency,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, cut_log_normal
from rlhfsim.specs.workload.workload import Algorithm, Lora, Reward, Rules, Workload

SHARED, TRAIN, ROLLOUT = "all", "train", "rollout"
"""Names of pools: one, or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Parallel sizes of the trained policy; data parallelism fills the rest."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1


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
    backend: Backend
    gpus: int
    """GPUs that train, or that do everything."""
    gpus_per_node: int
    rollout_gpus: int | None = None
    """GPUs of the rollout alone; None: it shares those that train."""
    degrees: Degrees = Degrees()
    zero: int
    micro_batch: int = 1
    recompute: Recompute = "none"
    offload_optimizer: Offload = "none"
    actor_residency: Residency = "resident"
    scoring_residency: Residency = "resident"
    optimizer_leaves: bool = False
    """Optimizer states move to the host between the actor's calls."""
    rollout_tp: int = 1
    rollout_pp: int = 1
    replicas: int | None = None
    """None: as many as fill the GPUs."""
    max_num_seqs: int = 256
    memory_utilization: float = 0.9
    max_batched_tokens: int = 8192
    cuda_graphs: bool = True
    sleep: Literal[0, 1, 2] = 0
    rollout_precision: Literal["bf16", "fp8"] = "bf16"
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
    """Measured tokens, means over the run."""

    prompt: float
    response: float
    longest: float | None
    """Longest response that was seen; None: not logged."""


def setup(recipe: RunDescription, lengths: Lengths, gpu: str, rollout_gpu: str | None = None) -> RunSpecs:
    """The specs of a run on a kind of GPU.

    Raises:
        RlhfsimError: layouts that do not fill the GPUs, an unknown model or GPU.
    """
    workload = workload_of(recipe, lengths)
    cluster = parse_cluster(
        recipe.gpus if rollout_gpu else recipe.gpus + (recipe.rollout_gpus or 0),
        gpu,
        gpus_per_node=min(recipe.gpus_per_node, recipe.gpus + (recipe.rollout_gpus or 0)),
        rollout_gpus=recipe.rollout_gpus if rollout_gpu else None,
        rollout_gpu=rollout_gpu,
    )
    return RunSpecs(
        workload=workload,
        placement=placement_of(recipe, workload, two_kinds=rollout_gpu is not None),
        cluster=cluster,
    )


def workload_of(recipe: RunDescription, lengths: Lengths) -> Workload:
    """What a step computes; response lengths have the measured mean and are cut where the run cuts."""
    batches = max(1, recipe.mini_batches)
    while recipe.prompts * recipe.samples % batches:
        batches -= 1
    return Workload(
        algorithm=recipe.algorithm,
        model=recipe.model,
        critic=recipe.critic or "same",
        reference="same" if recipe.kl else "none",
        kl=recipe.kl,
        reward=Reward(model=recipe.reward_model)
        if recipe.reward_model
        else Reward(model=None, rules=Rules()),
        prompts=recipe.prompts,
        samples=recipe.samples,
        epochs=max(1, recipe.epochs),
        mini_batches=batches,
        prompt_len=Fixed(value=max(1.0, lengths.prompt)),
        response_len=_responses(recipe, lengths),
        packing=recipe.packing,
        old_logprobs="recompute" if recipe.recomputes_logprobs else "rollout",
        lora=Lora(rank=recipe.lora_rank) if recipe.lora_rank else None,
        rollout_precision=recipe.rollout_precision,
    )


def _responses(recipe: RunDescription, lengths: Lengths) -> AnyLengths:
    cut = recipe.max_response or lengths.longest
    return cut_log_normal(max(1.0, lengths.response), cut)


def placement_of(recipe: RunDescription, workload: Workload, *, two_kinds: bool = False) -> Placement:
    """Pools, roles and schedule; without GPUs of its own the rollout shares those that train."""
    apart = recipe.rollout_gpus is not None
    generating = recipe.rollout_gpus or recipe.gpus
    pools = [ResourcePool(name=TRAIN if apart else SHARED, gpus=recipe.gpus)]
    if apart:
        pools.append(
            ResourcePool(
                name=ROLLOUT, start=0 if two_kinds else recipe.gpus, gpus=generating, hardware=int(two_kinds)
            )
        )
    layout = _layout(recipe)
    scoring = RolePlacement(pool=pools[0].name, layout=layout, residency=recipe.scoring_residency)
    actor = RolePlacement(
        pool=pools[0].name,
        layout=layout,
        residency=recipe.actor_residency,
        offload_between=recipe.optimizer_leaves,
    )
    return Placement(
        pools=tuple(pools),
        actor=actor,
        critic=actor if workload.has_critic else None,
        rollout=RolloutPlacement(
            pool=pools[-1].name, layout=_rollout(recipe, generating), sleep=0 if apart else recipe.sleep
        ),
        reference=scoring if workload.has_reference else None,
        reward=scoring if workload.has_reward_model else None,
        weight_path=recipe.weight_path,
        backend=recipe.backend,
        schedule=Schedule(staleness=recipe.staleness, partial_rollout=recipe.partial_rollout),
    )


def _layout(recipe: RunDescription) -> Layout:
    d = recipe.degrees
    each = d.tp * d.pp * d.cp
    _fills(recipe.gpus, each, f"training layout TP{d.tp} PP{d.pp} CP{d.cp}")
    return Layout(
        tp=d.tp,
        pp=d.pp,
        cp=d.cp,
        ep=d.ep,
        dp=recipe.gpus // each,
        zero=recipe.zero,
        micro_batch=max(1, recipe.micro_batch),
        recompute=recipe.recompute,
        offload_optimizer=recipe.offload_optimizer,
    )


def _rollout(recipe: RunDescription, gpus: int) -> RolloutLayout:
    each = recipe.rollout_tp * recipe.rollout_pp
    _fills(gpus, each, f"rollout layout TP{recipe.rollout_tp} PP{recipe.rollout_pp}")
    return RolloutLayout(
        tp=recipe.rollout_tp,
        pp=recipe.rollout_pp,
        dp=recipe.replicas or gpus // each,
        max_num_seqs=recipe.max_num_seqs,
        memory_utilization=recipe.memory_utilization,
        max_batched_tokens=recipe.max_batched_tokens,
        cuda_graphs=recipe.cuda_graphs,
        precision=recipe.rollout_precision,
    )


def _fills(gpus: int, each: int, what: str) -> None:
    if gpus < 1 or gpus % each:
        raise RlhfsimError(
            "layout-does-not-fill",
            f"{what} does not fill {gpus} GPUs",
            help="check nodes, GPUs per node and parallel sizes of the configuration, or correct them with --set",
        )
