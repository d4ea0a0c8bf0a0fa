"""One submission of the documented line on a simulated machine: the real launch over simulated parts."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from executor import launch as launcher
from executor import run as attempt
from executor.algorithms import iteration
from executor.coordination import (
    buffer,
    failures,
    manifest,
    others,
    router,
    saving,
    tracing,
    watch,
    weights,
    worker,
    worker_group,
    worker_groups,
)
from executor.coordination import cluster as real_cluster
from executor.coordination.replica import Replica
from executor.coordination.run_folder import RunFiles
from executor.engines import training
from executor.launch import LaunchOptions
from executor.resolve import Job
from executor.settings import Settings
from executor.tasks.prompter import TaskPrompter
from lab.schedules import engines
from lab.schedules.cluster import Cluster
from lab.schedules.disk import Disk
from lab.schedules.world import Killed, World
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan

CLOCKED = (failures, router, saving, attempt, watch, tracing, worker, buffer)
RAY = (failures, watch, worker_group, worker_groups, buffer)
POOLED = (iteration, worker_groups, weights, manifest)
_PREPARE = launcher.prepare
LENT = 0.7
"""Share of the trainer's waits in which its slots are lent."""
TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the line says, and the folder where it is submitted: data and reward code lie there."""

    case: str
    """Case of the schedule."""
    plan: Plan
    settings: Settings
    home: Path

    @property
    def code(self) -> str:
        """Source of the reward function."""
        return (self.home / "own_reward.py").read_text()

    @property
    def files(self) -> RunFiles:
        """Files of the run."""
        return RunFiles(self.home / "run")


@dataclass(slots=True)
class Ending:
    """How a submission ended."""

    how: str
    """`done`, `killed`, `terminated` or `refused`."""
    code: str = ""
    """Code of the reason, where it was refused."""
    happened: Sequence[str] = ()
    """Faults that came."""
    operations: int = 0
    saved: list[int] = field(default_factory=list)
    """Iterations of checkpoints that the run took for whole."""


class _Listener:
    """Nobody listens."""

    def phase(self, text: str) -> None:
        """Nothing."""

    def iteration(self, row: Any, total: int) -> None:
        """Nothing."""

    def finding(self, finding: Any) -> None:
        """Nothing."""


class _Inline:
    """A pool whose jobs run where they are given."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accepts any size."""

    def submit(self, job: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        """Its result is there at once."""
        done = Future[Any]()
        try:
            done.set_result(job(*args, **options))
        except BaseException as error:
            done.set_exception(error)
        return done

    def map(self, job: Callable[..., Any], *columns: Any) -> list[Any]:
        """One after the other."""
        return list(map(job, *columns))

    def shutdown(self, **_: Any) -> None:
        """Nothing waits."""

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing waits."""


class _Later:
    """The pool of the saver: its job runs when it is waited for, or when chance has it done."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._job: Callable[[], Any] | None = None
        self._ended: Future[Any] | None = None

    def submit(self, job: Callable[[], Any]) -> _Later:
        """It is its own future."""
        self._job = job
        return self

    def shutdown(self, **_: Any) -> None:
        """Nothing waits."""

    def done(self) -> bool:
        """Whether it has run by now."""
        if self._ended is None and self._world.rng.random() < 0.5:
            self._end()
        return self._ended is not None

    def result(self) -> Any:
        """What it gave."""
        return self._end().result()

    def _end(self) -> Future[Any]:
        if self._ended is None:
            assert self._job is not None
            self._ended = _Inline().submit(self._job)
        return self._ended


class _Fed:
    """The condition of the experience buffer: who waits for groups lets the feeder have a turn."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def __enter__(self) -> _Fed:
        return self

    def __exit__(self, *_: object) -> None:
        """One thread needs no lock."""

    def notify_all(self) -> None:
        """Nobody waits beside."""

    def wait(self, limit_s: float) -> None:
        """Time passes."""
        self._cluster.world.sleep(limit_s)
        self._cluster.feed()


@lru_cache(maxsize=16)
def _prepared(plan: str, settings: str, rows: bytes, held: _Held) -> tuple[Job, TaskPrompter]:
    """As `launch.prepare` without a model; the keys are all that it depends on."""
    return _PREPARE(*held.line, dry_step_s=1.0, say=lambda _: None)


class _Held:
    """Plan and settings, whatever they are equal to."""

    def __init__(self, *line: Any) -> None:
        self.line = line

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


def prepared(question: Question) -> tuple[Job, TaskPrompter]:
    """A job for engines that work, and a prompter of its own."""
    rows, held = (question.home / "rows.jsonl").read_bytes(), _Held(question.plan, question.settings)
    job, prompter = _prepared(question.plan.input_hash, repr(question.settings), rows, held)
    return replace(job, fakes=None, model=str(question.home / "model")), replace(prompter, _open={})


@contextlib.contextmanager
def simulated(question: Question, world: World, ending: Ending) -> Iterator[Disk]:
    """The real coordination layer over the parts of this world."""
    classes = {worker.Worker: lambda _, identity: worker.Worker(identity), Replica: engines.Replica}
    eta = math.ceil(question.plan.placement.schedule.staleness)
    ray, disk, rules = (
        Cluster(world, classes, staleness=eta, initial=engines.initial("actor")),
        Disk(question.home / "run", world),
        engines.Rules(world, question.code),
    )

    def rank() -> Any:
        return ray.running._identity

    def build(spec: Any) -> engines.Trainer:
        return engines.Trainer(ray, spec.role, rank().rank, rank().ranks)

    def sender(channels: Any, number: int) -> engines.Sender | None:
        return engines.Sender(ray, channels[number].name) if number in channels else None

    def linked(run: attempt.Run, saved: Any) -> None:
        ending.saved.append(saved.progress.iteration)
        link(run, saved)

    def published(experience: buffer.Buffer, version: int) -> tuple[buffer.BufferEntry, ...]:
        gone = publish(experience, version)
        if gone and experience.settings.waits:
            world.wrong = f"groups {[entry.id for entry in gone]} were thrown away"
        return gone

    link, publish, patch = attempt.Run._link, buffer.Buffer.publish, mock.patch.object
    scorer = SimpleNamespace(probe=lambda *_: None)
    modules = {
        "executor.engines.background": SimpleNamespace(Background=lambda _: engines.Background(world.rng)),
        "executor.weight_transfer.packing": SimpleNamespace(GatheredWeights=engines.gathered),
    }
    patches: list[contextlib.AbstractContextManager[Any]] = [
        *(patch(module, "time", world) for module in CLOCKED),
        *(patch(module, "ray", ray) for module in RAY),
        *(patch(module, "ThreadPoolExecutor", _Inline) for module in POOLED),
        patch(saving, "ThreadPoolExecutor", lambda *_, **__: _Later(world)),
        patch(saving, "WRITTEN_S", 0.0),
        patch(tracing.Tracer.__init__, "__defaults__", (world.time,)),
        patch(real_cluster, "joined", ray.joined),
        patch(real_cluster, "has_gpus", lambda *_: False),
        patch(watch, "node_is_gone", lambda node: node not in {h.node for h in ray.handles if h.alive}),
        patch(watch.Watch, "start", lambda one: ray.watches.append(one)),
        patch(worker, "Meter", engines.Meter),
        patch(others, "measure", lambda *_: {}),
        patch(training, "build", build),
        patch(training, "sender", sender),
        patch(training, "start", lambda *_, **__: None),
        patch(training, "rendezvous", lambda *_: SimpleNamespace(port=1)),
        patch(launcher, "prepare", lambda *_, **__: prepared(question)),
        patch(launcher, "Scorer", lambda *_: contextlib.nullcontext(scorer)),
        patch(launcher, "_rules", lambda *_: rules),
        patch(attempt.Run, "_link", linked),
        patch(buffer.Buffer, "publish", published),
        # no clock of this world says what lending saves
        patch(router.Lending, "pays", property(lambda _: bool(world.rng.random() < LENT))),
        patch(buffer, "threading", SimpleNamespace(Condition=lambda: _Fed(ray))),
        patch(iteration._Feeder, "start", lambda feeder: setattr(ray, "feeder", feeder)),
        patch(iteration._Feeder, "close", lambda _: setattr(ray, "feeder", None)),
        mock.patch.dict(sys.modules, modules),
        contextlib.chdir(question.home),
        disk.attached(),
    ]
    with contextlib.ExitStack() as entered:
        for one in patches:
            entered.enter_context(one)
        yield disk


def submit(question: Question, world: World) -> Ending:
    """The line once: how it ended.

    Raises:
        BaseException: it ended with an error that says no reason, a traceback for its user.
    """
    ending = Ending("done")
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with simulated(question, world, ending) as disk:
            options = LaunchOptions(out=question.files.root, resume=True)
            _launched(question, options, ending)
            assert not world.wrong, world.wrong
            ending.how = "killed" if world.dead else ending.how
    finally:
        logging.disable(before)
    if world.happened["power"]:
        disk.lose_power()
    ending.happened, ending.operations = sorted(world.happened), world.operations
    return ending


def _launched(question: Question, options: LaunchOptions, ending: Ending) -> None:
    try:
        launcher.launch(question.plan, question.settings, options, _Listener())
    except Killed:
        ending.how = "killed"
    except SystemExit as error:
        ending.how = "terminated" if error.code == TERMINATED else f"exit {error.code}"
    except RlhfsimError as error:
        ending.how, ending.code = "refused", error.code
    except OSError as error:
        if error.errno is None:
            raise
        ending.how, ending.code = "refused", "system"  # as rlhfsim/cli/main.py says it
