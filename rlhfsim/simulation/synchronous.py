"""The synchronous step: calls in program order on their pools, links shared, samples streamed.

The program of `step.iteration` on the clock. A call starts when its inputs are there and all calls
before it in its pools have left; a step starts when the one before has ended everywhere. Calls that
take samples as they arrive (`step.timetable.streaming_steps`) run in `STREAM_CHUNKS` pieces,
each when generation has finished its samples; a pool takes all its calls for one piece before the
next. With an environment generation runs in turns, and with two buffers they alternate.

Without shared links every start is that of `step.timetable.timetable`. Links only delay calls and
the order in a pool is fixed, so a step is never shorter than its closed form; but a call that gets
faster may meet another on a link and delay it (Graham's anomaly, SIAM J. Appl. Math. 17(2), 1969).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import simpy

from rlhfsim.kernels.cost import Cost, part, total
from rlhfsim.rollout.environment import RESTS_ON, Turns
from rlhfsim.simulation.shared_links import Flow, use_of
from rlhfsim.simulation.simulator import Done, Running, Simulator
from rlhfsim.specs.placement.placement import Schedule
from rlhfsim.step.iteration import Iteration, Program
from rlhfsim.step.timetable import ROLLOUT, STREAM_CHUNKS, Phase, Step, chain, streaming_steps
from rlhfsim.trace import CPU_POOL

ANSWER = "environment.answer"


@dataclass(slots=True, eq=False)
class Ran:
    """One step that has run."""

    program: Program
    begin: float = 0.0
    end: float = 0.0
    done: dict[str, Done] = field(default_factory=dict)
    """Every call, seconds from the start of the simulation."""
    streamed: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.end - self.begin

    def iteration(self) -> Iteration:
        """Phases as in the closed form, each after the one that it waited for longest.

        A streamed call shows the part that is left when its inputs and its pool are done.
        """
        phases: list[Phase] = []
        index: dict[str, int] = {}
        free: dict[str, int] = {}
        for step in self.program.steps:
            waits = [index[n] for n in step.needs if n in index]
            waits += [free[p] for p in step.pools if p in free]
            after = max(waits, key=lambda i: phases[i].end, default=None)
            phases.append(self._phase(step, phases, after))
            index[step.name] = len(phases) - 1
            free |= dict.fromkeys(step.pools, len(phases) - 1)
        critical = chain(phases)
        return Iteration(
            phases=tuple(phases),
            critical=critical,
            cost=total(phases[i].cost for i in critical),
            generation=self.program.generation,
            tokens=self.program.tokens,
            gpus=self.program.gpus,
        )

    def _phase(self, step: Step, phases: Sequence[Phase], after: int | None) -> Phase:
        ran = self.done[step.name]
        start, cost, work = ran.start - self.begin, ran.cost, None
        if step.name in self.streamed:
            start, work = phases[after].end if after is not None else 0.0, cost.seconds
            if work > 0:
                left = max(0.0, ran.end - self.begin - start)
                cost = cost.scaled(left / work)
        return Phase(name=step.name, pools=step.pools, start=start, cost=cost, after=after, work_s=work)


def run_steps(simulator: Simulator, programs: Sequence[Program], schedule: Schedule) -> tuple[Ran, ...]:
    """Steps back to back, one program each."""
    steps: list[Ran] = []

    def all_steps() -> Running:
        for number, program in enumerate(programs):
            ran = Ran(program=program, begin=simulator.env.now)
            steps.append(ran)
            yield simulator.all_of(_Launch(simulator, ran, schedule, number).processes)
            ran.end = simulator.env.now

    simulator.env.run(until=simulator.env.process(all_steps()))
    return tuple(steps)


class _Launch:
    """The processes of one step, queued in program order."""

    def __init__(self, simulator: Simulator, ran: Ran, schedule: Schedule, number: int) -> None:
        self.simulator = simulator
        self.ran = ran
        self.number = number
        program = ran.program
        finish = program.generation.finish if program.generation else None
        streamed: list[Step] = []
        if finish:
            streamed = streaming_steps(list(program.steps), schedule)
        ran.streamed = frozenset(s.name for s in streamed)
        self.finish = finish if streamed else None
        self.arrived = [simulator.env.event() for _ in range(STREAM_CHUNKS)]
        self.ended: dict[str, simpy.Event] = {}
        self.early: list[tuple[set[str], simpy.Event]] = []
        """Pools and ends of the calls that take samples as they arrive."""
        self.processes: list[simpy.Event] = []
        for step in program.steps:
            if step.name in ran.streamed:
                if step is streamed[0]:
                    self._pieces(streamed)
            else:
                self.ended[step.name] = self._start(step)

    def _start(self, step: Step) -> simpy.Event:
        # a program is sorted: what a call needs comes before it, or in no step of this iteration
        needs = [self.ended[n] for n in step.needs if n in self.ended]
        # as in the closed form, a pool goes on when the latency of a call that took samples early is over
        needs += [event for pools, event in self.early if pools & set(step.pools)]
        turn = self.simulator.queue(step.pools)

        def process() -> Running:
            yield self.simulator.all_of([turn.ready, *needs])
            if step.name == ROLLOUT:
                self.ran.done[step.name] = yield from self._rollout(step)
            else:
                self.ran.done[step.name] = yield from self.simulator.work(
                    step, self.number, version=self.number
                )
            turn.leave()

        return self._launch(process())

    def _launch(self, process: Running) -> simpy.Event:
        self.processes.append(self.simulator.env.process(process))
        return self.processes[-1]

    # --- streaming ------------------------------------------------------------------------------------

    def _pieces(self, streamed: list[Step]) -> None:
        shares = [replace(s, cost=s.cost.scaled(1 / STREAM_CHUNKS)) for s in streamed]
        for piece in range(STREAM_CHUNKS):
            for step, share in zip(streamed, shares, strict=True):
                needs = [self.ended[n] for n in step.needs if n in self.ended and n != ROLLOUT]
                self.ended[step.name] = self._piece(step, share, piece, needs)
        self.early = [(set(step.pools), self.ended[step.name]) for step in streamed]

    def _piece(self, step: Step, share: Step, piece: int, needs: list[simpy.Event]) -> simpy.Event:
        turn = self.simulator.queue(step.pools)

        def process() -> Running:
            yield self.simulator.all_of([turn.ready, self.arrived[piece], *needs])
            ran = yield from self.simulator.work(share, self.number, version=self.number, piece=piece)
            turn.leave()
            arrived = self.arrived[piece].value
            assert arrived is not None, "it was waited for"
            soonest = arrived + step.latency_s
            yield self.simulator.env.timeout(max(0.0, soonest - ran.end))
            end = max(ran.end, soonest)
            before = self.ran.done.get(step.name, Done(start=ran.start, end=end, cost=step.cost))
            waited = Cost(parts=ran.cost.parts[len(share.cost.parts) :])
            self.ran.done[step.name] = replace(before, end=end, cost=before.cost + waited)

        return self._launch(process())

    def _hand_on(self, share: float) -> None:
        """Pieces up to this share of the samples are there."""
        for piece, event in enumerate(self.arrived):
            if not event.triggered and (piece + 1) / STREAM_CHUNKS <= share * (1 + 1e-9):
                event.succeed(self.simulator.env.now)

    # --- generation -----------------------------------------------------------------------------------

    def _rollout(self, step: Step) -> Generator[simpy.Event, Any, Done]:
        """Generation; meanwhile the KV cache is counted at the most that a replica comes to hold."""
        simulator, generation = self.simulator, self.ran.program.generation
        simulator.kv_cache(generation.kv_tokens if generation else 0.0)
        if self.finish or self.ran.program.turns:
            done = yield from self._generate(step)
        else:
            done = yield from simulator.work(step, self.number, version=self.number)
        if not self.ran.program.turns and _generated(step.cost) < step.cost.seconds:
            simulator.recorder.span(ANSWER, CPU_POOL, self.number, done.start, done.end, "environment")
        simulator.kv_cache(0.0)
        return done

    def _generate(self, step: Step) -> Generator[simpy.Event, Any, Done]:
        simulator, start = self.simulator, self.simulator.env.now
        if simulator.memory_timeline is not None:
            simulator.memory_timeline.begin(step.name, start)
        if self.ran.program.turns is not None:
            cost = yield from self._in_turns(step, self.ran.program.turns)
        else:
            cost = yield from self._in_pieces(step)
        if simulator.memory_timeline is not None:
            simulator.memory_timeline.end(step.name, simulator.env.now)
        self._hand_on(1.0)
        done = Done(start=start, end=simulator.env.now, cost=cost)
        if self.ran.program.turns is None:
            simulator.record(step, done, self.number, version=self.number)
        return done

    def _in_pieces(self, step: Step) -> Generator[simpy.Event, Any, Cost]:
        """Generation up to each piece of finished samples, then the rest."""
        assert self.finish is not None
        use = use_of(step.cost, self.simulator.links(step.pools))
        pace = _pace(step.cost, self.ran.program)
        extra, reached = Cost(), 0.0
        for piece in range(1, STREAM_CHUNKS + 1):
            until = pace * self.finish[-(-piece * len(self.finish) // STREAM_CHUNKS) - 1]
            extra += yield from self._segment(until - reached, use)
            reached = max(reached, until)
            self._hand_on(piece / STREAM_CHUNKS)
        extra += yield from self._segment(step.cost.seconds - reached, use)
        return step.cost + extra

    def _segment(self, seconds: float, use: dict[str, float]) -> Generator[simpy.Event, Any, Cost]:
        if seconds <= 0:
            return Cost()
        flow: Flow = yield self.simulator.shared_links.start(seconds, use).done
        return Cost(parts=flow.contention)

    def _in_turns(self, step: Step, turns: Turns) -> Generator[simpy.Event, Any, Cost]:
        """Buffers take turns on the GPUs; the environment answers one while the other generates."""
        simulator, start = self.simulator, self.simulator.env.now
        uses = [use_of(cost, simulator.links(step.pools)) for cost in turns.buffers]
        answered = [simulator.all_of([]) for _ in turns.buffers]
        pace, last = _pace(step.cost, self.ran.program), simulator.all_of([])
        buffers = [cost.scaled(pace) for cost in turns.buffers]
        extra = Cost()
        for turn in range(turns.count):
            for b, cost in enumerate(buffers):
                yield answered[b]
                begin = simulator.env.now
                extra += yield from self._segment(cost.seconds / turns.count, uses[b])
                for pool in step.pools:
                    simulator.recorder.span(
                        step.name,
                        pool,
                        self.number,
                        begin,
                        simulator.env.now,
                        str(cost.bound_by),
                        version=self.number,
                        turn=turn,
                        buffer=b,
                    )
                last = answered[b] = simulator.env.process(self._answer(turns, b, turn, last))
        yield simulator.all_of(answered)
        generated = total(buffers) + extra
        waits = simulator.env.now - start - generated.seconds
        return generated + Cost(parts=(part("environment", max(0.0, waits), RESTS_ON),))

    def _answer(self, turns: Turns, buffer: int, turn: int, before: simpy.Event) -> Running:
        """The environment answers a buffer, after the other one where workers are short."""
        simulator = self.simulator
        if not turns.side_by_side:
            yield before
        begin = simulator.env.now
        yield simulator.env.timeout(turns.answer(buffer, turn))
        simulator.recorder.span(
            ANSWER, CPU_POOL, self.number, begin, simulator.env.now, "environment", group=f"buffer {buffer}"
        )
        if turn == turns.count - 1:  # the first buffer is the first to end
            self._hand_on(sum(turns.sequences[: buffer + 1]) / sum(turns.sequences))


def _pace(cost: Cost, program: Program) -> float:
    """Seconds that generation takes in this run over those it was priced with (slow ranks)."""
    assert program.generation is not None
    taken, priced = (_generated(c) for c in (cost, program.generation.cost))
    return taken / priced if priced > 0 else 1.0


def _generated(cost: Cost) -> float:
    """Seconds of a rollout without those of its environment."""
    if all(p.rests_on != RESTS_ON for p in cost.parts):
        return cost.seconds
    return math.fsum(p.seconds for p in cost.parts if p.rests_on != RESTS_ON)
