"""What every role holds on one of its GPUs: between its calls, during them, and on the host.

A role's call needs its states, the buffers that gather and reduce them, activations or logits, and
what the allocator wastes. `memory.components` says which of these bytes are there at which moment.

Not known here: memory that a framework's caching allocator keeps from a finished call (it is taken
to be emptied at every switch), and copies during start and checkpointing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial, reduce
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlhfsim.elementwise import alike, distinct, each, numbered
from rlhfsim.memory import activations
from rlhfsim.memory import states as memory
from rlhfsim.memory.activations import Activations
from rlhfsim.memory.layer_tensors import RoutedExperts, layer_tensors, one_layer
from rlhfsim.memory.logits import Size
from rlhfsim.memory.routes import COPIES, INDEX, step_bytes, teacher_bytes, token_bytes
from rlhfsim.memory.states import BF16, FP32, Optimizer, Shard, Stage, States
from rlhfsim.specs.frameworks.runs import frameworks
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import Backend, sums_fp32
from rlhfsim.specs.placement.drafts import draft_of, own_params
from rlhfsim.specs.placement.layout import Layout, Recompute
from rlhfsim.specs.placement.layout_columns import Layouts, columns_of
from rlhfsim.specs.placement.placement import Rest, RolePlacement
from rlhfsim.specs.placement.software import Software, default_software
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.micro_batch import BatchLengths, batch_lengths
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.specs.workload.workload import Algorithm, Lora, Workload


@cache
def software_of(
    given: Software | None,
    framework: str | None,
    backend: Backend,
    *,
    packing: bool = True,
    algorithm: Algorithm | None = None,
) -> Software:
    """The training stack of a plan, with the head of its framework where the plan names none."""
    known = next((x for x in frameworks() if x.name == framework), None)
    if known is None:
        return given or default_software(backend)
    known = known.by(algorithm)
    software = given or known.software.get(backend) or default_software(backend)
    frees = software.frees_gradients
    return replace(
        software,
        head=software.head
        or (known.heads if packing else {**known.heads, **known.padded_heads}).get(backend),
        frees_gradients=backend in known.frees_gradients if frees is None else frees,
        frees_experts=software.frees_experts or known.frees_experts,
    )


class Extra(NamedTuple):
    """Bytes that a running call adds to its role's states."""

    gathered: Size = 0.0
    buffers: Size = 0.0
    activations: Size = 0.0
    logits: Size = 0.0
    fragmentation: Size = 0.0


class RoleBytes(NamedTuple):
    """One trained or scoring role on one GPU of one pipeline stage; of many layouts sizes are arrays."""

    states: States
    """During a training call (a frozen role: weights only)."""
    kept: States
    """Between its calls; `host` is what then lies in host memory because of residency."""
    score: Extra
    train: Extra
    framework: float
    """CUDA context of its process; 0 where it shares another's."""
    nccl: Size
    recreated: bool

    @property
    def training(self) -> Size:
        """GPU bytes at the peak of its training call."""
        return self.states.total + sum(self.train) + self.framework + self.nccl

    @property
    def host(self) -> float:
        """Host bytes that belong to this GPU's process."""
        return self.states.host + self.kept.host


NOTHING = RoleBytes(
    states=States(), kept=States(), score=Extra(), train=Extra(), framework=0.0, nccl=0.0, recreated=False
)
"""A role that runs on another one's weights."""


class RoleKind(NamedTuple):
    """What decides a role's bytes in addition to its layout and its micro-batch."""

    model: ModelSpec
    backend: Backend
    trained: bool
    optimizer: Optimizer
    lora: Lora | None
    software: Software
    fp8: bool
    """Matrix products of training keep their inputs in FP8."""
    routes: float = 0.0
    """Bytes of the experts that the rollout chose for a step, of the whole batch."""
    logits: float = 0.0
    """The same of the teacher's largest logits."""
    draft: Speculation | None = None
    """The draft that is trained with the policy, on the last pipeline stage."""
    one_group: bool = False
    """FSDP gathers all its weights at once."""


class RoleMemory(NamedTuple):
    """What decides a role's bytes in addition to its layout and what happens between its calls."""

    kind: RoleKind
    batch: BatchLengths
    imbalance: float
    """Tokens of the fullest expert rank over the mean, where experts are spread."""
    waste: float
    """Bytes that the caching allocator reserves for each byte of tensors that come and go."""
    framework: float
    nccl: float
    """Bytes of a communicator."""
    borrowed: bool
    """It runs on another role's weights and holds nothing."""

    def of(self, placed: RolePlacement, stage: Stage = "only") -> RoleBytes:
        """What the role holds on a GPU of `stage`."""
        if self.borrowed:
            return NOTHING
        held = _alone(self, placed.layout, stage, placed.residency == "swapped")
        kept = kept_states(held.states, placed, self.kind)
        return held._replace(kept=kept, recreated=placed.residency == "recreated")

    def each(self, layouts: Layouts, stage: Stage, *, swapped: bool = False) -> RoleBytes:
        """What the role holds on a GPU of `stage` in each layout: arrays, one entry a layout.

        What is kept between calls is left open. `swapped`: a reference in place of the actor, whose modules
        run; no bytes of its own lie on the GPU. On the host one shard as the actor stores it (FP32 under
        FSDP2) all the time, and as much of the actor's while the reference runs (`States.host` of the call).
        Source: NeMo-RL, use_reference_model of dtensor_policy_worker_v2.py (01a0e455b) and
        megatron_policy_worker.py (7ea279ab, line 1971: non-blocking copies to the CPU, which PyTorch pins),
        both in page-locked memory; slime, `_switch_model` and utils/tensor_backper.py (which keeps the
        actor's too).
        """
        kind = self.kind._replace(trained=True) if swapped else self.kind
        cuts = distinct(*(getattr(layouts, name) for name in memory.CUT))
        standing = _stood(kind, *cuts, stage)
        forward, backward = self._activations(kind, layouts, stage, standing.layers)
        score = _extra(standing.gathered, 0.0, forward, self.waste)
        if swapped:
            return RoleBytes(States(host=standing.states.weights), States(), score, Extra(), 0.0, 0.0, False)
        again = standing.again * (self.batch.each(layouts)[1] > 1)
        kept = standing.experts * (layouts.recompute == "none")
        standing = standing._replace(
            buffers=standing.buffers + again,
            at_loss=standing.at_loss + again * np.logical_or(kind.software.sums_whole, standing.layer > 0),
            gathered=standing.gathered + kept,
        )
        train = _training(standing, backward, self.waste) if kind.trained else Extra()
        nccl = self.nccl * standing.communicators
        return RoleBytes(standing.states, States(), score, train, self.framework, nccl, False)

    def standing_bytes(self, cuts: Sequence[tuple[Any, ...]]) -> Size:
        """GPU bytes of a training call without activations and buffers, on the fullest pipeline stage, of the
        layouts with these fields (`memory.states.CUT`)."""
        ends: tuple[Stage, ...] = ("first", "last")
        rows, places = numbered(cuts)
        held = [_stood(self.kind, rows, places, stage) for stage in ends]
        totals = (x.states.total + self.nccl * x.communicators + self.framework for x in held)
        return reduce(np.maximum, totals)

    def _activations(
        self, kind: RoleKind, layouts: Layouts, stage: Stage, layers: Size
    ) -> tuple[Activations, Activations]:
        """Activations of scoring, and of training where the role is trained: by groups of like layouts."""
        tokens, micro_batches = self.batch.each(layouts)
        found = np.zeros((2, len(Activations._fields), len(layouts)))
        piped = layouts.pp > 1
        for rows in filter(len, map(np.flatnonzero, (piped, ~piped))):
            layout = layouts.only(rows)
            passed = _passed(
                kind,
                layout,
                stage if piped[rows[0]] else "only",
                *tokens[:, rows],
                micro_batches=micro_batches[rows],
                longest=self.batch.max_tokens,
                imbalance=np.where(layout.ep > 1, self.imbalance, 1.0),
            )
            for held, call in zip(found, passed, strict=False):
                held[:, rows] = np.stack(np.broadcast_arrays(*call))
            if kind.routes and kind.model.moe:
                found[:, 0, rows] += (
                    token_bytes(kind.model, "", INDEX) / (layout.pp * layout.tp * layout.cp) * tokens[:, rows]
                )
            if kind.trained:
                columns = layout.tp, layout.etp, layout.recompute, layers[rows]
                share = each(partial(_share_kept, kind), *columns)
                for kept in ("saved", "layer"):
                    found[1, Activations._fields.index(kept), rows] *= share
        return Activations(*found[0]), Activations(*found[1])


@lru_cache(maxsize=4096)
def _alone(memory: RoleMemory, layout: Layout, stage: Stage, swapped: bool) -> RoleBytes:
    """What a role holds in one layout, as numbers."""
    held = memory.each(columns_of([layout]), stage, swapped=swapped)

    def numbers(sizes: Sequence[Size]) -> list[float]:
        return [float(np.max(size)) for size in sizes]

    score, train = Extra(*numbers(held.score)), Extra(*numbers(held.train))
    states, nccl = States(*numbers(held.states)), float(np.max(held.nccl))
    return RoleBytes(states, States(), score, train, held.framework, nccl, False)


def role_memory(
    models: Models,
    role: str,
    workload: Workload,
    *,
    backend: Backend,
    profile: Profile,
    beside_actor: bool = False,
    software: Software | None = None,
    engine: str = "",
) -> RoleMemory:
    """What a role of a workload holds under any layout; `beside_actor`: a reference in the actor's pool;
    `engine`: of the rollout.

    Where adapters are trained it holds nothing: the actor's base gives its log-probs.
    """
    software = software or default_software(backend)
    if sums_fp32(workload, backend):
        software = replace(software, gradient_bytes=FP32)
    if workload.gradients == "bf16" and backend == "megatron":
        software = replace(software, gradient_bytes=BF16)
    if software.head is not None:
        software = replace(software, head=software.head.of(role))
    model = models.of(role)
    if software.fp32_combine and model.moe is not None:
        model = replace(model, moe=replace(model.moe, fp32_combine=True))
    kind = RoleKind(
        model=model,
        backend=backend,
        trained=role in TRAINED,
        optimizer=workload.optimizer,
        lora=workload.lora if role == "actor" else None,
        software=software,
        fp8=workload.train_precision == "fp8",
        routes=step_bytes(model, workload, engine) if role == "actor" else 0.0,
        logits=teacher_bytes(workload) if role == "actor" else 0.0,
        draft=workload.speculation if role == "actor" and workload.trains_draft else None,
        one_group=role == "reference" and software.whole_reference and not software.flat_parameters,
    )
    return RoleMemory(
        kind=kind,
        batch=batch_lengths(workload),
        imbalance=profile["ep_hot_rank_factor"] if model.moe and not software.balanced else 1.0,
        waste=profile["fragmentation"] - 1,
        framework=0.0 if beside_actor and backend != "deepspeed" else profile["framework_bytes"],
        nccl=profile["nccl_bytes"],
        borrowed=beside_actor and workload.base_is_reference,
    )


def most_host(stages: Sequence[RoleBytes]) -> float:
    """Host bytes for each GPU of the node with the fullest pipeline stages.

    A stage is taken to fill its node; where several are on one, theirs is less than this.
    """
    return max(part.host for part in stages)


def kept_states(states: States, role: RolePlacement | Rest, kind: RoleKind) -> States:
    """Between calls: an offloaded role keeps nothing on the GPU, `offload_between` only weights.

    `states` may hold arrays. Of gradients a resident role keeps what stays from step to step, unless a
    framework gives that back.
    A frozen role that is created again reads its weights from disk; a trained one from the host.
    """
    if role.residency == "swapped":
        return States(host=states.host)
    if role.residency != "resident":
        away = states.weights + states.optimizer if kind.trained or role.residency == "offloaded" else 0.0
        return States(host=away)
    if role.offload_between:
        return States(weights=states.weights, host=states.optimizer)
    kept = 0.0 if kind.software.frees_gradients else states.between
    return states._replace(gradients=kept, between=0.0, host=0.0)


class _Standing(NamedTuple):
    """What a role holds and needs on a GPU whatever the micro-batch; of many layouts sizes are arrays."""

    states: States
    gathered: Size
    """ZeRO-3/FSDP weights of running layers."""
    buffers: Size
    """Gradients before reduction."""
    at_loss: Size
    """The part of these that is there at the loss."""
    again: Size
    """Gradients of a further micro-batch."""
    experts: Size
    """Weights of experts that a pass without recomputation keeps gathered."""
    layer: Size
    """BF16 gradients of a layer, where FSDP2 reduces them together."""
    running: Size
    """Weights of a running layer that are not there at the loss."""
    step: Size
    """Bytes of the optimizer step alone."""
    layers: Size
    """Bytes of this stage's layers."""
    communicators: Size = 0


OWN = _Standing._fields[1:-1]
"""What a `_Standing` says of arrays other than states and communicators."""
Cut: TypeAlias = tuple[Any, ...]
"""Fields `memory.states.CUT` of a layout."""
_DP = memory.CUT.index("dp")
_parted = itemgetter(*map(memory.CUT.index, memory.PARTED))


def _states(
    kind: RoleKind, layout: Layout, part: memory.Shard, plain: float | None
) -> tuple[memory.States, memory.Shard]:
    """States of a role, and the elements of it that are trained; `plain`: see `Software.plain`."""
    backend, lora, software = kind.backend, kind.lora, kind.software
    if not kind.trained:
        return memory.frozen_states(part, layout, width=plain or BF16), part
    if lora is None and plain:
        return memory.plain_states(part, layout, plain, kind.optimizer), part
    if lora is None:
        states = memory.trained_states(
            part,
            layout,
            backend,
            optimizer=kind.optimizer,
            gradient_bytes=software.gradient_bytes,
            moment_bytes=software.moment_bytes,
            weight_bytes=software.weight_bytes,
        )
        return states, part
    base, own = memory.lora_states(
        kind.model,
        part,
        layout,
        backend,
        lora,
        optimizer=kind.optimizer,
        base_width=plain or software.base_bytes if lora.base == "bf16" else None,
        gradient_bytes=FP32 if _fp32_sums(kind) else None,
    )
    states = own._replace(
        weights=base.weights + software.adapters * own.weights,
        gradients=software.adapters * own.gradients,
        between=software.adapters * own.between,
        host=base.host + own.host,
    )
    return states, memory.adapter_shard(kind.model, part, layout, lora)


def _fp32_sums(kind: RoleKind) -> bool:
    """Whether DeepSpeed adds gradients up in FP32."""
    return kind.backend == "deepspeed" and kind.software.gradient_bytes == FP32


def _gathered(kind: RoleKind, layout: Layout, part: memory.Shard, plain: float | None) -> Size:
    """Weights on top of the states while layers compute: gathered, cast to BF16, or widened from 4 bit."""
    lora, software = kind.lora, kind.software
    if plain and lora is None:
        return memory.cast_bytes(part, plain)
    frozen_base = not kind.trained or lora is not None
    cast = not frozen_base and software.weight_bytes != BF16
    if layout.zero == 3 or layout.offload_params != "none" or not frozen_base:  # else BF16 in place
        return memory.gathered_bytes(
            part, layout, kind.backend, flat=software.flat_parameters, cast=cast, whole=kind.one_group
        )
    return BF16 * part.layer if kind.trained and lora is not None and lora.base == "nf4" else 0.0


def _standing(kind: RoleKind, layout: Layout, part: memory.Shard) -> _Standing:
    """States and buffers of a role on GPUs with the elements of `part`, under layouts that are alike
    (`states.cut_alike`)."""
    backend, software, fp32_sums = kind.backend, kind.software, _fp32_sums(kind)
    reduced = software.reduce_bytes or FP32
    plain = software.plain(layout, trained=kind.trained)
    states, trainable = _states(kind, layout, part, plain)
    buffers = memory.gradient_buffer_bytes(
        trainable,
        layout,
        backend,
        overlap=software.overlaps_reduction,
        fp32_sums=fp32_sums,
        flat=software.flat_parameters,
        reduced=reduced,
    )
    scatters = memory.reduce_scatters(layout, backend)
    by_layer = scatters and not software.flat_parameters
    again = memory.summed_again(trainable, layout, backend, fp32_sums=fp32_sums)
    if scatters and software.sums_whole:
        width = BF16 if software.flat_parameters else reduced
        again = memory.summed_whole(trainable, states.gradients, width)
    return _Standing(
        states=states,
        gathered=_gathered(kind, layout, part, plain),
        buffers=buffers,
        at_loss=buffers * memory.loss_share(layout, backend),
        again=again,
        experts=0.0 if software.frees_experts else memory.experts_kept(part, layout, backend),
        layer=BF16 * trainable.layer * by_layer,
        running=BF16 * part.layer * (by_layer and layout.zero == 3),
        step=0.0 if plain else memory.step_bytes(trainable, layout, backend, fp32_sums=fp32_sums),
        layers=part.num_layers,
    )


def _stood(kind: RoleKind, cuts: Sequence[Cut], places: Any, stage: Stage) -> _Standing:
    """The same of many layouts, each with one of some cuts, at its place: arrays."""
    sizes = _stood_each(kind, tuple(cuts), stage)[:, places]
    states, own = np.split(sizes[:-1], [len(States._fields)])
    named = dict(zip(OWN, own, strict=True))
    return _Standing(States(*states), **named, communicators=sizes[-1])


@lru_cache(maxsize=16)
def _stood_each(kind: RoleKind, cuts: tuple[Cut, ...], stage: Stage) -> NDArray[np.float64]:
    """(sizes, cuts) of that, communicators last: the same whatever the lengths of sequences."""
    sizes = np.zeros((len(States._fields) + len(OWN) + 1, len(cuts)))
    parted, of = numbered(map(_parted, cuts))
    parts = memory.stacked([_part(kind, stage if part[1] > 1 else "only", part) for part in parted])
    for _, rows in alike(memory.cut_alike(kind.lora is not None, *cut) for cut in cuts):
        layout = Layout(**dict(zip(memory.CUT, cuts[rows[0]], strict=True)))
        held = _standing(kind, layout, parts.only(np.array(of)[rows]))
        for row, size in zip(sizes, (*held.states, *held[1:-1]), strict=False):
            row[rows] = size
    if passed := COPIES * (kind.routes + kind.logits):
        sizes[States._fields.index("host")] += passed / np.array([cut[_DP] for cut in cuts])
    sizes[-1] = np.array([memory.communicators(*part) for part in parted])[of]
    return sizes


def _part(kind: RoleKind, stage: Stage, cut: memory.Parted) -> Shard:
    """Elements of a pipeline stage, with those of a draft that is trained."""
    part = memory.shard_of(kind.model, kind.backend, stage, cut)
    draft = None if kind.draft is None or stage == "first" else draft_of(kind.model, kind.draft)
    if kind.draft is None or draft is None:
        return part
    tp, _, *rest = cut
    layer = memory.shard_of(draft, kind.backend, "only", (tp, 1, *rest))
    dense = part.dense + layer.dense - layer.root + own_params(kind.model, kind.draft) / tp
    return replace(part, dense=dense, expert=part.expert + layer.expert)


def _training(standing: _Standing, backward: Activations, waste: float) -> Extra:
    """What training adds; with short batches the optimizer step is the peak.

    Where FSDP2 reduces gradients layer by layer, the FP32 ones of a layer are there when it has run: next to
    all BF16 ones of the layer and its input's, or to the next layer, but not to what it had saved.
    """
    waiting = standing.buffers - standing.at_loss
    after = np.maximum(0.0, standing.layer + backward.input - backward.working)
    waiting = np.where(standing.layer > 0, np.maximum(0.0, waiting + after - backward.layer), waiting)
    backward = backward._replace(logits=backward.logits - standing.running)
    buffers = standing.at_loss + backward.beside(waiting)
    call = _extra(standing.gathered, buffers, backward, waste)
    stepping = standing.step > standing.gathered + buffers + backward.peak
    alone = Extra(buffers=standing.step)
    return Extra(*(np.where(stepping, a, b) for a, b in zip(alone, call, strict=True)))


def _passed(
    kind: RoleKind,
    layout: Layouts,
    stage: Stage,
    scored: Size,
    trained: Size,
    *,
    micro_batches: Size,
    longest: float,
    imbalance: Size,
) -> tuple[Activations, ...]:
    """Activations of scoring micro-batches of `scored` tokens, and of training ones of `trained` tokens where
    the role is trained, wherever its states lie.

    `longest`: tokens of the longest sequence; `imbalance`: tokens of the fullest expert rank over the mean.
    """
    software = kind.software
    score_length = 0.0 if software.flash else longest
    scoring = [
        activations.forward_activations(
            model,
            layout,
            kind.backend,
            tokens=scored,
            imbalance=imbalance,
            score_length=score_length,
            head=software.head,
        )
        for model in kind.model.each
    ]
    forward = Activations(*(reduce(np.maximum, of_each) for of_each in zip(*scoring, strict=True)))
    if kind.lora is not None and kind.backend != "megatron":  # peft scales what adapters add: one tensor more
        scaled = BF16 * kind.model.ffn / layout.tp / layout.cp
        forward = forward._replace(working=forward.working + scaled * scored)
    if not kind.trained:
        return (forward,)
    backward = activations.training_activations(
        kind.model,
        layout,
        kind.backend,
        activations.MicroBatches(
            tokens=trained, count=micro_batches, imbalance=imbalance, score_length=score_length
        ),
        stage=stage,
        fp8=kind.fp8 and kind.backend == "megatron",
        software=software,
        frozen=kind.lora is not None,
    )
    return forward, backward


_ACTIVATION = ("mlp_activation_input", "mlp_activation")
_DROPPED: Mapping[str, tuple[str, ...]] = {
    "mlp": _ACTIVATION,
    "mla_up_proj": ("query_key_value",),
    "moe_act": ("expert_mlp_activation",),
    "moe": (
        "router",
        "dispatched",
        "combined",
        *(f"{owner}_{tensor}" for owner in ("expert", "shared") for tensor in _ACTIVATION),
    ),
    "layernorm": ("attention_input", "mlp_input"),
}
"""Module of Megatron's selective recomputation -> saved tensors that it computes again."""


def _share_kept(kind: RoleKind, tp: int, etp: int, recompute: Recompute, layers: float) -> float:
    """Share of the saved activations that stays on the GPU: not on the host, not computed again by module."""
    software = kind.software
    if software.inputs_kept is not None:
        return min(1.0, software.inputs_kept / layers)
    names = [tensor for module in software.recomputed for tensor in _DROPPED.get(module, ())]
    if not names or recompute == "full":
        return 1.0
    dropped = total = 0.0
    for one in kind.model.kinds:
        tensors = layer_tensors(
            kind.model, tp, RoutedExperts(etp), sequence_parallel=tp > 1, kind=one_layer(one), fp8=kind.fp8
        )
        dropped += one.layers * sum(tensors.saved.get(name, 0.0) for name in names)
        total += one.layers * tensors.total
    return 1.0 - dropped / total


def _extra(gathered: Size, buffers: Size, held: Activations, waste: float) -> Extra:
    """A call's bytes with fragmentation; logits count where they are the peak."""
    logits = np.where(held.logits > held.working, held.logits, 0.0)
    rest = held.peak - logits
    return Extra(gathered, buffers, rest, logits, (gathered + buffers + rest + logits) * waste)
