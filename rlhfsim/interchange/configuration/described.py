"""What a framework's configuration says about a run, in one form, and the specs that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, Literal, TypeVar

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.loading import Source, convert
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import (
    Late,
    Placement,
    Residency,
    ResourcePool,
    RolePlacement,
    RolloutPlacement,
    Schedule,
)
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.workload.lengths import SIGMA, cut_log_normal, log_spread
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import (
    Algorithm,
    Environment,
    GradientSums,
    Lora,
    OldLogprobs,
    Reward,
    Rules,
    Workload,
)

T = TypeVar("T")
SHARED, TRAIN, ROLLOUT = "all", "train", "rollout"
"""Names of pools: one, or two."""


@frozen
class RoleDescription:
    """What a critic, reference or reward model has of its own."""

    layout: Layout
    residency: Residency = "resident"
    optimizer_leaves: bool = False
    """As in `RunDescription`."""
    pool: str | None = None
    """Name of a pool other than that of the actor; roles with the same name share it."""
    gpus: int = 0
    """GPUs of that pool."""


@frozen
class RunDescription:
    """One run: what a step computes, and where."""

    algorithm: Algorithm
    model: str
    critic: str | None = None
    """None: as the policy."""
    teacher: str | None = None
    """Model that distillation learns from; None: the reference, if any, is the policy as it began."""
    teacher_top: int = 0
    """Largest logits of the teacher at each token."""
    reward_model: str | None = None
    """None: rules or a remote service."""
    prompts: int
    samples: int
    epochs: int = 1
    mini_batches: int = 1
    packing: bool
    full: bool = False
    """Samples are packed into rows until these are full: each sequence is as long as the longest."""
    kl: bool
    old_logprobs: OldLogprobs = "recompute"
    lora_rank: int = 0
    lora_base: Literal["bf16", "nf4"] = "bf16"
    optimizer: Literal["adam", "adam8bit"] = "adam"
    gradients: GradientSums = "backend"
    dynamic_sampling: DynamicSampling | None = None
    oversampling: float = 0.0
    """Prompts that are generated beyond those that are trained on, per prompt."""
    environment: Environment | None = None
    max_response: int | None = None
    """Tokens at which a response is cut; None: not known."""
    max_prompt: int | None = None
    """Tokens of the longest prompt that is kept; None: not known."""
    max_tokens: int | None = None
    """Tokens at which a prompt and its response, all turns of it, are cut together; None: only each alone."""
    backend: Backend
    gpus: int
    """GPUs that train, or that do everything."""
    gpus_per_node: int
    rollout_gpus: int | None = None
    """GPUs of the rollout alone; None: it shares those that train."""
    layout: Layout
    """Layout of the actor, and of each other role that has none of its own; see `training_layout`."""
    roles: Mapping[str, RoleDescription] = field(default_factory=dict)
    """`critic`, `reference` and `reward`, those that differ from the actor."""
    actor_residency: Residency = "resident"
    scoring_residency: Residency = "resident"
    optimizer_leaves: bool = False
    """Optimizer states move to the host between the actor's calls."""
    router_replay: bool = False
    train_precision: Literal["bf16", "fp8"] = "bf16"
    """Matrix products of training and scoring."""
    rollout: RolloutLayout
    """See `rollout_layout`."""
    sleep: Literal[0, 1, 2] = 0
    weight_path: WeightPath
    staleness: float = 0.0
    partial_rollout: bool = False
    late: Late = "wait"
    lend: bool = False
    software: Software | None = None
    """What the training stack does differently from its default."""


@frozen
class RunSpecs:
    """A run as specs."""

    workload: Workload
    placement: Placement
    cluster: Cluster


@frozen
class Lengths:
    """Tokens, means over the run: measured, or said."""

    prompt: float
    response: float
    longest: float | None
    """Longest response that was seen; None: not logged."""
    longest_prompt: float | None = None
    """Longest prompt that may come; None: all are as long as the mean."""
    reached: float | None = None
    """Share of responses that are as long as `longest` or would be, if they were not cut; None: not known."""


def training_layout(gpus: int, *, tp: int = 1, pp: int = 1, cp: int = 1, **settings: Any) -> Layout:
    """The layout in which data parallelism fills what the other degrees leave of the GPUs; a micro-batch
    without gradients has a size of its own where it has another one.

    Raises:
        RlhfsimError: the degrees do not divide the GPUs.
    """
    each = tp * pp * cp
    _check_filled(gpus, each, f"training layout TP{tp} PP{pp} CP{cp}")
    if settings.get("score_micro_batch") == settings.get("micro_batch", 1):
        settings["score_micro_batch"] = None
    return _by_its_rules(Layout, tp=tp, pp=pp, cp=cp, dp=gpus // each, **settings)


def rollout_layout(
    gpus: int,
    *,
    tp: int = 1,
    pp: int = 1,
    attention_dp: int = 1,
    replicas: int | None = None,
    **settings: Any,
) -> RolloutLayout:
    """The layout of as many replicas as fill the GPUs, or of `replicas`.

    Raises:
        RlhfsimError: the degrees do not divide the GPUs.
    """
    each = tp * pp * attention_dp
    name = f"rollout layout TP{tp} PP{pp}" + (f" DP{attention_dp}" if attention_dp > 1 else "")
    _check_filled(gpus, each, name)
    dp = replicas or gpus // each
    return _by_its_rules(RolloutLayout, tp=tp, pp=pp, attention_dp=attention_dp, dp=dp, **settings)


def _by_its_rules(kind: type[T], **values: Any) -> T:
    """`kind(**values)`, with the bounds of its fields held."""
    try:
        return convert(kind, Source("configuration", "", values))
    except RlhfsimError as error:  # the caller knows the file
        raise RlhfsimError(error.code, error.message, help=error.help) from None


def _check_filled(gpus: int, each: int, layout: str) -> None:
    if gpus < 1 or each < 1 or gpus % each:
        raise RlhfsimError(
            "layout-does-not-fill",
            f"{layout} does not fill {gpus} GPUs",
            help="check nodes, GPUs per node and parallel sizes of the configuration, or correct them with "
            "--set",
        )


def setup(
    run: RunDescription,
    lengths: Lengths,
    gpu: str,
    rollout_gpu: str | None = None,
    node_gpus: int | None = None,
) -> RunSpecs:
    """The specs of a run on a kind of GPU; `node_gpus`: those of a node, None: as many as the run takes.

    Raises:
        RlhfsimError: layouts that do not fill the GPUs, an unknown model or GPU.
    """
    workload = workload_of(run, lengths)
    own = sum(pool.gpus for pool in pools_of(run, two_kinds=False) if pool.name != ROLLOUT)
    cluster = parse_cluster(
        own if rollout_gpu else own + (run.rollout_gpus or 0),
        gpu,
        gpus_per_node=node_gpus or min(run.gpus_per_node, own + (run.rollout_gpus or 0)),
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
    if run.prompts < 1 or run.samples < 1:
        raise RlhfsimError(
            "empty-batch",
            f"a step of {run.prompts} prompts with {run.samples} samples each trains on nothing",
            help="correct it with --set KEY=VALUE",
        )
    batches = min(run.prompts * run.samples, max(1, run.mini_batches))
    while run.prompts * run.samples % batches:
        batches -= 1
    return Workload(
        algorithm=run.algorithm,
        model=run.model,
        critic=run.critic or "same",
        reference=run.teacher or ("same" if run.kl else "none"),
        teacher_top=run.teacher_top,
        kl=run.kl,
        reward=Reward(model=run.reward_model) if run.reward_model else Reward(model=None, rules=Rules()),
        prompts=run.prompts,
        samples=run.samples,
        epochs=max(1, run.epochs),
        mini_batches=batches,
        prompt_len=cut_log_normal(max(1.0, lengths.prompt), lengths.longest_prompt),
        response_len=cut_log_normal(
            max(1.0, lengths.response), _longest_response(run, lengths), _response_spread(lengths)
        ),
        packing=run.packing,
        old_logprobs=run.old_logprobs,
        lora=Lora(rank=run.lora_rank, base=run.lora_base) if run.lora_rank else None,
        dynamic_sampling=run.dynamic_sampling,
        oversampling=run.oversampling,
        environment=run.environment,
        optimizer=run.optimizer,
        gradients=run.gradients,
        speculation=run.rollout.speculation,
        rollout_precision="bf16" if run.rollout.precision == "fp16" else run.rollout.precision,
        rollout_bf16_attention=run.rollout.bf16_attention,
        rollout_bf16_layers=run.rollout.bf16_layers,
        kv_precision="fp8" if run.rollout.kv_precision == "fp8" else "bf16",
        train_precision=run.train_precision,
        router_replay=run.router_replay,
    )


def _response_spread(lengths: Lengths) -> float:
    """Sigma of the responses: from mean, longest and the share that is cut, or as usual."""
    if lengths.longest is None or lengths.reached is None or lengths.response >= lengths.longest:
        return SIGMA
    return log_spread(max(1.0, lengths.response), lengths.longest, lengths.reached)


def _longest_response(run: RunDescription, lengths: Lengths) -> float | None:
    """Tokens of the longest response: its own limit, or what a prompt of mean length leaves of the whole."""
    longest = run.max_response or lengths.longest
    if run.max_tokens is None:
        return longest
    left = max(lengths.response, run.max_tokens - lengths.prompt)
    return left if longest is None else min(longest, left)


def placement_of(run: RunDescription, workload: Workload, *, two_kinds: bool = False) -> Placement:
    """Pools, roles and schedule; without GPUs of its own the rollout shares those that train."""
    pools = pools_of(run, two_kinds)
    actor = RolePlacement(
        pool=pools[0].name,
        layout=run.layout,
        residency=run.actor_residency,
        offload_between=run.optimizer_leaves,
    )
    scoring = RolePlacement(pool=pools[0].name, layout=run.layout, residency=run.scoring_residency)
    reward = replace(scoring, residency="resident") if scoring.residency == "swapped" else scoring
    placed = {"critic": actor, "reference": scoring, "reward": reward} | {
        name: RolePlacement(
            pool=role.pool or pools[0].name,
            layout=role.layout,
            residency=role.residency,
            offload_between=role.optimizer_leaves,
        )
        for name, role in run.roles.items()
    }
    apart = run.rollout_gpus is not None
    return Placement(
        pools=pools,
        actor=actor,
        critic=placed["critic"] if workload.has_critic else None,
        rollout=RolloutPlacement(
            pool=ROLLOUT if apart else pools[0].name, layout=run.rollout, sleep=0 if apart else run.sleep
        )
        if workload.generates
        else None,
        reference=placed["reference"] if workload.has_reference else None,
        reward=placed["reward"] if workload.has_reward_model else None,
        weight_path=run.weight_path,
        backend=run.backend,
        schedule=Schedule(
            staleness=run.staleness, partial_rollout=run.partial_rollout, late=run.late, lend=run.lend
        ),
        software=run.software,
    )


def pools_of(run: RunDescription, two_kinds: bool) -> tuple[ResourcePool, ...]:
    """The pool that trains, those of roles, and that of the rollout, one after the other."""
    sizes = {TRAIN if run.rollout_gpus is not None else SHARED: run.gpus}
    sizes |= {role.pool: role.gpus for role in run.roles.values() if role.pool not in (None, ROLLOUT)}
    pools, start = list[ResourcePool](), 0
    for name, gpus in sizes.items():
        pools.append(ResourcePool(name=name, start=start, gpus=gpus))
        start += gpus
    if run.rollout_gpus is not None:
        first = 0 if two_kinds else start
        pools.append(ResourcePool(name=ROLLOUT, start=first, gpus=run.rollout_gpus, hardware=int(two_kinds)))
    return tuple(pools)
