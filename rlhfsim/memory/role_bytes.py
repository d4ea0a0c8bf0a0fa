"""What every role holds on one of its GPUs: between its calls, during them, and on the host.

The numbers behind the memory ledger and the search's fast check. A role's call needs its states,
the buffers that gather and reduce them, activations or logits, and what the allocator wastes.

Not known here: memory that a framework's caching allocator keeps from a finished call (it is taken
to be emptied at every switch), and copies during start and checkpointing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from rlhfsim.memory import activations, kv_cache
from rlhfsim.memory import states as memory
from rlhfsim.memory.activations import Activations
from rlhfsim.memory.states import Optimizer, Shard, Stage, States
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.workload import Lora, Workload

Component = Literal[
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "buffers",
    "activations",
    "logits",
    "kv_cache",
    "profile_peak",
    "non_torch",
    "cuda_graphs",
    "sync_buffers",
    "framework",
    "nccl",
    "fragmentation",
]
"""gathered: ZeRO-3/FSDP weights of running layers; buffers: gradients before reduction;
profile_peak: what the engine keeps back for its own activations; framework: CUDA context."""
SPREAD: dict[Component, str] = {
    "weights": "state_spread",
    "gradients": "state_spread",
    "optimizer": "state_spread",
    "gathered": "buffer_spread",
    "buffers": "buffer_spread",
    "sync_buffers": "buffer_spread",
    "activations": "activation_spread",
    "logits": "logits_spread",
    "cuda_graphs": "cuda_graph_bytes",
    "framework": "framework_bytes",
    "nccl": "nccl_bytes",
    "fragmentation": "fragmentation",
}
"""Coefficient whose interval a component takes over; one that is absent is exact by construction."""


@hashed_once
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Hashed):
    """The largest micro-batch of a call."""

    max_tokens: float
    """Longest sequence, prompt and response."""
    mean_tokens: float
    """Mean sequence; the maximum where sequences are padded."""
    deviation: float
    """Standard deviation of the length, tokens; 0 where sequences are padded."""
    sequences: int
    """Sequences of one optimizer step over all ranks."""

    def tokens(self, sequences: int) -> float:
        """Tokens of the fullest micro-batch of `sequences` that one must expect.

            min( b max, max( max, b mean + 4 sqrt(b) sd ) )

        One sequence of the maximal length will come; that all b are that long will not, when they
        are packed.
        """
        typical = sequences * self.mean_tokens + 4 * math.sqrt(sequences) * self.deviation
        return min(sequences * self.max_tokens, max(self.max_tokens, typical))


@lru_cache(maxsize=4096)
def batch_of(workload: Workload) -> Batch:
    """The lengths that memory is sized for."""
    prompt, response = stats(workload.prompt_len), stats(workload.response_len)
    longest = workload.prompt_len.maximum + workload.response_len.maximum
    mean, variance = longest, 0.0
    if workload.packing:
        mean = prompt.mean + response.mean
        variance = prompt.mean_square - prompt.mean**2 + response.mean_square - response.mean**2
    return Batch(
        max_tokens=longest,
        mean_tokens=mean,
        deviation=math.sqrt(max(0.0, variance)),
        sequences=workload.num_sequences // workload.mini_batches,
    )


@hashed_once
@dataclass(frozen=True, slots=True, kw_only=True)
class Stack(Hashed):
    """What a training framework does otherwise than its backend's default."""

    train_tokens: float | None = None
    """Tokens of a training micro-batch over its cp ranks; default micro_batch x longest sequence."""
    score_tokens: float | None = None
    """The same for scoring forwards."""
    gradient_bytes: float | None = None
    """Bytes per stored gradient element; default the backend's."""
    moment_bytes: float | None = None
    """Bytes of both Adam moments per element; default 8 (2 with the 8-bit optimizer)."""
    logit_bytes: float | None = None
    """Bytes per logit around the loss and in scoring; default 2 + 4 + 4."""
    logit_chunk: float | None = None
    """Tokens whose logits exist at once, where the head is computed in chunks."""
    flash: bool = True
    """Attention without a stored score matrix."""


DEFAULT_STACK = Stack()


class Extra(NamedTuple):
    """Bytes that a running call adds to its role's states."""

    gathered: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    fragmentation: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.gathered + self.buffers + self.activations + self.logits + self.fragmentation


class RoleBytes(NamedTuple):
    """One trained or scoring role on one GPU of one pipeline stage."""

    states: States
    """During a training call (a frozen role: weights only)."""
    kept: States
    """Between its calls; `host` is what then lies in host memory because of residency."""
    score: Extra
    train: Extra
    framework: float
    """CUDA context of its process; 0 where it shares another's."""
    nccl: float
    recreated: bool

    @property
    def idle(self) -> float:
        """GPU bytes between its calls."""
        return self.kept.total + (0.0 if self.recreated else self.framework + self.nccl)

    @property
    def training(self) -> float:
        """GPU bytes at the peak of its training call."""
        return self.states.total + self.train.total + self.framework + self.nccl

    @property
    def scoring(self) -> float:
        """GPU bytes at the peak of a forward call: its weights, and other states if they stay."""
        gradients, optimizer = self.kept.gradients, self.kept.optimizer
        held = self.states.weights + gradients + optimizer
        return held + self.score.total + self.framework + self.nccl

    @property
    def host(self) -> float:
        """Host bytes that belong to this GPU's process."""
        return self.states.host + self.kept.host


def role_bytes(
    model: ModelSpec,
    role: RolePlacement,
    *,
    backend: Backend,
    profile: Profile,
    batch: Batch,
    trained: bool,
    stage: Stage = "only",
    optimizer: Optimizer = "adam",
    lora: Lora | None = None,
    shares_weights: bool = False,
    shares_process: bool = False,
    stack: Stack = DEFAULT_STACK,
) -> RoleBytes:
    """What a role needs; `shares_weights`: a reference that is the frozen base of a LoRA policy."""
    layout = role.layout
    imbalance = profile["ep_hot_rank_factor"] if model.moe and layout.ep > 1 else 1.0
    here, score, train = _calls(
        model,
        layout,
        backend,
        trained,
        stage,
        optimizer,
        lora,
        shares_weights,
        batch,
        stack,
        imbalance,
        profile["fragmentation"] - 1,
    )
    return RoleBytes(
        states=here.states,
        kept=_kept(here.states, role, backend, trained),
        score=score,
        train=train,
        framework=0.0 if shares_process else profile["framework_bytes"],
        nccl=profile["nccl_bytes"] * here.communicators,
        recreated=role.residency == "recreated",
    )


def rested(part: RoleBytes, role: RolePlacement, *, backend: Backend, trained: bool) -> RoleBytes:
    """The bytes of a layout as `role_bytes` gives them, where something else happens between its calls."""
    kept = _kept(part.states, role, backend, trained)
    return part._replace(kept=kept, recreated=role.residency == "recreated")


@lru_cache(maxsize=65536)
def _calls(
    model: ModelSpec,
    layout: Layout,
    backend: Backend,
    trained: bool,
    stage: Stage,
    optimizer: Optimizer,
    lora: Lora | None,
    shares_weights: bool,
    batch: Batch,
    stack: Stack,
    imbalance: float,
    waste: float,
) -> tuple[_Standing, Extra, Extra]:
    """What stands, and what scoring and training add, whatever happens between the calls.

    `imbalance`: tokens of the fullest expert rank over the mean; `waste`: bytes that the caching
    allocator reserves for each byte of tensors that come and go.
    """
    here = _standing(
        model,
        memory.cut(layout),
        backend,
        trained,
        stage,
        optimizer,
        lora,
        shares_weights,
        stack.gradient_bytes,
        stack.moment_bytes,
    )
    tokens = batch.tokens(layout.micro_batch)
    score = _scoring(model, layout, backend, batch, tokens, here, stack, imbalance, waste)
    if not trained:
        return here, score, Extra()
    return (
        here,
        score,
        _training(model, layout, backend, batch, tokens, here, stage, stack, imbalance, waste),
    )


class _Standing(NamedTuple):
    """What a role holds and needs on a GPU whatever the micro-batch."""

    states: States
    gathered: float
    """ZeRO-3/FSDP weights of running layers."""
    buffers: float
    """Gradients before reduction."""
    step: float
    """Of the optimizer step alone."""
    communicators: int


@lru_cache(maxsize=65536)
def _standing(
    model: ModelSpec,
    cut: tuple[object, ...],
    backend: Backend,
    trained: bool,
    stage: Stage,
    optimizer: Optimizer,
    lora: Lora | None,
    shares_weights: bool,
    gradient_bytes: float | None,
    moment_bytes: float | None,
) -> _Standing:
    """States and buffers of a role under every layout with these fields."""
    layout = Layout(**dict(zip(memory.CUT, cut, strict=True)))  # type: ignore[arg-type]  # read from one
    part = memory.shard(model, layout, backend, stage)
    trainable = part
    if trained and lora is not None:
        base, adapters = memory.lora_states(model, part, layout, backend, lora, optimizer=optimizer)
        states = _joined(base, adapters)
        share = memory.lora_params(model, lora.rank) / model.num_params
        trainable = _scaled(part, share)
    elif trained:
        states = memory.trained_states(
            part,
            layout,
            backend,
            optimizer=optimizer,
            gradient_bytes=gradient_bytes,
            moment_bytes=moment_bytes,
        )
    else:
        states = States() if shares_weights else memory.frozen_states(part, layout)
    frozen_base = not trained or lora is not None
    copied = layout.zero == 3 or layout.offload_params != "none" or not frozen_base
    own = copied and not (shares_weights and not trained)  # BF16 weights in place need no copy
    return _Standing(
        states=states,
        gathered=memory.gathered_bytes(part, layout, backend) if own else 0.0,
        buffers=memory.gradient_buffer_bytes(trainable, layout, backend),
        step=memory.step_bytes(trainable, layout, backend),
        communicators=memory.communicators(layout),
    )


def _joined(base: States, adapters: States) -> States:
    weights, host = base.weights + adapters.weights, base.host + adapters.host
    return adapters._replace(weights=weights, host=host)


def _scaled(part: Shard, share: float) -> Shard:
    return replace(part, dense=part.elements * share, expert=0.0, layer=part.layer * share, root=0.0)


def _kept(states: States, role: RolePlacement, backend: Backend, trained: bool) -> States:
    """Between calls: an offloaded role keeps nothing on the GPU, `offload_between` only weights.

    FSDP2 frees gradients at the end of a step; DeepSpeed and Megatron keep their flat buffers.
    A frozen role that is created again reads its weights from disk; a trained one from the host.
    """
    if role.residency != "resident":
        away = states.weights + states.optimizer if trained or role.residency == "offloaded" else 0.0
        return States(host=away)
    gradients = 0.0 if backend == "fsdp2" else states.gradients
    if role.offload_between:
        return States(weights=states.weights, host=states.optimizer)
    return States(weights=states.weights, gradients=gradients, optimizer=states.optimizer)


def _training(
    model: ModelSpec,
    layout: Layout,
    backend: Backend,
    batch: Batch,
    tokens: float,
    here: _Standing,
    stage: Stage,
    stack: Stack,
    imbalance: float,
    waste: float,
) -> Extra:
    micro_batches = math.ceil(batch.sequences / (layout.dp * layout.micro_batch))
    held = activations.training_activations(
        model,
        layout,
        backend,
        tokens=stack.train_tokens or tokens,
        micro_batches=micro_batches,
        stage=stage,
        imbalance=imbalance,
        logit_chunk=stack.logit_chunk,
        score_length=0.0 if stack.flash else batch.max_tokens,
        logit_bytes=stack.logit_bytes or activations.LOGIT_BYTES_TRAIN,
    )
    if here.step > here.gathered + here.buffers + held.peak:
        return Extra(buffers=here.step)  # short batches: the optimizer step is the peak
    return _extra(here.gathered, here.buffers, held, waste)


def _scoring(
    model: ModelSpec,
    layout: Layout,
    backend: Backend,
    batch: Batch,
    tokens: float,
    here: _Standing,
    stack: Stack,
    imbalance: float,
    waste: float,
) -> Extra:
    held = activations.forward_activations(
        model,
        layout,
        backend,
        tokens=stack.score_tokens or tokens,
        imbalance=imbalance,
        logit_chunk=stack.logit_chunk,
        score_length=0.0 if stack.flash else batch.max_tokens,
        logit_bytes=stack.logit_bytes or activations.LOGIT_BYTES_FORWARD,
    )
    return _extra(here.gathered, 0.0, held, waste)


def _extra(gathered: float, buffers: float, held: Activations, waste: float) -> Extra:
    """A call's bytes with fragmentation; logits count where they are the peak."""
    logits = held.logits if held.logits > held.working else 0.0
    rest = held.peak - logits
    return Extra(gathered, buffers, rest, logits, (gathered + buffers + rest + logits) * waste)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBytes:
    """The inference engine on one GPU."""

    weights: float
    """Its own copy; 0 where it generates with the training weights."""
    kv_cache: float
    """Bytes of the KV pool; 0 when the engine cannot start."""
    kv_tokens: float
    """KV capacity of one replica, tokens."""
    profile_peak: float
    non_torch: float
    """Libraries and NCCL inside the engine's share."""
    cuda_graphs: float
    framework: float
    shortfall: float
    """Bytes by which weights and reserves exceed the engine's share of memory; 0 if it starts."""
    sleep: int
    recreated: bool

    @property
    def running(self) -> float:
        """GPU bytes while it generates."""
        reserves = self.profile_peak + self.non_torch + self.cuda_graphs + self.framework
        return self.weights + self.kv_cache + reserves

    @property
    def idle(self) -> float:
        """GPU bytes between rollouts: asleep it keeps context, libraries and graphs."""
        if self.recreated:
            return 0.0
        asleep = self.framework + self.non_torch + self.cuda_graphs
        return asleep if self.sleep else self.running

    @property
    def host(self) -> float:
        """Host bytes of this GPU's copy at sleep level 1."""
        return self.weights if self.sleep == 1 else 0.0


def engine_bytes(
    model: ModelSpec, role: RolloutPlacement, *, profile: Profile, shared_weights: float = 0.0
) -> EngineBytes:
    """The engine's split of memory; `shared_weights`: bytes that training already holds for it.

    The KV pool is what `memory_utilization` of the usable memory leaves (G7); CUDA graphs and the
    context come on top of that share.
    """
    layout = role.layout
    full = kv_cache.rollout_weights(model, layout)
    peak = kv_cache.profile_peak(model, layout, sampler_bytes_per_logit=profile["sampler_bytes_per_logit"])
    groups = (layout.tp > 1) + (layout.pp > 1) + (layout.attention_dp > 1)
    non_torch = profile["vllm_non_torch_bytes"] + groups * profile["nccl_bytes"]
    capacity = kv_cache.kv_capacity(
        model,
        layout,
        total_memory=profile.usable_memory.value,
        weights=full,
        activation_peak=peak,
        non_torch=non_torch,
    )
    level = max(role.sleep, 1) if role.residency == "offloaded" else role.sleep
    return EngineBytes(
        weights=max(0.0, full - shared_weights),
        kv_cache=max(0.0, capacity.bytes),
        kv_tokens=capacity.tokens,
        profile_peak=peak,
        non_torch=non_torch,
        cuda_graphs=profile["cuda_graph_bytes"] if layout.cuda_graphs else 0.0,
        framework=profile["framework_bytes"],
        shortfall=max(0.0, -capacity.bytes),
        sleep=level,
        recreated=role.residency == "recreated",
    )
