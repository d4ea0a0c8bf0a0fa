"""One RLHF step, priced: every call of the dataflow, the moves between them, and their order.

Closed forms (physics section 8). In a pool calls run one after the other; pools run side by side;
a call starts when its inputs and its pool are ready, so the synchronous step is the length of the
critical chain. With staleness the pools run side by side for good and the step is the slower side
(steady state) plus the exposed weight sync.

Not known here: contention on shared links and host memory, stragglers, queues between pools.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from rlhfsim.costs.cost import Cost, part, total
from rlhfsim.costs.device import Device
from rlhfsim.costs.devices import device_of
from rlhfsim.costs.sequences import Sequences
from rlhfsim.phases import offload
from rlhfsim.phases.forward import forward
from rlhfsim.phases.generation import Generation, Requests, generate
from rlhfsim.phases.training import train
from rlhfsim.phases.weight_sync import sync
from rlhfsim.specs.dataflow import Call, dataflow
from rlhfsim.specs.hardware import Cluster
from rlhfsim.specs.layout import RolloutLayout
from rlhfsim.specs.lengths import stats
from rlhfsim.specs.model import ModelSpec
from rlhfsim.specs.models import Models
from rlhfsim.specs.placement import Placement, RolloutSeat, Seat
from rlhfsim.specs.workload import Workload

CPU_POOL = "cpu"
"""Where rule rewards run."""
SYNC_POOL = "links"
STREAM_CHUNKS = 8
"""Pieces in which finished samples are handed to the scoring roles when they stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A call or a move between calls, with its place in time."""

    name: str
    """`actor.generate`, `rollout.wake`, `actor.reload`, ..."""
    pools: tuple[str, ...]
    start: float
    cost: Cost
    after: int | None
    """Index of the phase whose end let this one start; None at the start of the step."""

    @property
    def end(self) -> float:
        """Seconds from the start of the step."""
        return self.start + self.cost.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """A priced step."""

    phases: tuple[Phase, ...]
    critical: tuple[int, ...]
    """Indices of the phases that make up the step time, in order."""
    cost: Cost
    """The critical chain as one cost; its sum is the step time."""
    generation: Generation | None
    tokens: float
    """Prompt and response tokens of the step."""
    gpus: int

    @property
    def seconds(self) -> float:
        """Seconds per step (steady state where staleness is allowed)."""
        return self.cost.seconds

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Prompt and response tokens / step time / all GPUs, as NeMo-RL counts."""
        return self.tokens / self.seconds / self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that prices a call."""

    models: Models
    placement: Placement
    workload: Workload
    cluster: Cluster

    def device(self, seat: Seat | RolloutSeat) -> Device:
        """The device of the pool a seat sits in."""
        pool = self.cluster.pools[self.placement.pool(seat.pool).hardware]
        return device_of(pool, self.cluster.oversubscription)


def sequences_of(workload: Workload) -> Sequences:
    """All sequences of one epoch, prompt and response joined; the two lengths are independent."""
    prompt, response = stats(workload.prompt_len), stats(workload.response_len)
    mean = prompt.mean + response.mean
    variance = prompt.mean_square - prompt.mean**2 + response.mean_square - response.mean**2
    return Sequences(
        count=workload.num_sequences,
        mean=mean,
        mean_square=mean**2 + max(0.0, variance),
        maximum=workload.prompt_len.maximum + workload.response_len.maximum,
        packed=workload.packing,
    )


def iteration(
    models: Models,
    placement: Placement,
    workload: Workload,
    cluster: Cluster,
    *,
    kv_tokens: float | None = None,
) -> Iteration:
    """The priced step of a plan; `kv_tokens` is the KV capacity of one rollout replica."""
    setting = Setting(models=models, placement=placement, workload=workload, cluster=cluster)
    generation = generation_of(setting, kv_tokens)
    steps = [step for call in dataflow(workload) for step in _steps(setting, call, generation)]
    if placement.schedule.staleness > 0:
        phases, critical = _steady_state(setting, steps)
    else:
        phases, critical = _timetable(setting, steps)
    return Iteration(
        phases=phases,
        critical=critical,
        cost=total(phases[i].cost for i in critical),
        generation=generation,
        tokens=sequences_of(replace(workload, packing=True)).tokens,
        gpus=sum(pool.gpus for pool in placement.pools),
    )


# --- pricing of calls -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A priced call or move that waits for its place in time."""

    name: str
    pools: tuple[str, ...]
    cost: Cost
    needs: tuple[str, ...]


def generation_of(setting: Setting, kv_tokens: float | None) -> Generation | None:
    """The rollout stage; None where the algorithm or the placement has none."""
    seat, workload = setting.placement.rollout, setting.workload
    if seat is None or not workload.generates:
        return None
    requests = Requests(
        prompts=workload.prompts,
        samples=workload.samples,
        prompt_lengths=workload.prompt_len,
        response_lengths=workload.response_len,
        seed=workload.seed,
    )
    # the share of memory acts through the KV capacity alone
    layout = replace(seat.layout, memory_utilization=1.0) if kv_tokens else seat.layout
    return _generate(setting.device(seat), setting.models.actor, layout, requests, kv_tokens)


@lru_cache(maxsize=4096)
def _generate(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    requests: Requests,
    kv_tokens: float | None,
) -> Generation:
    return generate(device, model, layout, requests, kv_tokens=kv_tokens)


def _steps(setting: Setting, call: Call, generation: Generation | None) -> list[Step]:
    if call.role == "rules":
        return [
            Step(
                name=call.name,
                pools=(CPU_POOL,),
                cost=rules_cost(setting.workload),
                needs=call.needs,
            )
        ]
    if call.kind == "sync":
        return [_sync_step(setting, call)]
    if call.kind == "generate":
        assert generation is not None
        assert setting.placement.rollout is not None
        return _around(setting, call, setting.placement.rollout, generation.cost)
    seat = getattr(setting.placement, call.role)
    assert isinstance(seat, Seat), f"the placement has no seat for {call.role}"
    cost = (
        train_cost(setting, call.role, seat)
        if call.kind == "train"
        else forward_cost(setting, call, seat)
    )
    return _around(setting, call, seat, cost)


def rules_cost(workload: Workload) -> Cost:
    """Rule rewards on parallel CPU workers: n t / workers."""
    rules = workload.reward.rules
    assert rules is not None
    seconds = workload.num_sequences * rules.seconds_per_sample / rules.workers
    return Cost(parts=(part("host", seconds, "rules.seconds_per_sample"),))


def train_cost(setting: Setting, role: str, seat: Seat) -> Cost:
    """All epochs of one trained role."""
    workload = setting.workload
    cost = train(
        setting.device(seat), setting.models.of(role), seat.layout, sequences_of(workload), backend=setting.placement.backend,
        optimizer_steps=workload.mini_batches, optimizer=workload.optimizer,
        lora=workload.lora if role == "actor" else None, value_head=role == "critic",
    )  # fmt: skip
    return cost.scaled(workload.epochs)


def forward_cost(setting: Setting, call: Call, seat: Seat) -> Cost:
    """One scoring forward over the whole batch."""
    head = {"logprob": "logprob", "value": "value", "score": "score"}[call.kind]
    return forward(
        setting.device(seat), setting.models.of(call.role), seat.layout, sequences_of(setting.workload),
        backend=setting.placement.backend, head=head,
    )  # fmt: skip


def _sync_step(setting: Setting, call: Call) -> Step:
    placement = setting.placement
    assert placement.rollout is not None
    pools = tuple(dict.fromkeys((placement.actor.pool, placement.rollout.pool)))
    return Step(name=call.name, pools=pools, cost=sync_cost(setting), needs=call.needs)


def sync_cost(setting: Setting) -> Cost:
    """The weight path of the plan; `none` where rollout and training share one copy."""
    placement = setting.placement
    assert placement.rollout is not None
    priced = sync(
        placement.weight_path, setting.models.actor, placement.actor.layout, placement.rollout.layout,
        source=setting.device(placement.actor), target=setting.device(placement.rollout),
        backend=placement.backend, same_pool=placement.actor.pool == placement.rollout.pool, lora=setting.workload.lora,
    )  # fmt: skip
    return priced.cost


def _around(setting: Setting, call: Call, seat: Seat | RolloutSeat, cost: Cost) -> list[Step]:
    """A call between the moves that bring its role into GPU memory and out again."""
    before, after = offload.moves(
        setting.device(seat),
        setting.models.of(call.role),
        seat,
        call,
        setting.workload,
        setting.placement,
    )
    pools, name = (seat.pool,), call.name
    steps = []
    needs = call.needs
    if before.parts:
        steps.append(Step(name=f"{name}.load", pools=pools, cost=before, needs=needs))
        needs = (steps[-1].name,)
    steps.append(Step(name=name, pools=pools, cost=cost, needs=needs))
    if after.parts:
        steps.append(Step(name=f"{name}.unload", pools=pools, cost=after, needs=(name,)))
    return steps


# --- order in time --------------------------------------------------------------------------------


def _timetable(setting: Setting, steps: list[Step]) -> tuple[tuple[Phase, ...], tuple[int, ...]]:
    """Each step as soon as its pools are free and its inputs are there; then the critical chain."""
    free: dict[str, int] = {}
    index: dict[str, int] = {}
    phases: list[Phase] = []
    for step in steps:
        waits = [index[n] for n in step.needs if n in index] + [
            free[p] for p in step.pools if p in free
        ]
        after = max(waits, key=lambda i: phases[i].end, default=None)
        start = phases[after].end if after is not None else 0.0
        start, cost = _streamed(setting, step, start, phases, index)
        phases.append(Phase(name=step.name, pools=step.pools, start=start, cost=cost, after=after))
        index[step.name] = len(phases) - 1
        for pool in step.pools:
            free[pool] = len(phases) - 1
    return tuple(phases), _chain(phases)


def _streamed(
    setting: Setting, step: Step, start: float, phases: list[Phase], index: dict[str, int]
) -> tuple[float, Cost]:
    """With streaming, scoring in another pool hides all but its last piece behind generation."""
    source = index.get("actor.generate")
    streams = setting.placement.schedule.streaming or step.name == "rules.score"
    if (
        not streams
        or source is None
        or step.needs != ("actor.generate",)
        or phases[source].pools[0] in step.pools
    ):
        return start, step.cost
    generation = phases[source]
    hidden = min(step.cost.seconds, generation.cost.seconds) * (1 - 1 / STREAM_CHUNKS)
    return start, step.cost.scaled(1 - hidden / step.cost.seconds if step.cost.seconds else 1.0)


def _chain(phases: list[Phase]) -> tuple[int, ...]:
    chain = [max(range(len(phases)), key=lambda i: phases[i].end)] if phases else []
    while chain and (before := phases[chain[-1]].after) is not None:
        chain.append(before)
    return tuple(reversed(chain))


def _steady_state(setting: Setting, steps: list[Step]) -> tuple[tuple[Phase, ...], tuple[int, ...]]:
    """Generation beside everything else; the step is the slower side plus the exposed sync.

        T = max(T_gen', T_score + T_train) + T_sync          (sync overlapped: inside the max)

    T_gen' leaves out the tail when a replica may start on the next batch while the longest
    responses finish, that is with staleness above 1 or with partial rollouts (AReaL,
    arXiv 2505.24298); with staleness 1 each batch drains (one-step-off).
    """
    schedule = setting.placement.schedule
    sync_steps = [s for s in steps if s.name == "actor.sync"]
    producing = [s for s in steps if s.name.startswith("actor.generate")]
    learning = [s for s in steps if s not in producing and s not in sync_steps]
    if schedule.staleness > 1 or schedule.partial_rollout:
        producing = [replace(s, cost=_without_tail(s.cost)) for s in producing]
    learner, chain = _timetable(setting, learning)
    producer, _ = _timetable(setting, producing)
    exposed = [] if schedule.overlapped_sync else sync_steps
    slow_is_producer = sum(s.cost.seconds for s in producing) > sum(
        learner[i].cost.seconds for i in chain
    )
    offset = len(producer)
    critical = tuple(range(offset)) if slow_is_producer else tuple(offset + i for i in chain)
    ready = max((p.end for p in (*producer, *learner)), default=0.0)
    moved = [replace(p, after=p.after + offset if p.after is not None else None) for p in learner]
    tail = [
        Phase(name=s.name, pools=s.pools, start=ready, cost=s.cost, after=critical[-1])
        for s in exposed
    ]
    hidden = [
        Phase(name=s.name, pools=(SYNC_POOL,), start=0.0, cost=s.cost, after=None)
        for s in sync_steps
        if schedule.overlapped_sync
    ]
    phases = (*producer, *moved, *tail, *hidden)
    return phases, critical + tuple(range(offset + len(moved), offset + len(moved) + len(tail)))


def _without_tail(cost: Cost) -> Cost:
    return Cost(parts=tuple(p for p in cost.parts if p.resource != "tail"))
