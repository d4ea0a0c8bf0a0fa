"""Every process of a run and the calls of the dataflow on them: what the iteration loops drive.

A call takes its pool for itself, moves its role in where the plan keeps it out of memory, works on all
ranks, and moves it out again. Calls in different pools run side by side.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from executor.algorithms.iteration import results_of
from executor.coordination import others, weights
from executor.coordination.cluster import Reservation
from executor.coordination.engine_memory import EngineMemory, Residency
from executor.coordination.failures import PartFailed, collect
from executor.coordination.gpu_faults import Readings
from executor.coordination.router import WAKE, Lending, RequestRouter
from executor.coordination.tracing import SAME_CLOCK, ClockOffset, Reply, RunRecorder, Tags, offset
from executor.coordination.watch import Watch
from executor.coordination.worker import LOOPBACK
from executor.coordination.worker_group import (
    ReplicaPool,
    Site,
    WorkerGroup,
    clock_of,
    join,
    spawn,
    spawn_replicas,
)
from executor.engines import mesh
from executor.engines.balance import balanced, optimizer_steps
from executor.ranks import group_specs, lent
from executor.resolve import Job, engine_specs, environment, rollout_spec, served_by
from executor.rewards.ahead import RuleRewards
from executor.samples import Completion, GenerationRequest, LossSpec, Sample, Transfer
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolloutPlacement
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.trace import CPU_POOL

METHODS = {"logprob": "logprobs", "value": "values", "score": "scores"}
PROCESSES = "processes.json"
"""In the scratch folder: part -> process id."""


class WorkerGroups:
    """The processes of one plan, the `LoopBackend` of the iteration loops."""

    def __init__(
        self, job: Job, reservation: Reservation, scratch: Path, recorder: RunRecorder, rules: RuleRewards
    ) -> None:
        self.job = job
        self._rules = rules
        self.recorder = recorder
        self.version = 0
        """Weight version of the policy; the rollout's after the latest sync."""
        self._scratch = scratch
        self._site = Site(
            reservation=reservation, environment=environment(job), scratch=scratch, fakes=job.fakes
        )
        self._served = served_by(job.plan)
        self._limits = job.limits
        self._pools = {pool.name: threading.RLock() for pool in job.plan.placement.pools}
        self._offsets: dict[str, ClockOffset] = {}
        self._all: Sequence[WorkerGroup] = ()
        """Each group once."""
        self._groups: dict[str, WorkerGroup] = {}
        """By role."""
        self._residency = Residency(job, scratch, self._move)
        self._engine = EngineMemory(job, self._move_rollout, self._resend)
        self.rollout: ReplicaPool | None = None
        self._requests: RequestRouter | None = None
        self._lending: Lending | None = None
        self.route: weights.WeightRoute | None = None
        self.watch = Watch(self._actors, self.stop)
        self._stopped = False

    # --- start and end ----------------------------------------------------------------------------

    def start(self, told: Callable[[dict[str, others.Held]], None] = lambda _: None) -> None:
        """Processes, engines, weight channel. Pools come up side by side; in a pool each group moves to where
        it rests before the next is built, and the rollout engine takes what they leave. `told` hears what
        others hold of the memory of each part.

        Raises:
            PartFailed: one did not come up.
        """
        self._all = [spawn(spec, self._site) for spec in group_specs(self.job.plan, self._served)]
        self._groups = {role: group for group in self._all for role in group.spec.roles}
        if self.job.plan.workload.generates:
            self._spawn_rollout()
        if self.job.plan.placement.schedule.lend:
            self._lending = self._lent()
        self.watch.start()
        if self.job.fakes is None:
            told(others.measure(self._actors(), self._limits.start))
            self._prepare()
        with ThreadPoolExecutor(max_workers=len(self._pools)) as pools:
            results_of({pool: pools.submit(self._start_pool, pool) for pool in self._pools}, self.stop)
        if self.rollout is not None:
            self.route = weights.WeightRoute(self.job, self._groups["actor"], self._scratch)
            self.route.open(self.rollout)
        if self._lending is not None:
            self._lending.open()
        self.watch.note(self._scratch / PROCESSES, self._limits.longest_call)

    def _prepare(self) -> None:
        """All processes import their libraries at once; nobody waits for it."""
        specs = engine_specs(self.job).values()
        for group in self._all:
            own = [spec for spec in specs if spec.role in group.spec.roles]
            for actor in group.actors:
                actor.prepare.remote(own)
        for pool in self._replica_pools:
            pool.prepare()

    @property
    def _replica_pools(self) -> list[ReplicaPool]:
        """Those that are there."""
        own = [self.rollout] if self.rollout is not None else []
        return own if self._lending is None else [*own, self._lending.pool]

    def _actors(self) -> dict[str, Any]:
        """Every living process by part name."""
        actors = {
            part: actor for group in self._all for part, actor in zip(group.parts, group.actors, strict=True)
        }
        for pool in self._replica_pools:
            actors |= {} if pool.ending else pool.processes
        return {} if self._stopped else actors

    @property
    def trainer(self) -> WorkerGroup:
        """The group that trains the policy."""
        return self._groups["actor"]

    def reroute(self, route: weights.WeightRoute) -> None:
        """Send weights along another path from now on."""
        assert self.rollout is not None
        if self.route is not None:
            self.route.close()
        self.route = route
        self.route.open(self.rollout)

    def _start_pool(self, pool: str) -> None:
        for group in self._all:
            if group.spec.pool == pool:
                self._start_group(group)
        if self.rollout is not None and self.rollout.pool == pool:
            self._build_rollout()
        if self._lending is not None and self._lending.pool.pool == pool:
            spec = replace(rollout_spec(self._lending.job), interrupted=True)
            self._lending.pool.build(spec, self._limits.start)
            self._lending.memory.built()

    def _start_group(self, group: WorkerGroup) -> None:
        join(group, self._limits.start, self._limits.collective)
        for spec in engine_specs(self.job).values():
            if spec.role in group.spec.roles:
                self._call(group, "build", spec, limit_s=self._limits.start)
                self._residency.rest(spec.role, step=0)
        driver = ray.util.get_node_ip_address()
        for part, actor in zip(group.parts, group.actors, strict=True):
            [(host, _)] = collect([actor.address.remote()], [part], "address", self._limits.longest_call)
            if host not in (driver, LOOPBACK):
                self._offsets[part] = offset(partial(clock_of, actor))

    def _spawn_rollout(self) -> None:
        self.rollout = self._replicas(self.job)
        self._requests = RequestRouter(self.rollout, self._rules.ahead)

    def _replicas(self, job: Job, **named: str) -> ReplicaPool:
        """The processes of all replicas of a plan."""
        pool = spawn_replicas(job.plan, self._site, self._record, **named)
        if self._stopped:
            pool.kill()
        return pool

    def _lent(self) -> Lending:
        """The replicas on the trainer's GPUs."""
        assert self.rollout is not None
        assert self._requests is not None
        job = replace(self.job, plan=lent(self.job.plan))
        pool = self._replicas(job, name="lent replica")
        route = weights.WeightRoute(job, self.trainer, self._scratch / "lent", WAKE)
        memory = EngineMemory(job, partial(self._move_engine, pool), partial(self._send, route, pool))
        return Lending(
            job=job,
            pool=pool,
            requests=self._requests,
            memory=memory,
            route=route,
            own=len(self.rollout.actors),
        )

    def _build_rollout(self, model: str | None = None) -> None:
        assert self.rollout is not None
        spec = rollout_spec(self.job)
        spec = replace(spec, model=model or spec.model, version=self.version)
        self.rollout.build(spec, self._limits.start)
        self._engine.built()

    def stop(self) -> None:
        """End every process at once: ranks that hang in a collective with a dead one never return."""
        self._stopped = True
        with contextlib.suppress(Exception):
            for group in self._all:
                for actor in group.actors:
                    ray.kill(actor)
            for pool in self._replica_pools:
                pool.kill()

    def cause(self, error: Exception) -> Exception:
        """Why an error came: a dead part where there is one, else the error itself."""
        if isinstance(error, RayError):
            error = PartFailed("Ray", "raised", f"{type(error).__name__}: {error}".splitlines()[0])
        part, call = (error.part, error.call) if isinstance(error, PartFailed) else ("", "")
        dead = self.watch.blame(part)
        if dead is None or error is dead:
            return error
        failure = PartFailed(dead.part, dead.cause, dead.detail, call)
        failure.__cause__ = error
        return failure

    def close(self) -> None:
        """End every process, in order if none has failed."""
        self.watch.stop()
        if not self._stopped:
            with contextlib.suppress(Exception):
                for pool in self._replica_pools:
                    pool.close()
                actors = [a for group in self._all for a in group.actors]
                ray.wait([a.close.remote() for a in actors], num_returns=len(actors), timeout=10)
        self.stop()
        if self.route is not None:
            self.route.clean()
        if self._lending is not None:
            self._lending.route.clean()

    # --- calls ------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest], step: int) -> list[Completion]:
        """Responses in the order of their requests."""
        role = self.job.plan.placement.rollout
        assert role is not None
        with self._pools[role.pool]:
            self._wake(role, step)
            assert self._requests is not None
            done = self._requests.generate(requests, step, self._limits.call("actor.generate"))
            self._rest(role, step)
        return done

    def _wake(self, role: RolloutPlacement, step: int) -> None:
        if self.rollout is None:
            assert self.route is not None
            with self.recorder.tracer.span("actor.generate.load", "actor", "load", role.pool, step=step):
                self._spawn_rollout()
                self._build_rollout(self.route.folder_of(self.version))
        self._engine.for_generation(step)

    def _rest(self, role: RolloutPlacement, step: int) -> None:
        if self.rollout is not None and role.residency == "recreated":
            with self.recorder.tracer.span("actor.generate.unload", "actor", "unload", role.pool, step=step):
                self.rollout.close()
                self.rollout = None
        self._engine.rest(step)

    def _move_rollout(self, *arguments: Any, **options: Any) -> Readings:
        assert self.rollout is not None
        return self._move_engine(self.rollout, *arguments, **options)

    def _move_engine(
        self, pool: ReplicaPool, method: str, *arguments: Any, span: str = "", step: int = 0
    ) -> Readings:
        """One move of a rollout engine's memory, on every replica; what each then holds."""
        tags = (self._tags(span, step),) if span else ()
        pool.call(method, *arguments, *tags, limit_s=self._limits.call(span))
        return pool.readings

    def _resend(self, step: int) -> None:
        """The weights that the rollout engine lost in its sleep, over a channel of their own."""
        assert self.route is not None
        self.route.open(self.rollout)
        self._send(self.route, self.rollout, step)

    def _send(self, route: weights.WeightRoute, pool: ReplicaPool | None, step: int) -> Transfer:
        """The actor's weights along a route."""
        with self._residency.present("actor", "actor.sync", step):
            return route.send(pool, self.version, step, self._record)

    def lend(self, step: int) -> None:
        """The trainer waits for samples from now on: its GPUs generate too, where that pays."""
        with self._lent_pool() as lent:
            lent.lend(step, self._limits.longest_call)

    def reclaim(self, step: int) -> dict[str, float]:
        """The trainer goes on, its GPUs are its own again; what they generated, as metrics."""
        with self._lent_pool() as lent:
            return lent.reclaim(step, self._limits.longest_call)

    @contextlib.contextmanager
    def _lent_pool(self) -> Iterator[Lending]:
        """The trainer's GPUs, while none of its calls runs there."""
        assert self._lending is not None, "only a plan with schedule.lend lends"
        with self._pools[self.trainer.spec.pool]:
            yield self._lending

    def submit(self, requests: Sequence[GenerationRequest], step: int) -> None:
        """Queue requests of a rollout that goes on by itself."""
        role = self.job.plan.placement.rollout
        assert role is not None
        with self._pools[role.pool]:
            self._wake(role, step)
        assert self._requests is not None
        self._requests.submit(requests, step, self._limits.longest_call)

    def poll(self, limit_s: float) -> list[Completion]:
        """Completions of submitted requests; waits up to `limit_s` for the first."""
        assert self._requests is not None
        return self._requests.poll(limit_s)

    def score(self, call: Call, samples: Sequence[Sample], step: int) -> list[Any]:
        """Results of one scoring call, in the order of the samples."""
        if call.role == "rules":
            with self.recorder.tracer.span(call.name, call.role, call.kind, CPU_POOL, step=step):
                return self._rules(samples)
        role = self._served.get(call.role, call.role)
        method = "reference_logprobs" if call.role in self._served else METHODS[call.kind]
        layout = self._layout(role)
        shares = balanced(samples, layout.dp)
        parts = [[samples[i] for i in share] for share in shares]
        tags = self._tags(call.name, step)
        with self._pools[self._groups[role].spec.pool], self._residency.present(role, call.name, step):
            replies = self._scattered("forward", parts, role, method, tags=tags)
        results: list[Any] = [None] * len(samples)
        for share, rank in zip(shares, mesh.leaders(layout), strict=True):
            for index, value in zip(share, replies[rank].value, strict=True):
                results[index] = value
        return results

    def train(
        self, role: str, samples: Sequence[Sample], loss: LossSpec, step: int
    ) -> list[dict[str, float]]:
        """Optimizer steps of one iteration; their metrics."""
        workload = self.job.plan.workload
        batches = optimizer_steps(
            samples,
            ranks=self._layout(role).dp,
            mini_batches=workload.mini_batches,
            epochs=workload.epochs,
            seed=(self.job.settings.seed, step + 1),
            pairs=workload.paired,
        )
        tags = self._tags(f"{role}.train", step)
        self._rest_after_streaming(step)
        pool = self._pools[self._groups[role].spec.pool]
        with pool, self._residency.present(role, tags.name, step, states=True):
            metrics: list[dict[str, float]] = self._scattered("train", batches, role, loss, tags=tags)[
                0
            ].value
        return metrics

    def _rest_after_streaming(self, step: int) -> None:
        """A streamed rollout has no call that ends with it."""
        rollout, schedule = self.job.plan.placement.rollout, self.job.plan.placement.schedule
        if rollout is not None and schedule.streaming and not schedule.asynchronous:
            with self._pools[rollout.pool]:
                self._rest(rollout, step)

    def _scattered(self, method: str, parts: Sequence[Any], role: str, *args: Any, tags: Tags) -> list[Reply]:
        """A call in which every data-parallel replica works on its own part; each part is stored once."""
        group, layout = self._groups[role], self._layout(role)
        refs = [ray.put(part) for part in parts]
        mine = [refs[mesh.coordinates(rank, layout).dp] for rank in range(len(group.actors))]
        limit = self._limits.call(tags.name)
        return self._call(group, method, role, *args, tags, each=mine, what=tags.name, limit_s=limit)

    def _call(self, group: WorkerGroup, method: str, *args: Any, **options: Any) -> list[Reply]:
        """A call on all ranks of a group, recorded."""
        replies = group.call(method, *args, **{"limit_s": self._limits.longest_call, **options})
        self._record(group.parts, replies)
        return replies

    def _tags(self, name: str, step: int) -> Tags:
        return Tags(name=name, step=step, version=self.version)

    def sync(self, step: int) -> Transfer:
        """New weights to every replica; version + 1. Both ends must report one checksum."""
        placement = self.job.plan.placement
        assert placement.rollout is not None
        assert self.route is not None
        self.version += 1
        pools = sorted({placement.actor.pool, placement.rollout.pool})
        overlapped = placement.schedule.asynchronous
        with contextlib.ExitStack() as held:
            for pool in pools if not overlapped else [placement.actor.pool]:
                held.enter_context(self._pools[pool])
            if placement.rollout.residency == "recreated":  # it goes, and reads files when it comes again
                self._rest(placement.rollout, step)
            self._engine.for_sync(step)
            return self._send(self.route, self.rollout, step)

    # --- checkpoints and records ------------------------------------------------------------------

    @property
    def most_ranks(self) -> int:
        """Data-parallel ranks of the widest role."""
        return max(self._layout(role).dp for role in self._groups)

    def _layout(self, role: str) -> Layout:
        return self.job.plan.placement.trainers[role].layout

    def save(self, folder: Path, *, background: bool = False) -> None:
        """Every trained role's state, a folder each; the rollout engine sleeps meanwhile."""
        self._each_trained("save", folder, background)

    def written(self) -> bool:
        """Whether all that `save` left to the background is on disk; PartFailed where a rank could not."""
        trained = [group for group in self._all if any(role in TRAINED for role in group.spec.roles)]
        each = [group.call("written", limit_s=self._limits.longest_call) for group in trained]
        return all(all(replies) for replies in each)

    def restore(self, folder: Path) -> None:
        """Undo `save`."""
        self._each_trained("restore", folder)

    def save_and_compare(self, folder: Path, limit: int) -> int:
        """Up to `limit` bytes of all states to files and back; their number.

        Raises:
            RlhfsimError: other bytes came back.
        """
        ranks = sum(len(self._groups[role].actors) for role in TRAINED if role in self._groups)
        return sum(r.value for r in self._each_trained("save_and_compare", folder, limit // ranks))

    def _each_trained(self, method: str, folder: Path, *arguments: Any) -> list[Reply]:
        replies: list[Reply] = []
        if (rollout := self.job.plan.placement.rollout) is not None:
            with self._pools[rollout.pool]:
                self._engine.rest(0)
        for role in TRAINED:
            if role in self._groups:
                (folder / role).mkdir(parents=True, exist_ok=True)
                group = self._groups[role]
                with (
                    self._pools[group.spec.pool],
                    self._residency.present(role, f"{role}.{method}", 0, states=True),
                ):
                    options = {"limit_s": self._limits.checkpoint}
                    replies += self._call(group, method, role, str(folder / role), *arguments, **options)
        return replies

    def _move(self, method: str, role: str, how: str, folder: str | None, span: str, step: int) -> None:
        """One role in or out, on every rank."""
        places = (folder,) if method == "unload" else ()
        tags, limit = self._tags(span, step), self._limits.call(span)
        self._call(self._groups[role], method, role, how, *places, tags, limit_s=limit)

    def _record(self, parts: Sequence[str], replies: Sequence[Reply]) -> None:
        for part, reply in zip(parts, replies, strict=True):
            clock = self._offsets.get(part, SAME_CLOCK)
            self.recorder.add(reply, clock, part, self.watch.homes.get(part, ""))
