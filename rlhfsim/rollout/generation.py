"""Generation of one batch of responses: prefill, decode with a long tail, KV capacity, replicas.

All sequences of the step are known at its start. Prompts (with their G samples) are dealt to the
replicas at random; each replica decodes its share to the end; the stage ends with the slowest
replica, so E[max] over replicas and not the max of means (G8). Where the KV cache or
`max_num_seqs` holds fewer sequences, finished ones are replaced (G9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhfsim.elementwise import alike, column, numbered
from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost, Part, Resource, part
from rlhfsim.kernels.device import Device
from rlhfsim.memory.kv_cache import engine_bytes
from rlhfsim.rollout.continuous_batching import (
    Ints,
    StepTable,
    Timeline,
    joined,
    lower_bound,
    stacked,
    tabulate,
)
from rlhfsim.rollout.decode import Engine, decode_step, own_name
from rlhfsim.rollout.engine_step import CURVE_SPREAD, RESOURCES, Floats, Spread, cost_of, on
from rlhfsim.rollout.oversampling import Aborted, aborted
from rlhfsim.rollout.prefill import beside, decoding, elsewhere, prompts
from rlhfsim.rollout.schedule import (
    Requests,
    SequenceSchedule,
    expected_lengths,
    expected_schedule,
    known_lengths,
    most_running,
    schedule,
)
from rlhfsim.rollout.speculative import speculative_step
from rlhfsim.rollout.turns import RESTS_ON, Waiting, delayed, waits
from rlhfsim.rollout.untimed import kernel_spread
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.layout_columns import (
    AnyRolloutLayout,
    RolloutLayouts,
    kind_of,
    rollout_columns_of,
)
from rlhfsim.specs.placement.placement import RolloutPlacement

__all__ = ["Generation", "Requests", "generate", "kv_capacity", "step_table"]

TAIL_SHARE = 0.25
"""The tail begins when fewer than this share of the slowest replica's first batch still runs."""
CONTEXT_POINTS = 9
FINISH_POINTS = 64
INTERVALS = 200_000
"""Intervals of constant n, of some stages together, that are integrated at once."""
WORKER_STEP = "rollout_step_overhead"
"""Coefficient: what the rollout worker of an RL framework adds to a decode step."""


@frozen
class Generation:
    """What a rollout stage takes and needs."""

    cost: Cost
    """Seconds of the slowest replica. `tail` is the decode time after fewer than `TAIL_SHARE` of its first
    batch still runs; the other parts leave that time out."""
    decode_tokens: float
    """Response tokens of all replicas, those thrown away included."""
    discarded_tokens: float = 0.0
    """Response tokens that are thrown away."""
    prefill_seconds: float
    """Part of `cost` before the first decode step, and recomputation after preemption."""
    running: float
    """Sequences that run at the start, on one replica."""
    waves: float
    """Sequences of a replica over those that run at a time: 1 when all start together."""
    preemptions: float
    """Sequences per replica that lose their KV cache once and recompute it."""
    kv_tokens: float
    """Most context of one replica at a time, tokens (shared prompts counted once)."""
    kv_capacity: float
    """Tokens that one replica holds."""
    longest_context: float
    """Longest prompt and response, tokens."""
    decode_steps: float
    """Steps of the slowest replica."""
    mean_step: float
    """Mean seconds of its decode steps."""
    mean_running: float
    """Sequences that run on average over the time of the slowest replica."""
    lower_bound: float
    """l_max tau(1), seconds: more replicas never go below it; 0 where the longest is not waited for."""
    finish: tuple[float, ...]
    """Seconds after which 1/64, 2/64, ... of all sequences have finished."""

    @property
    def seconds(self) -> float:
        """Duration of the stage."""
        return self.cost.seconds

    def scaled(self, factor: float) -> Generation:
        """The same stage with every time `factor` times as long."""
        if factor == 1:
            return self
        return replace(
            self,
            cost=self.cost.scaled(factor),
            prefill_seconds=self.prefill_seconds * factor,
            mean_step=self.mean_step * factor,
            lower_bound=self.lower_bound * factor,
            finish=tuple(t * factor for t in self.finish),
        )

    @property
    def fits(self) -> bool:
        """Whether the KV cache holds at least the longest sequence; below that no engine starts."""
        return self.longest_context <= self.kv_capacity

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second over all replicas."""
        return self.decode_tokens / self.seconds


class DecodeSteps(NamedTuple):
    """What decode steps are priced for, whatever the layout."""

    device: Device
    model: ModelSpec
    engine: Engine = "vllm"
    worker: bool = False
    """Whether a rollout worker of an RL framework takes its own time per step (`rollout_step_overhead`)."""
    adapters: bool = False


class Engines(NamedTuple):
    """What rollout layouts are priced for."""

    steps: DecodeSteps
    requests: Requests
    lengths: Floats | None = None
    """Observed response lengths, whole tokens; None: the expected order statistics."""

    def schedule(self, layout: RolloutLayout, capacity: float) -> SequenceSchedule:
        """Which sequence runs when, if none waits for an environment."""
        limit = most_running(layout, self.requests)
        if self.lengths is None:
            return expected_schedule(self.requests, layout.dp, limit, capacity)
        return schedule(self.lengths, self.requests, layout.dp, limit, capacity)

    def waiting(
        self, layout: RolloutLayout, capacity: float, plan: SequenceSchedule, table: StepTable
    ) -> tuple[SequenceSchedule, Waiting]:
        """The same where each sequence waits for its environment, and how long they wait."""
        requests, line = self.requests, plan.timeline
        assert requests.environment is not None
        known = expected_lengths(requests) if self.lengths is None else self.lengths
        waited = waits(requests.environment, requests.sequences, requests.seed + int(known.sum()))
        alone = table.between(line.running, line.start, line.start + line.steps).sum() / line.steps.sum()
        late = delayed(known, waited, float(alone))
        delays = schedule(late, requests, layout.dp, most_running(layout, requests), capacity)
        workers = requests.environment.workers / layout.dp
        waiting = Waiting(per_token=float(waited.sum() / known.sum()), workers=workers)
        return replace(delays, longest=plan.longest), waiting


def generate(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    requests: Requests,
    *,
    kv_tokens: float | None = None,
    lengths: Floats | None = None,
    engine: Engine = "vllm",
    worker: bool = False,
) -> Generation:
    """The rollout stage of `requests` on `layout.dp` replicas.

    `kv_tokens` is the KV capacity of one replica in tokens (see `kv_capacity`); `lengths` replaces
    the expected order statistics of the response lengths by observed ones. `worker`: see `DecodeSteps`.
    """
    known = None if lengths is None else known_lengths(requests, lengths)
    engines = Engines(DecodeSteps(device, model, engine, worker, requests.adapters), requests, known)
    capacity = kv_capacity(device, model, layout) if kv_tokens is None else kv_tokens
    [generation] = generations(engines, [layout], [capacity])
    return generation


def generations(
    engines: Engines, layouts: Sequence[RolloutLayout], capacities: Sequence[float]
) -> list[Generation]:
    """The rollout stage on each of some layouts, whose replicas hold `capacities` tokens; those that the same
    formulas price are priced as columns.

    Prompts are prefilled before their replica decodes; that passes of a refilled batch share weight reads is
    not counted.
    """
    found: dict[int, Generation] = {}
    for (_, apart), places in alike((kind_of(layout), layout.prefill > 0) for layout in layouts):
        rows = places.tolist()
        some, held = [layouts[row] for row in rows], [capacities[row] for row in rows]
        if apart:
            asked = engines._replace(requests=replace(engines.requests, prefills=False))
            decoded = _together(asked, list(map(decoding, some)), held)
            priced = [_beside(engines, *each) for each in zip(some, decoded, strict=True)]
        else:
            priced = _together(engines, some, held)
        found.update(zip(rows, priced, strict=True))
    return [found[row] for row in range(len(layouts))]


def _beside(engines: Engines, layout: RolloutLayout, decoded: Generation) -> Generation:
    """The same where some replicas only prefill."""
    (device, model, engine, *_), requests = engines.steps, engines.requests
    other, first = elsewhere(device, model, layout, requests, engine)
    turns = requests.answered.turns_each if requests.answered else 1.0
    steps = decoded.decode_tokens / requests.sequences / layout.tokens_per_step / turns
    cost = beside(decoded.cost, other, first, steps * decoded.mean_step)
    late = cost.seconds / decoded.seconds
    return replace(decoded, cost=cost, prefill_seconds=first, finish=tuple(t * late for t in decoded.finish))


def _together(
    engines: Engines, layouts: Sequence[RolloutLayout], capacities: Sequence[float]
) -> list[Generation]:
    """Those of one kind whose replicas do both."""
    plans = [engines.schedule(*each) for each in zip(layouts, capacities, strict=True)]
    slots, reach = [float(plan.slots) for plan in plans], plans[0].prompt + plans[0].longest
    tables = step_tables(engines.steps, layouts, slots, reach)
    waiting: list[Waiting | None] = [None] * len(plans)
    if engines.requests.environment is not None:
        delays = map(engines.waiting, layouts, capacities, plans, tables)
        plans, waiting = map(list, zip(*delays, strict=True))
        tables = step_tables(engines.steps, layouts, [float(plan.slots) for plan in plans], reach)
    first = _first(engines, layouts, plans)
    stages = [
        RolloutStage(*each).cut_off()
        for each in zip(layouts, capacities, tables, first, plans, waiting, strict=True)
    ]
    blocks = np.cumsum([len(stage.plan.timeline.steps) for stage in stages]) // INTERVALS
    return [
        generation
        for _, rows in alike(blocks.tolist())
        for generation in _decoded(engines, [stages[i] for i in rows.tolist()])
    ]


class RolloutStage(NamedTuple):
    """A rollout stage whose decode is not priced yet."""

    layout: RolloutLayout
    capacity: float
    table: StepTable
    first: Cost
    """Prefill."""
    plan: SequenceSchedule
    waiting: Waiting | None
    cut: Aborted | None = None
    """Where more groups are started than are waited for."""

    def cut_off(self) -> RolloutStage:
        """The stage up to the end of the groups that are waited for."""
        if self.plan.wanted is None:
            return self
        cut = aborted(self.plan, self.table, self.plan.wanted)
        return self._replace(plan=cut.plan, cut=cut)


def _first(
    engines: Engines, layouts: Sequence[RolloutLayout], plans: Sequence[SequenceSchedule]
) -> list[Cost]:
    """Prefill of one replica's prompts, and of what preempted sequences had generated."""
    costs, asked = [Cost() for _ in plans], engines.requests
    if asked.prefills:
        whole = [(layout, plan.each, plan.prompt) for layout, plan in zip(layouts, plans, strict=True)]
        costs = _prompts(engines, asked, whole)
    if rows := [row for row, plan in enumerate(plans) if plan.preempted]:
        each = [(plans[row].preempted, plans[row].recomputed / plans[row].preempted) for row in rows]
        evicted = [(layouts[row], *sizes) for row, sizes in zip(rows, each, strict=True)]
        again = _prompts(engines, replace(asked, samples=1, answered=None), evicted)
        for row, cost in zip(rows, again, strict=True):
            costs[row] += cost
    return costs


def _prompts(
    engines: Engines, asked: Requests, rows: Sequence[tuple[RolloutLayout, float, float]]
) -> list[Cost]:
    """Prefill of so many sequences, of so many tokens each, on a replica of each layout."""
    layouts, counts, lengths = zip(*rows, strict=True)
    layout = _columns(layouts)
    each, (device, model, engine, *_) = column(counts) / layout.attention_dp, engines.steps
    step = prompts(device, model, layout, each, asked, column(lengths), engine=engine)
    return step.costs(device, kernel_spread(device, model, layout))


def step_table(
    device: Device,
    model: ModelSpec,
    layout: RolloutLayout,
    most: float,
    longest: float,
    *,
    engine: Engine = "vllm",
    worker: bool = False,
    adapters: bool = False,
) -> StepTable:
    """Step time of one replica for up to `most` sequences and `longest` tokens of context."""
    [table] = step_tables(DecodeSteps(device, model, engine, worker, adapters), [layout], [most], longest)
    return table.rows(slice(int(np.searchsorted(table.sequences, _power(max(2.0, most)), side="right"))))


def step_tables(
    steps: DecodeSteps, layouts: Sequence[RolloutLayout], most: Sequence[float], longest: float
) -> list[StepTable]:
    """Step time of one replica of each layout for at least `most` sequences and `longest` tokens of context.

    `layouts` are of one kind; what is not known of them is worked out together.
    """
    known = _known(steps, kind_of(layouts[0]), reach := _power(longest))
    tops: dict[tuple[Any, ...], float] = {}
    names = list(map(_replica, layouts))
    for name, sequences in zip(names, most, strict=True):
        tops[name] = max(tops.get(name, 2.0), sequences)
    if new := [n for n, top in tops.items() if n not in known or known[n].sequences[-1] < top]:
        some = _columns([layouts[names.index(name)] for name in new])
        top = _power(max(tops[name] for name in new))
        known.update(zip(new, _tabulated(steps, some, top, reach), strict=True))
    return [known[name] for name in names]


_replica = attrgetter("tp", "pp", "ep", "attention_dp")
"""With its kind what a decode step reads of a layout."""


@lru_cache(maxsize=64)
def _known(steps: DecodeSteps, kind: object, reach: float) -> dict[tuple[int, ...], StepTable]:
    """Tables by replica."""
    return {}


def _power(least: float) -> float:
    """The first power of two that is no less."""
    power = 1.0
    while power < least:
        power *= 2
    return power


def _columns(layouts: Sequence[RolloutLayout]) -> AnyRolloutLayout:
    """Columns of layouts; one stays plain."""
    return rollout_columns_of(layouts) if len(layouts) > 1 else layouts[0]


def _tabulated(steps: DecodeSteps, layouts: AnyRolloutLayout, top: float, reach: float) -> list[StepTable]:
    """Step times of replicas for up to `top` sequences.

    With speculation a step over the tokens that it gives: the time per token of a sequence.

    With LoRA `adapters` the host launches two more products for every one of L layers and handles n
    sequences one by one, which bounds the step: at least L `adapter_layer_time` + n `adapter_sequence_time`.
    """
    device, model, engine, worker, adapters = steps
    powers = 2.0 ** np.arange(0, np.log2(top) + 1)
    between = np.concatenate([powers[:-1] * 1.5, powers[:-1] * 1.25, powers[:-1] * 1.75])
    n = np.unique(np.concatenate([powers, between[between >= 16]]))
    low = min(64.0, reach / 2)
    c = np.concatenate([[1.0], np.geomspace(low, max(reach, 2 * low), CONTEXT_POINTS)])
    if isinstance(layouts, RolloutLayouts):
        layouts = layouts.over(2)
    per_rank = np.maximum(n[:, None] / layouts.attention_dp, 1.0)
    if layouts.speculation is None:
        step = decode_step(device, model, layouts, per_rank, c, engine=engine)
    else:
        step = speculative_step(device, model, layouts, layouts.speculation, per_rank, c, engine=engine)
    if adapters:
        launch = device["adapter_layer_time"] * model.num_layers + device["adapter_sequence_time"] * per_rank
        step = step + on("overhead", np.maximum(0.0, launch - step.seconds))
    if worker:
        step = step + on("overhead", device[WORKER_STEP])
    every, each = tabulate(n, c, step.scaled(1.0 / layouts.tokens_per_step)), len(n)
    return [every.rows(slice(first, first + each)) for first in range(0, every.seconds.shape[1], each)]


def kv_capacity(device: Device, model: ModelSpec, layout: RolloutLayout) -> float:
    """Tokens of KV cache that one replica holds (G7), as in the ledger; 0 where the weights leave no room."""
    alone = RolloutPlacement(pool="alone", layout=layout)
    return float(engine_bytes(model, alone, profile=device.profile).kv_tokens)


def _decoded(engines: Engines, stages: Sequence[RolloutStage]) -> list[Generation]:
    """The stages with their decode, which is worked out over the intervals of all of them."""
    tables, places = numbered(stage.table for stage in stages)
    table, firsts = stacked(tables)
    first, replicas = firsts[places], [stage.layout.dp for stage in stages]
    line, of = joined([stage.plan.timeline for stage in stages], replicas)
    at = line.running, line.start, line.start + line.steps, first[of]
    decoding, hidden = line.running, np.zeros(len(of), bool)
    if waiting := [(stage.waiting.per_token, stage.waiting.workers) for stage in stages if stage.waiting]:
        per_token, workers = np.array(waiting)[of].T
        seconds, decoding, hidden = Waiting(per_token=per_token, workers=workers).paced(table, *at)
    else:
        seconds = table.between(*at)
    slow = _slowest(line.replica, seconds, replicas)
    begins = np.searchsorted(of[slow], np.arange(len(stages)))
    n, steps, spent = decoding[slow], line.steps[slow] / stages[0].layout.tokens_per_step, seconds[slow]
    where = n, line.start[slow], at[2][slow], at[3][slow]
    tail = line.running[slow] < TAIL_SHARE * line.running[slow][begins][of[slow]]
    shown = ~hidden[slow]  # decoding hides behind workers that answer no faster
    full = ~tail & shown
    decoded = table.between(*where) * shown if waiting else spent
    parts = (*(part * full for part in table.parts(*where).values()), decoded * tail)
    sums = np.add.reduceat((steps, steps * full, spent, n * spent, spent - decoded, *parts), begins, axis=1)
    prompt, longest = np.array([(stage.plan.prompt, stage.plan.longest) for stage in stages]).T
    figures = {
        "running": n[begins],
        "decode_steps": sums[0],
        "mean_step": sums[2] / sums[0],
        "mean_running": sums[3] / sums[2],
        "lower_bound": lower_bound(table, longest, prompt, first),
    }
    rows = [dict(zip(figures, row, strict=True)) for row in np.transpose([*figures.values()]).tolist()]
    each = zip(
        stages,
        sums.T.tolist(),
        rows,
        np.split(seconds, np.searchsorted(of, np.arange(1, len(stages)))),
        strict=True,
    )
    return [_generation(engines.steps, *stage) for stage in each]


def _slowest(replica: Ints, seconds: Floats, replicas: Sequence[int]) -> NDArray[np.bool_]:
    """Intervals of the first replica of each stage that takes longest; `replicas` of each."""
    each = np.bincount(replica, weights=seconds, minlength=sum(replicas))
    slowest, begin = np.zeros(len(each), bool), 0
    for count in replicas:
        slowest[begin + int(np.argmax(each[begin : begin + count]))] = True
        begin += count
    found: NDArray[np.bool_] = slowest[replica]
    return found


def _generation(
    steps: DecodeSteps, stage: RolloutStage, sums: Sequence[float], figures: dict[str, float], seconds: Floats
) -> Generation:
    """The stage with its cost, from sums over the slowest replica; `seconds` of the intervals of all."""
    plan, first, cut = stage.plan, stage.first, stage.cut
    device, model, engine, worker, _ = steps
    _, shown, _, _, waited, *parts = sums
    busy = dict(zip((*RESOURCES, "tail"), parts, strict=True))
    spread = kernel_spread(device, model, stage.layout)
    cost = first + steps_cost(device, stage.layout, busy, shown, engine, worker, spread)
    if stage.waiting is not None:
        cost += Cost(parts=(part("environment", waited, RESTS_ON),))
    if cut is not None:
        figures["lower_bound"] = 0.0
    return Generation(
        cost=cost,
        decode_tokens=plan.tokens,
        discarded_tokens=0.0 if cut is None else plan.tokens - cut.trained_tokens,
        prefill_seconds=first.seconds,
        waves=plan.each / plan.slots,
        preemptions=plan.preempted,
        kv_tokens=plan.kv_tokens,
        kv_capacity=stage.capacity,
        longest_context=plan.prompt + plan.longest,
        finish=_finish(plan.timeline, seconds, first.seconds) if cut is None else _points(cut, first.seconds),
        **figures,
    )


def _points(cut: Aborted, first: float) -> tuple[float, ...]:
    """Seconds until each 64th of the groups trained on has finished, prefill before decode."""
    at = np.ceil(np.arange(1, FINISH_POINTS + 1) / FINISH_POINTS * len(cut.finish)).astype(int) - 1
    return tuple((first + cut.finish[at]).tolist())


def steps_cost(
    device: Device,
    layout: RolloutLayout,
    busy: dict[Resource, float],
    steps: float,
    engine: Engine,
    worker: bool,
    kernels: Spread = CURVE_SPREAD,
) -> Cost:
    """`busy` of `steps` engine steps as a cost; what the host takes rests on what it takes it for.

    The scheduler's part has the interval of the engine's own coefficient, the rollout worker's that of
    `rollout_step_overhead`; the rest goes by sequence or, without CUDA graphs, into launches.
    """
    scheduler = own_name(device, "decode_step_overhead", engine)
    each = {scheduler: device[scheduler] * layout.pp}
    each |= {WORKER_STEP: device[WORKER_STEP]} if worker else {}
    left, parts = busy["overhead"], list[Part]()
    for name, seconds in each.items():
        taken = min(left, steps * seconds)
        left -= taken
        parts.append(part("overhead", taken, name, spread=device.spread(name)))
    rest = "decode_sequence_overhead" if layout.captured else "eager_decode_layer_time"
    name = own_name(device, rest, engine)
    parts.append(part("overhead", left, name, spread=device.spread(name)))
    timed = cost_of(device, {**busy, "overhead": 0.0}, kernels)
    return timed + Cost(parts=tuple(p for p in parts if p.seconds > 0))


def _finish(timeline: Timeline, seconds: Floats, first: float) -> tuple[float, ...]:
    """Seconds until each 64th of all sequences has finished, prefill before decode."""
    ends = np.cumsum(seconds)
    new = np.flatnonzero(np.diff(timeline.replica, prepend=-1))
    ends -= np.repeat(ends[new] - seconds[new], np.diff(np.append(new, len(seconds))))
    order = np.argsort(ends, kind="stable")
    done = np.cumsum(timeline.completions[order])
    wanted = np.arange(1, FINISH_POINTS + 1) / FINISH_POINTS * done[-1]
    at = np.minimum(np.searchsorted(done, wanted - 1e-9), len(ends) - 1)
    return tuple((first + ends[order[at]]).tolist())
