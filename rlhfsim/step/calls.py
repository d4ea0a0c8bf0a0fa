"""The calls of the dataflow, priced: generation, scoring, training, weight sync, and the moves around
them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

from rlhfsim.elementwise import Size, alike
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_on, with_engine
from rlhfsim.memory.kv_cache import BF16, draft_weights
from rlhfsim.memory.role_bytes import software_of
from rlhfsim.memory.routes import step_bytes, teacher_bytes
from rlhfsim.rollout.batches import one_after_the_other
from rlhfsim.rollout.collective_time import exchange_spread
from rlhfsim.rollout.decode import ENGINE_NAMES, Engine
from rlhfsim.rollout.environment import Turns, answered_at_least, halves, with_environment
from rlhfsim.rollout.generation import DecodeSteps, Engines, Generation, Requests, generations, kv_capacity
from rlhfsim.rollout.schedule import first_to_finish, known_lengths
from rlhfsim.rollout.steady_state import steady_state
from rlhfsim.specs.frameworks.runs import engine_of, runs_of
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import sums_fp32
from rlhfsim.specs.placement.drafts import training_work
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.layout_columns import AnyLayout
from rlhfsim.specs.placement.placement import AnyRolePlacement, Placement, RolePlacement, RolloutPlacement
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.measurable import OWN_LOSS
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.engine_mode import bias
from rlhfsim.step.framework_overhead import (
    MEASURED_PARTS,
    OWN_PARTS,
    controller,
    framework_call,
    launched_layers,
    routes,
    trains_pieces,
)
from rlhfsim.step.rule_rewards import rules_ahead, rules_cost, rules_latency, spread_of
from rlhfsim.step.timetable import Step
from rlhfsim.trace import CPU_POOL
from rlhfsim.training.forward import ScoredModel, forward
from rlhfsim.training.packing import pack_len, sequences_of
from rlhfsim.training.training import TrainedModel, micro_batches
from rlhfsim.weight_sync import offload
from rlhfsim.weight_sync.endpoints import PoolPair
from rlhfsim.weight_sync.weight_sync import SyncCost, sync

Batch: TypeAlias = tuple[Requests, tuple[float, ...] | None]
"""What engines are asked for at a time, and the response lengths that are drawn."""
Job: TypeAlias = tuple[
    tuple[Device, ModelSpec, Requests, tuple[float, ...] | None], RolloutLayout, float | None
]
"""A batch on a device, and the layout of its engines with the tokens that a replica holds."""
MOST_KNOWN = 4096
"""Generation batches from which on those that are known are forgotten."""
_KNOWN: dict[Job, Generation] = {}


@frozen
class CallSetting:
    """Everything that prices a call."""

    models: Models
    placement: Placement
    workload: Workload
    cluster: Cluster
    drawn: tuple[float, ...] | None = None
    """Response lengths of all that one step generates, tokens; None: expected order statistics."""

    @property
    def trained(self) -> tuple[float, ...] | None:
        """Response lengths that the step trains on; those that dynamic sampling keeps are as long as all."""
        if self.workload.oversampling and (asked := requests_of(self)).wanted is not None:
            return first_to_finish(asked, self.drawn)
        return None if self.drawn is None else self.drawn[: self.workload.num_sequences]

    def device(self, role: AnyRolePlacement) -> Device:
        """The device of the pool a role sits in."""
        hardware = self.placement.pool(role.pool).hardware
        device = device_on(self.cluster, hardware, self.placement.backend)
        return with_engine(device, self.engine) if isinstance(role, RolloutPlacement) else device

    def generator(self, rollout: RolloutPlacement) -> Device:
        """The device that generation is priced on: without a network where no replica leaves a domain."""
        device, layout = self.device(rollout), rollout.layout
        stays = layout.prefill == 0 and layout.replica_gpus <= device.domain
        return device.inside if stays and device.inside else device

    @property
    def engine(self) -> Engine:
        """Whose attention kernels generate; host time inside an RL framework is known with vLLM's alone."""
        rollout = self.placement.rollout
        if rollout is not None and rollout.layout.engine is not None:
            return rollout.layout.engine
        runs = runs_of(self.cluster.framework)
        return ENGINE_NAMES.get(runs.engine, "vllm") if runs else "vllm"


def generation_of(setting: CallSetting, kv_tokens: float | None) -> Generation | None:
    """The rollout stage with its environment; None where the algorithm or the placement has none."""
    [generation] = generations_of([setting], [kv_tokens])
    return generation


def generations_of(
    settings: Sequence[CallSetting], kv_tokens: Sequence[float | None]
) -> list[Generation | None]:
    """The same of some settings, whose batches are priced together."""
    batches = list(map(_batches, settings))
    asked = zip(settings, kv_tokens, batches, strict=True)
    priced = iter(_rollouts([(setting, held, batch) for setting, held, some in asked for batch in some]))
    return [
        _whole(setting, some, [next(priced) for _ in some])
        for setting, some in zip(settings, batches, strict=True)
    ]


def _batches(setting: CallSetting) -> list[Batch]:
    """What engines are asked for at a time: batches of dynamic sampling, or all of a step, then those that
    take turns; nothing where the algorithm or the placement has no rollout."""
    if setting.placement.rollout is None or not setting.workload.generates:
        return []
    asked, drawn = requests_of(setting), setting.drawn
    if setting.workload.dynamic_sampling is None:
        return [(asked, drawn), *_buffers(setting)]
    if drawn is None:
        return [(asked, drawn)]
    return [(asked, drawn[i : i + asked.sequences]) for i in range(0, len(drawn), asked.sequences)]


def _whole(setting: CallSetting, batches: Sequence[Batch], priced: Sequence[Generation]) -> Generation | None:
    """The stage with its environment, or of batches until the step is full: as many as drawn, or those of the
    mean step."""
    workload = setting.workload
    if not batches:
        return None
    if workload.dynamic_sampling is not None:
        count = workload.gen_batches if setting.drawn is None else len(batches)
        trained = stats(workload.response_len).mean * workload.num_sequences
        return one_after_the_other(priced, count, sum(setting.trained) if setting.trained else trained)
    turns = _turns(setting, batches[1:], priced[1:])
    return priced[0] if turns is None else with_environment(priced[0], turns)


def _in_lockstep(setting: CallSetting) -> bool:
    """Whether all sequences of a batch, or of half of one, take their turns together."""
    environment = setting.workload.environment
    double_buffered = setting.placement.schedule.double_buffered
    return environment is not None and (environment.lockstep or double_buffered)


def turns_of(setting: CallSetting, kv_tokens: float | None) -> Turns | None:
    """Generation and environment by turns: the whole batch, or two halves that alternate."""
    batches = _buffers(setting)
    return _turns(setting, batches, _rollouts([(setting, kv_tokens, batch) for batch in batches]))


def _buffers(setting: CallSetting) -> list[Batch]:
    """The batches that take turns with the environment; none where none waits for another."""
    workload = setting.workload
    if setting.placement.rollout is None or not workload.generates or not _in_lockstep(setting):
        return []
    requests, twice = requests_of(setting), setting.placement.schedule.double_buffered
    asked = [replace(requests, prompts=n) for n in halves(workload.prompts, twice)]
    drawn = iter(setting.drawn or ())
    return [(half, tuple(islice(drawn, half.sequences)) or None) for half in asked]


def _turns(setting: CallSetting, batches: Sequence[Batch], priced: Sequence[Generation]) -> Turns | None:
    environment = setting.workload.environment
    if not batches or environment is None:
        return None
    return Turns(
        buffers=tuple(generation.cost for generation in priced),
        sequences=tuple(requests.sequences for requests, _ in batches),
        environment=environment,
    )


def _rollouts(asked: Sequence[tuple[CallSetting, float | None, Batch]]) -> list[Generation]:
    """A batch on the engines of each setting, with what runs of its framework say."""
    jobs, found = [], []
    for setting, kv_tokens, (requests, drawn) in asked:
        role = setting.placement.rollout
        assert role is not None
        engines = setting.generator(role), setting.models.actor, requests, drawn
        jobs.append((engines, _rollout_layout(role, kv_tokens), kv_tokens))
    for (setting, *_), priced in zip(asked, _generated(jobs), strict=True):
        role = setting.placement.rollout
        assert role is not None
        if role.layout.open_dispatcher or role.layout.speculation:
            priced = replace(priced, cost=_widened(setting, role, priced.cost))
        found.append(priced.scaled(bias_of(setting, "actor.generate")))
    return found


def _widened(setting: CallSetting, role: RolloutPlacement, cost: Cost) -> Cost:
    """The cost of generation with what a dispatcher that is not said, and an acceptance, leave open."""
    layout, device = role.layout, setting.device(role)
    if layout.speculation is not None:
        for resource in cost.by_resource():
            cost = cost.widened(resource, layout.speculation.spread)
    inside = layout.tp * layout.attention_dp <= device.domain
    spread = exchange_spread(device, setting.models.actor, layout)
    return cost.widened("nvlink" if inside else "network", spread)


def requests_of(setting: CallSetting) -> Requests:
    """What the rollout engine is asked for: a generation batch, or what a step needs if it never drains."""
    workload, path, env = setting.workload, setting.placement.weight_path, setting.workload.environment
    sampling, prompts = workload.dynamic_sampling, workload.gen_prompts
    if sampling is not None and setting.placement.schedule.continuous:
        prompts = math.ceil(workload.prompts / sampling.kept)
    if workload.oversampling and setting.placement.schedule.continuous:
        prompts = workload.prompts  # what is left over goes on into the next batch
    return Requests(
        prompts=prompts,
        wanted=workload.prompts if workload.oversampling and prompts > workload.prompts else None,
        samples=workload.samples,
        prompt_lengths=workload.prompt_len,
        response_lengths=workload.response_len,
        seed=workload.seed,
        adapters=WEIGHT_PATHS[path].adapters_only if path != "none" else False,
        environment=None if _in_lockstep(setting) else workload.environment,
        answered=None if env is None or (not env.answer_tokens and env.prefix_reuse == 1) else env,
    )


def _rollout_layout(role: RolloutPlacement, kv_tokens: float | None) -> RolloutLayout:
    # the share of memory acts through the KV capacity alone
    return replace(role.layout, memory_utilization=1.0) if kv_tokens else role.layout


def continuous_cost(setting: CallSetting, kv_tokens: float | None) -> Cost | None:
    """Generation per batch where the engine never drains: staleness above 1 or partial rollouts."""
    role, schedule = setting.placement.rollout, setting.placement.schedule
    if role is None or not setting.workload.generates or not schedule.continuous:
        return None
    cost = steady_state(
        setting.generator(role),
        setting.models.actor,
        _rollout_layout(role, kv_tokens),
        requests_of(setting),
        staleness=schedule.staleness,
        interrupted=schedule.partial_rollout,
        kv_tokens=kv_tokens,
        worker=True,
    ).cost
    cost = _widened(setting, role, cost)
    return answered_at_least(cost.scaled(bias_of(setting, "actor.generate")), setting.workload)


def _generated(jobs: Sequence[Job]) -> list[Generation]:
    """Each batch on its engines; those that are not known are priced together."""
    if len(_KNOWN) >= MOST_KNOWN:
        _KNOWN.clear()
    new = [job for job in dict.fromkeys(jobs) if job not in _KNOWN]
    known = {job: _KNOWN[job] for job in jobs if job in _KNOWN}
    for (device, model, requests, drawn), rows in alike(job[0] for job in new):
        lengths = None if drawn is None else known_lengths(requests, drawn)
        steps = DecodeSteps(device, model, worker=True, adapters=requests.adapters)
        some = [new[row] for row in rows.tolist()]
        held = [kv_capacity(device, model, layout) if kv is None else kv for _, layout, kv in some]
        engines = Engines(steps, requests, lengths)
        priced = generations(engines, [layout for _, layout, _ in some], held)
        known.update(zip(some, priced, strict=True))
    _KNOWN.update(known)
    return [known[job] for job in jobs]


def steps_of(setting: CallSetting, call: Call, generation: Generation | None) -> list[Step]:
    """A call with the moves around it, in order."""
    if call.role == "rules":
        return [
            Step(
                name=call.name,
                pools=(CPU_POOL,),
                cost=rules_cost(setting.workload, setting.cluster),
                needs=call.needs,
                streams=True,
                ahead=rules_ahead(setting.workload, setting.cluster.framework),
                latency_s=rules_latency(setting.workload),
            )
        ]
    if call.kind == "sync":
        return _sync_steps(setting, call)
    if call.kind == "generate":
        assert generation is not None
        assert setting.placement.rollout is not None
        return _around(setting, call, setting.placement.rollout, generation.cost)
    role = setting.placement.role(call.role)
    assert role is not None, f"the placement has no role for {call.role}"
    cost = train_cost(setting, call.role, role) if call.kind == "train" else forward_cost(setting, call, role)
    return _around(setting, call, role, cost)


def bias_of(setting: CallSetting, phase: str, pool: str | None = None) -> float:
    """Measured over priced seconds of a phase, where runs of the framework say so; else 1."""
    params = setting.models.params_of(phase)
    known = bias(phase, params, setting.placement, setting.workload, setting.cluster, pool)
    return 1.0 if known is None else known.factor.value


def train_cost(setting: CallSetting, role: str, placed: RolePlacement) -> Cost:
    """All epochs of one trained role."""
    return trainer(setting, role, placed)(placed.layout)


class Pricing(NamedTuple):
    """What prices a call of a role under any layout in its pool."""

    passes: Callable[[AnyLayout], Cost]
    """With what a framework adds; the same wherever an optimizer lies."""
    updates: Callable[[AnyLayout], Cost] | None = None
    """Cost of the optimizer's updates, where the call trains; see `TrainedModel.updates`."""

    def __call__(self, layout: Layout) -> Cost:
        """The whole call in one layout."""
        passes = self.passes(layout)
        return passes if self.updates is None else passes + self.updates(layout)


def trainer(setting: CallSetting, role: str, placed: RolePlacement) -> Pricing:
    """What prices all epochs of a trained role under any layout in the pool of `placed`.

    One that learns from pairs alone runs as in pre-training.
    """
    workload, model = setting.workload, setting.models.of(role)
    if role == "critic" and not model.value_head:
        model = replace(model, value_head=True)
    asked = TrainedModel(
        device=setting.device(placed),
        model=model,
        sequences=sequences_of(workload, setting.trained),
        backend=setting.placement.backend,
        steps=workload.mini_batches,
        optimizer=workload.optimizer,
        lora=workload.lora if role == "actor" else None,
        software=_software(setting),
        precision=workload.train_precision,
    )
    factor = workload.epochs * bias_of(setting, f"{role}.train", placed.pool)
    work = 1 + (training_work(model, workload.speculation) if role == "actor" else 0.0)

    def passes(layout: AnyLayout, packs: Size | None) -> Cost:
        return asked.passes(layout, packs).scaled(work)

    def updates(layout: AnyLayout) -> Cost:
        return asked.updates(layout).scaled(factor)

    priced = _caller(setting, f"{role}.train", placed, passes)
    each = workload.custom.loss * workload.epochs if role == "actor" else 0.0
    if not each:
        return Pricing(priced, updates)

    def with_own_loss(layout: AnyLayout) -> Cost:
        seconds = each * workload.num_sequences / layout.dp
        spread = spread_of(OWN_LOSS, workload.custom.loss, setting.cluster)
        rests_on = OWN_PARTS if spread is None else MEASURED_PARTS
        return priced(layout) + Cost(parts=(part("compute", seconds, rests_on, spread=spread or (1.0, 1.0)),))

    return Pricing(with_own_loss, updates)


def _caller(
    setting: CallSetting, name: str, placed: RolePlacement, price: Callable[[AnyLayout, Size | None], Cost]
) -> Callable[[AnyLayout], Cost]:
    """The same with what a framework adds, and the bias of its phase; `price`: of a layout and its packs."""
    workload, drawn, device = setting.workload, setting.trained, setting.device(placed)
    role, trained = name.split(".")[0], name.endswith(".train")
    sequences, layers = sequences_of(workload, drawn), round(setting.models.of(role).launched_layers)
    steps, epochs = (workload.mini_batches, workload.epochs) if trained else (1, 1)
    factor = epochs * bias_of(setting, name, placed.pool)

    def cost(layout: AnyLayout) -> Cost:
        packs = pack_len(workload, layout, drawn, scoring=not trained)
        priced = price(layout, packs)
        if workload.generates:
            count = steps * micro_batches(layout, sequences, steps, packs, scoring=not trained)[1]
            priced = framework_call(device, priced, launched_layers(layout, layers, count, trained=trained))
        return priced.scaled(factor)

    return cost


def _software(setting: CallSetting) -> Software:
    """What the training stack of a framework does; gradients in BF16 are two bytes on the wire."""
    workload, placement = setting.workload, setting.placement
    runs, software = runs_of(setting.cluster.framework), stack_of(setting)
    if runs is not None and runs.copies_each:
        software = replace(software, copies_each=True)
    if workload.gradients == "bf16":
        return replace(software, reduce_bytes=2.0)
    return replace(software, fp32_sums=True) if sums_fp32(workload, placement.backend) else software


def stack_of(setting: CallSetting) -> Software:
    """The plan's training stack, with the head of its framework where it names none."""
    placement, cluster, workload = setting.placement, setting.cluster, setting.workload
    return software_of(
        placement.software,
        cluster.framework,
        placement.backend,
        packing=workload.packing,
        algorithm=workload.algorithm,
    )


def forward_cost(setting: CallSetting, call: Call, placed: RolePlacement) -> Cost:
    """One scoring forward over the whole batch."""
    return scorer(setting, call, placed)(placed.layout)


def scorer(setting: CallSetting, call: Call, placed: RolePlacement) -> Pricing:
    """What prices one scoring forward over the whole batch under any layout in the pool of `placed`."""
    assert call.kind in ("logprob", "value", "score"), call.name
    workload = setting.workload
    asked = ScoredModel(
        device=setting.device(placed),
        model=setting.models.of(call.role),
        sequences=sequences_of(workload, setting.trained),
        backend=setting.placement.backend,
        head=call.kind,
        precision=workload.train_precision,
        lora=workload.lora if call.role == "actor" else None,
        software=stack_of(setting),
        trained=call.role in TRAINED,
    )
    return Pricing(_caller(setting, call.name, placed, partial(forward, asked)))


def passed_on(setting: CallSetting) -> dict[str, Cost]:
    """Phase -> what passing on the experts that the rollout chose, or the teacher's logits, takes."""
    work = setting.workload
    sizes = {
        "router.replay": step_bytes(setting.models.actor, work, engine_of(setting.cluster.framework)),
        "teacher.logits": teacher_bytes(work),
    }
    device = setting.device(setting.placement.actor)
    return {name: routes(device, size) for name, size in sizes.items() if size}


def controller_cost(setting: CallSetting) -> Cost:
    """The controller's own work in a step."""
    return controller(setting.device(setting.placement.actor))


def _sync_steps(setting: CallSetting, call: Call) -> list[Step]:
    """The weight path; around it the actor's moves where a role that was moved out comes back to send.

    `blocking_moves` is 0 where frameworks send before they offload, as on GPUs.
    """
    placement, actor = setting.placement, setting.placement.actor
    assert placement.rollout is not None
    pools = tuple(dict.fromkeys((actor.pool, placement.rollout.pool)))
    sent = Step(name=call.name, pools=pools, cost=sync_cost(setting), needs=call.needs)
    device = setting.device(actor)
    if actor.residency == "resident" or not device["blocking_moves"]:
        return [sent]
    training = Call(role="actor", kind="train")  # all its states move, whatever the call
    before, after = offload.moves(device, setting.models.actor, actor, training, setting.workload, placement)
    load, unload = f"{call.name}.load", f"{call.name}.unload"
    return [
        Step(name=load, pools=(actor.pool,), cost=before, needs=call.needs),
        replace(sent, needs=(load,)),
        Step(name=unload, pools=(actor.pool,), cost=after, needs=(call.name,)),
    ]


def planned_sync(setting: CallSetting) -> SyncCost:
    """The weight path of the plan; `none` where rollout and training share one copy."""
    placement = setting.placement
    assert placement.rollout is not None
    return sync(
        placement.weight_path,
        setting.models.actor,
        placement.actor.layout,
        placement.rollout.layout,
        PoolPair(
            setting.device(placement.actor),
            setting.device(placement.rollout),
            placement.actor.pool == placement.rollout.pool,
        ),
        placement.backend,
        setting.workload.lora,
    )


def sync_cost(setting: CallSetting) -> Cost:
    """Time of the plan's weight sync.

    Raises:
        RlhfsimError: the path cannot join these two layouts.
    """
    priced = planned_sync(setting)
    if not priced.available:
        raise RlhfsimError(
            "weight-path-unavailable",
            f"weight path {setting.placement.weight_path!r} cannot be used: {priced.why_not}",
            help="compare the paths with: rlhfsim sync",
        )
    return priced.cost.scaled(bias_of(setting, "actor.sync") * _with_draft(setting))


def _with_draft(setting: CallSetting) -> float:
    """Bytes of the policy with a draft that is trained along with it, over those of the policy alone."""
    if not setting.workload.trains_draft:
        return 1.0
    model = setting.models.actor
    drafted = RolloutLayout(speculation=setting.workload.speculation)
    return 1 + float(draft_weights(model, drafted)) / (BF16 * model.num_params)


def _around(setting: CallSetting, call: Call, role: AnyRolePlacement, cost: Cost) -> list[Step]:
    """A call between the moves that bring its role into GPU memory and out again."""
    before, after = offload.moves(
        setting.device(role), setting.models.of(call.role), role, call, setting.workload, setting.placement
    )
    pools, name = (role.pool,), call.name
    steps = []
    needs = call.needs
    if before.parts:
        steps.append(Step(name=f"{name}.load", pools=pools, cost=before, needs=needs))
        needs = (steps[-1].name,)
    whole = call.kind == "train" and not trains_pieces(setting.workload, setting.placement.backend)
    streams = not (before.parts or after.parts or whole or call.kind == "generate")
    steps.append(Step(name=name, pools=pools, cost=cost, needs=needs, streams=streams))
    if after.parts:
        steps.append(Step(name=f"{name}.unload", pools=pools, cost=after, needs=(name,)))
    return steps
