"""One attempt at a run: from a reserved cluster to its last iteration, or to the first part that fails."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ray.exceptions import RayError

from executor.algorithms.custom import Parts
from executor.algorithms.iteration import Learned, Loop, Position
from executor.coordination import checkpoints, metrics
from executor.coordination.buffer import Experience, settings_of
from executor.coordination.cluster import Reservation
from executor.coordination.detectors import Detection, Detectors
from executor.coordination.failures import PartFailed
from executor.coordination.gpu_faults import check_devices
from executor.coordination.others import Held, summary
from executor.coordination.run_folder import RunFiles, link, settings_hash
from executor.coordination.sample_log import SampleLog
from executor.coordination.saving import Saver, SaveTimes, mtbf, stop_requests
from executor.coordination.tracing import RunRecorder
from executor.coordination.tracking import Trackers, open_trackers
from executor.coordination.worker_groups import WorkerGroups
from executor.evaluation import Evaluated, Evaluator
from executor.resolve import Job
from executor.rewards.ahead import RuleRewards
from executor.rewards.operations import rows_of
from executor.selfcheck import check_restored, self_check
from executor.tasks.prompter import TaskPrompter
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.trace import CPU_POOL, Trace, write_trace
from rlhfsim.units import GB

Row = Mapping[str, float]


class RunListener(Protocol):
    """Who is told what happens; the command line prints it."""

    def phase(self, text: str) -> None:
        """What the run does now."""

    def iteration(self, row: Row, total: int) -> None:
        """An iteration is done."""

    def finding(self, finding: Detection) -> None:
        """A detector found something."""


@frozen
class TraceWatch:
    """Who looks at the run's trace while it goes on; the executor does not import calibration."""

    every: int
    """Iterations between two looks."""
    look: Callable[[Trace, Sequence[Row]], str]
    """Trace and metrics of the iterations so far -> a line for the listener."""


@dataclass(frozen=True, slots=True)
class _Writers:
    """The ranks of a run, and the parts of the user's that remember something."""

    workers: WorkerGroups
    parts: Parts

    def save(self, folder: Path, *, background: bool = False) -> None:
        """As `WorkerGroups.save`."""
        self.parts.save(folder)
        self.workers.save(folder, background=background)

    def written(self) -> bool:
        """As `WorkerGroups.written`."""
        return self.workers.written()


@frozen
class Ended:
    """An attempt that reached its last iteration."""

    trace: Trace
    rows: tuple[Row, ...]
    evaluations: Mapping[int, float]
    """Iteration -> accuracy on held-out problems, or what is used in its place."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What all attempts have in common; `execute` is one."""

    job: Job
    files: RunFiles
    prompter: TaskPrompter
    rules: RuleRewards
    evaluator: Evaluator
    samples: SampleLog
    contents: Mapping[str, str]
    """Hashes of what the settings name, for checkpoints."""
    listener: RunListener
    watch: TraceWatch | None = None
    _data: Position = field(default_factory=Position)
    _saver: Saver = field(init=False)
    held: Mapping[str, Held] = field(default_factory=dict)
    """What others held of the memory of each part before the first attempt."""

    def execute(
        self, reservation: Reservation, resume_from: checkpoints.Checkpoint | None, *, check_first: bool
    ) -> Ended:
        """Start, check, iterate, save; `check_first`: one of everything before the long work.

        Raises:
            PartFailed: a part died, raised or did not answer in time.
            RlhfsimError: the self-check failed, or a detector stopped the run.
        """
        shutil.rmtree(self.files.scratch, ignore_errors=True)
        self.files.scratch.mkdir(parents=True, exist_ok=True)
        recorder = RunRecorder()
        workers = WorkerGroups(self.job, reservation, self.files.scratch, recorder, self.rules)
        asked = self.job.settings.checkpoints
        able = self.job.plan.placement.backend != "fsdp2"  # see executor/refusals.py
        self._saver = Saver(
            root=self.files.checkpoints,
            keep=asked.keep,
            best=asked.best and asked.every != 0,
            background=able if asked.background is None else asked.background,
            say=self.listener.phase,
            done=self._link,
        )
        try:
            self.listener.phase(f"starting {len(self.job.plan.gpu_map)} roles on their slots")
            workers.start(self._say_held)
            return self._work(workers, resume_from, check_first)
        except (PartFailed, RlhfsimError, RayError) as error:
            self._saver.abandon()
            cause = workers.cause(error)
            workers.stop()
            raise cause  # noqa: B904  the cause is set where it is another error
        except BaseException:
            self._saver.abandon()
            workers.stop()
            raise
        finally:
            workers.close()
            self._saver.close()

    def _say_held(self, held: Mapping[str, Held]) -> None:
        """Once: a later attempt would count what the earlier one has not given back yet."""
        if self.job.gpu:
            check_devices(self.job.plan, held)
        if not self.held:
            self.held = held
            for line in summary(held):
                self.listener.phase(f"before the engines start, {line}")

    def _work(
        self, workers: WorkerGroups, resume_from: checkpoints.Checkpoint | None, check_first: bool
    ) -> Ended:
        settings, schedule = self.job.settings, self.job.plan.placement.schedule
        workload, span = self.job.plan.workload, workers.recorder.tracer.span
        parts = Parts(
            custom=settings.custom,
            with_reference=workload.has_reference,
            timed=lambda name, step: span(f"custom.{name}", "custom", "score", CPU_POOL, step=step),
        )
        self.prompter.positions = parts.positions if "sampler" in parts.made else None
        loop = Loop(
            backend=workers,
            prompter=self.prompter,
            workload=workload,
            settings=settings,
            max_tokens=self.job.max_tokens,
            wait_s=self.job.limits.longest_call,
            late=schedule.late,
            lend=schedule.lend,
            parts=parts,
        )
        first, rows = 0, list[Row]()
        self._data = Position()
        if resume_from is not None:
            first, rows = resume_from.progress.iteration, list(resume_from.progress.metrics)
            self._restore(resume_from, workers, loop)
        if check_first and self.job.fakes is None and workload.generates:
            self.listener.phase("first minute: generate, compare, train, sync, save, load")
            self_check(workers, replace(loop, parts=Parts()), self.files.scratch, self.listener.phase)
        trackers = open_trackers(
            settings.tracking,
            self.files.metrics,
            self.files.tensorboard,
            first_step=first,
            rows=rows,
            # of environment variables, which may be secrets, names
            config={
                "settings": asdict(settings) | {"variables": sorted(settings.variables)},
                "plan": self.job.plan.to_dict(),
            },
            custom=parts.made.get("logger"),
        )
        self.samples.restart(first)
        with contextlib.closing(trackers):
            return self._iterate(workers, loop, range(first, settings.iterations), rows, trackers)

    def _restore(self, checkpoint: checkpoints.Checkpoint, workers: WorkerGroups, loop: Loop) -> None:
        progress = checkpoint.progress
        self.listener.phase(f"restoring the state after iteration {progress.iteration}")
        workers.restore(checkpoint.folder)
        loop.parts.load(checkpoint.folder)
        position = progress.data_position
        self._data = Position(position["prompts"], set(position.get("ahead", ())))
        workers.version = progress.weight_version
        if self.job.plan.workload.generates:
            workers.version -= 1  # the sync counts it again
            workers.sync(progress.iteration)
            check_restored(workers, loop, self.listener.phase)

    def _iterate(
        self, workers: WorkerGroups, loop: Loop, steps: range, rows: list[Row], trackers: Trackers
    ) -> Ended:
        recorder, evaluation = workers.recorder, self.job.settings.evaluation
        detectors = Detectors(self.job.plan, priced_here=self.job.gpu)
        planned = {"memory/planned_gb": self.job.plan.prediction.peak_memory_bytes / GB}
        evaluations = dict[int, float]()
        if evaluation.problems:
            evaluations[steps.start] = self._evaluated(workers, steps.start, trackers).value
        times = SaveTimes(
            every=self.job.settings.checkpoints.every,
            iterations=self.job.settings.iterations,
            mtbf_s=mtbf(self.job.plan),
            cost_s=self.job.limits.checkpoint_cost,
        )
        start = last = time.time()
        recorder.fresh()
        recorder.readings()
        self._rules_row()  # of the probe and the evaluation before: said, and in no row
        with stop_requests(self.listener.phase) as stop:
            for learned in self._learned(loop, workers, steps):
                row = metrics.iteration_metrics(
                    learned,
                    time.time() - last,
                    recorder.fresh(),
                    recorder.readings(),
                    teachers=len(self.job.settings.references),
                ) | (planned if self.job.gpu or self.job.fakes else {})
                done = learned.step + 1
                found = None
                due = done == steps.stop or (evaluation.every > 0 and done % evaluation.every == 0)
                if evaluation.problems and due:
                    found = self._evaluated(workers, done, trackers)
                    evaluations[done] = found.value
                    row |= found.row()
                row |= self._rules_row()
                self._saver.look()
                if self._saver.failures:
                    row["checkpoint/failed"] = float(self._saver.failures)
                rows.append(row)
                self._data.add(learned.groups)
                trackers.log(learned.step, row)
                if self.samples.due(done):
                    trackers.show(done, self.samples.add("training", learned.step, learned.samples))
                self.listener.iteration({"step": float(learned.step), **row}, steps.stop)
                self._detect(detectors, rows)
                stopping = done == steps.stop or stop.number is not None
                writers = _Writers(workers, loop.parts)
                self._save(writers, rows, times, stopping, None if found is None else found.score)
                if done < steps.stop:
                    stop.follow()
                if self.watch is not None and done % self.watch.every == 0:
                    so_far = self._trace(recorder, start, range(steps.start, done))
                    self.listener.phase(self.watch.look(so_far, rows))
                last = time.time()
        trace = self._trace(recorder, start, steps)
        write_trace(self.files.trace, trace)
        return Ended(trace=trace, rows=tuple(rows), evaluations=evaluations)

    def _rules_row(self) -> dict[str, float]:
        """How the rules fared; what failed is also said."""
        counts = self.rules.taken()
        for name, of in counts.items():
            if (line := of.words(name)) is not None:
                self.listener.phase(line)
        return rows_of(counts)

    def _trace(self, recorder: RunRecorder, start: float, steps: range) -> Trace:
        return recorder.trace(
            start_s=start,
            plan_hash=self.job.plan.input_hash,
            steps=len(steps),
            seed=self.job.settings.seed,
            first_step=steps.start,
        )

    def _learned(self, loop: Loop, workers: WorkerGroups, steps: range) -> Iterator[Learned]:
        schedule, generates = self.job.plan.placement.schedule, self.job.plan.workload.generates
        if generates and schedule.asynchronous:
            buffer = Experience(settings_of(self.job.plan), workers.version)
            return loop.asynchronous(steps, buffer, self._data)
        if self.job.plan.workload.dynamic_sampling is not None:  # samples are handed on when the step is full
            return loop.filled(steps, self._data)
        return loop.streamed(steps) if generates and schedule.streaming else loop.synchronous(steps)

    # --- after an iteration -----------------------------------------------------------------------

    def _detect(self, detectors: Detectors, rows: list[Row]) -> None:
        if self.job.fakes is not None:
            return
        for finding in detectors.look(rows):
            self.listener.finding(finding)
            if finding.severity == "stop":
                raise RlhfsimError(finding.code, finding.what, help=finding.advice)

    def _link(self, saved: checkpoints.Checkpoint) -> None:
        link(self.files.model, saved.folder / "actor")
        if self._saver.best and (best := checkpoints.best_of(self.files.checkpoints)):
            link(self.files.best, best[0] / "actor")

    def _save(
        self, writers: _Writers, rows: list[Row], times: SaveTimes, last: bool, score: float | None
    ) -> None:
        """Where it is time, where the run ends or stops (`last`), or where the model is the best so far."""
        done, saver = len(rows), self._saver
        if self.job.fakes is not None:
            return
        improves = score is not None and saver.improves(score)
        by_time = times.every is None and saver.busy
        if not (last or saver.again or improves or (times.due(done) and not by_time)):
            return
        began = time.monotonic()
        progress = checkpoints.RunProgress(
            iteration=done,
            weight_version=writers.workers.version,
            data_position={"prompts": self._data.prompts, "ahead": sorted(self._data.ahead)},
            # every stream of the driver follows from it and the position
            rng={"seed": self.job.settings.seed},
            metrics=tuple(rows),
            score=score,
        )
        identity = checkpoints.identity(self.job.plan, settings_hash(self.job.settings), self.contents)
        saver.save(progress, identity, writers, last=last)
        times.saved(time.monotonic() - began)

    def _evaluated(self, workers: WorkerGroups, done: int, trackers: Trackers) -> Evaluated:
        found = self.evaluator.run(workers, done)
        asked = self.job.settings.evaluation
        how = "greedy " if self.job.plan.workload.generates and asked.samples == 1 else ""
        count = len(found.samples) // asked.samples or self.evaluator.check()
        more = [f"{name} {value:.3f}" for name, value in found.metrics.items() if name.startswith("pass@")]
        self.listener.phase(
            f"{how}{found.headline} after {done} iterations: {found.value:.3f} on {count} held-out problems"
            + "".join(f", {text}" for text in more)
        )
        if self.samples.every > 0 and found.samples:
            trackers.show(done, self.samples.add("evaluation", done, found.samples))
        return found
