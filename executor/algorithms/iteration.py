"""The iteration loops, over a backend that runs calls: synchronous, streamed and asynchronous.

They follow the dataflow of `rlhfsim.specs.workload.dataflow`, the same that the simulator prices: which call
needs which is said there alone. Nothing here knows Ray or an engine.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from executor.algorithms import recipes
from executor.algorithms.advantages import advantages, estimated
from executor.algorithms.custom import Parts
from executor.algorithms.dynamic_sampling import StepGroups
from executor.algorithms.kto_baseline import kl_baseline, mismatched
from executor.algorithms.protocols import ExperienceBuffer, LoopBackend, Prompter
from executor.algorithms.shaping import filtered
from executor.samples import GenerationRequest, Sample, Transfer, emptied
from executor.settings import Settings
from rlhfsim.frozen import frozen
from rlhfsim.specs.placement.placement import Late
from rlhfsim.specs.workload.dataflow import Call, dataflow
from rlhfsim.specs.workload.workload import Workload

SCORING = ("logprob", "value", "score")
Metrics = Mapping[str, float]


@contextlib.contextmanager
def all_or_stop(stop: Callable[[], None]) -> Iterator[None]:
    """After a failure (or Ctrl-C) nobody waits for calls that go on elsewhere: `stop` ends them."""
    try:
        yield
    except BaseException:
        stop()
        raise


def results_of(running: Mapping[str, Future[Any]], stop: Callable[[], None]) -> dict[str, Any]:
    """Results of calls that run side by side; the first failure ends the wait."""
    with all_or_stop(stop):
        done, _ = wait(running.values(), return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return {name: future.result() for name, future in running.items()}


@dataclass(slots=True)
class Position:
    """Where a run is in its data: trained on all prompts before `prompts`, and those of `ahead`."""

    prompts: int = 0
    ahead: set[int] = field(default_factory=set)

    def __contains__(self, group: int) -> bool:
        return group < self.prompts or group in self.ahead

    def add(self, groups: Iterable[int]) -> None:
        """These have been trained on."""
        self.ahead |= {group for group in groups if group >= self.prompts}
        while self.prompts in self.ahead:
            self.ahead.remove(self.prompts)
            self.prompts += 1

    def copy(self) -> Position:
        """As it is now."""
        return Position(self.prompts, set(self.ahead))


@frozen
class Learned:
    """One iteration."""

    step: int
    samples: tuple[Sample, ...]
    """With everything that was found out about them."""
    actor: tuple[Metrics, ...]
    """Metrics of every optimizer step."""
    critic: tuple[Metrics, ...] = ()
    transfer: Transfer | None = None
    """The weight sync at its end."""
    version: int = 0
    """Weight version that was trained; samples say which sampled them."""
    unused: tuple[int, ...] = ()
    """Groups that were generated for it and not trained on."""
    sampling: Metrics = field(default_factory=dict)
    """Counts of dynamic sampling."""

    @property
    def groups(self) -> set[int]:
        """Groups that are done with."""
        return {s.group for s in self.samples} | set(self.unused)


@frozen
class LateGroups:
    """Groups that were too old to be trained on."""

    tokens: Mapping[int, int]
    """Response tokens by group."""
    again: bool
    """Their prompts are generated again."""

    def added_to(self, learned: Learned) -> Learned:
        """The iteration with what was thrown away before it."""
        counts = {"late_groups": len(self.tokens), "late_tokens": sum(self.tokens.values())}
        sampling = {f"sampling/{name}": float(count) for name, count in counts.items()}
        done = () if self.again else tuple(self.tokens)
        return replace(learned, unused=(*learned.unused, *done), sampling={**learned.sampling, **sampling})


@frozen
class Loop:
    """What an iteration needs."""

    backend: LoopBackend
    prompter: Prompter
    workload: Workload
    settings: Settings
    max_tokens: int
    wait_s: float = 600.0
    """Most that one wait for finished responses takes."""
    late: Late = "wait"
    """What happens to groups that are too old; see `Schedule.late`."""
    lend: bool = False
    """The trainer's GPUs generate while it waits; see `Schedule.lend`."""
    parts: Parts = field(default_factory=Parts)
    """What the user brings of the algorithm."""
    calls: tuple[Call, ...] = field(init=False)

    def __post_init__(self) -> None:
        """The dataflow is fixed for the run."""
        object.__setattr__(self, "calls", dataflow(self.workload))

    # --- loops ------------------------------------------------------------------------------------

    def synchronous(self, steps: Iterable[int]) -> Iterator[Learned]:
        """Generate, score, train, sync; one after the other."""
        for step in steps:
            if self.workload.generates:
                completions = self.backend.generate(self.prompter.requests(step), step)
                samples = [self.prompter.sample(c) for c in completions]
            else:
                samples = self.prompter.given(step)
            yield self.learn(step, self._scored(samples, step))

    def filled(self, steps: Iterable[int], data: Position) -> Iterator[Learned]:
        """Dynamic sampling: as `synchronous`, with generation batches from the first prompt that is not in
        `data`, one after the other, until a step has its groups."""
        batch = data.prompts // self.workload.gen_prompts
        for step in steps:
            groups = StepGroups(self.workload)
            while not groups.full:
                groups.check()
                completions = self.backend.generate(self.prompter.requests(batch), step)
                samples = self.rewarded([self.prompter.sample(c) for c in completions], step)
                size, batch = self.workload.samples, batch + 1
                for first in range(0, len(samples), size):
                    groups.add(samples[first : first + size])
            learned = self.learn(step, self._scored(groups.samples, step))
            surplus = {"sampling/surplus_groups": float(len(groups.unused) - len(groups.equal))}
            unused = (*groups.unused, *learned.unused)
            yield replace(learned, unused=unused, sampling={**groups.metrics, **surplus})

    def streamed(self, steps: Iterable[int]) -> Iterator[Learned]:
        """Whole groups are scored while others still generate; training starts with the full batch."""
        for step in steps:
            requests = self.prompter.requests(step)
            self.backend.submit(requests, step)
            with ThreadPoolExecutor(max_workers=1) as scoring, all_or_stop(self.backend.stop):
                parts = [scoring.submit(self._scored, group, step) for group in self._groups(len(requests))]
                samples = [s for part in parts for s in part.result()]
            yield self.learn(step, sorted(samples, key=lambda s: s.id))

    def asynchronous(self, steps: range, buffer: ExperienceBuffer, data: Position) -> Iterator[Learned]:
        """Generation never waits for training beyond what the buffer's staleness bound asks.

        It begins with the first prompt that is not in `data`: what was generated but not trained when a run
        was interrupted is generated again, so that no prompt is skipped and none is trained twice.
        """
        feeder = _Feeder(self, buffer, data)
        feeder.start()
        with contextlib.closing(feeder), all_or_stop(self.backend.stop):
            for step in steps:
                feeder.step = step
                if self.lend and not buffer.whole():
                    self.backend.lend(step)
                samples = buffer.take(self.wait_s)
                lent = self.backend.reclaim(step) if self.lend else {}
                groups, late = feeder.groups_since(), feeder.late_since(samples)
                learned = self.learn(step, self._scored(samples, step))
                buffer.published(self.backend.version)
                if groups is not None:
                    unused = (*groups.equal, *learned.unused)
                    learned = replace(learned, unused=unused, sampling=groups.metrics)
                if late is not None:
                    learned = late.added_to(learned)
                yield replace(learned, sampling={**learned.sampling, **lent})

    # --- parts ------------------------------------------------------------------------------------

    def _groups(self, requests: int) -> Iterator[list[Sample]]:
        """Groups of one prompt as they complete."""
        open_groups: dict[int, list[Sample]] = {}
        seen = 0
        while seen < requests:
            for completion in self.backend.poll(self.wait_s):
                sample = self.prompter.sample(completion)
                group = open_groups.setdefault(sample.group, [])
                group.append(sample)
                seen += 1
                if len(group) == self.workload.samples:
                    yield open_groups.pop(sample.group)

    def _scored(self, samples: Sequence[Sample], step: int) -> list[Sample]:
        """All scoring calls, each as soon as the calls it needs are done; rules do not score twice."""
        known = self.workload.dynamic_sampling is not None
        calls = [c for c in self.calls if c.kind in SCORING and not (known and c.role == "rules")]
        futures: dict[str, Future[list[Any]]] = {}

        def run(call: Call) -> list[Any]:
            for name in call.needs:
                if name in futures:
                    futures[name].result()
            return self.backend.score(call, samples, step)

        with ThreadPoolExecutor(max_workers=max(1, len(calls))) as pool:
            for call in calls:
                futures[call.name] = pool.submit(run, call)
            results = results_of(futures, self.backend.stop)
        return [self._merged(s, {name: r[i] for name, r in results.items()}) for i, s in enumerate(samples)]

    def rewarded(self, samples: Sequence[Sample], step: int) -> list[Sample]:
        """The samples with the rewards of the rules alone."""
        [call] = [c for c in self.calls if c.role == "rules"]
        results = self.backend.score(call, samples, step)
        return [self._merged(s, {call.name: r}) for s, r in zip(samples, results, strict=True)]

    def _merged(self, sample: Sample, found: Mapping[str, Any]) -> Sample:
        rules, model = found.get("rules.score"), found.get("reward.score")
        failed = sample.conversation is not None and sample.conversation.reward is None
        if failed or (rules is not None and rules.total is None):
            return emptied(sample, with_reference=self.workload.has_reference)
        total, by_rule = sample.reward, dict(sample.rewards or {})
        if rules is not None:
            by_rule |= rules.by_rule
            total = (total or 0.0) + rules.total
        if model is not None:
            by_rule["model"] = float(model)
            total = (total or 0.0) + self.settings.reward_model_weight * by_rule["model"]
        old = found.get("actor.logprob")
        return replace(
            sample,
            reward=total,
            rewards=by_rule or None,
            old_logprobs=sample.rollout_logprobs if old is None else old,
            reference_logprobs=found.get("reference.logprob"),
            values=found.get("critic.value"),
        )

    def learn(self, step: int, samples: list[Sample]) -> Learned:
        """Advantages, training of critic and actor side by side, weight sync."""
        version = self.backend.version
        asked = {sample.group for sample in samples}
        if self.workload.generates:
            samples = self.parts.filtered(samples, step)
            facts = (self.workload.algorithm, samples, self.settings.algorithm, self.max_tokens)
            with_critic = self.workload.has_critic
            if "advantages" in self.parts.made and not self.workload.distils:
                samples = estimated(lambda seen: self.parts.estimates(seen, step, critic=with_critic), *facts)
            elif not self.workload.distils:
                samples = advantages(*facts)
            samples = filtered(samples, self.settings.algorithm)
        tasks: dict[str, Callable[[], list[dict[str, float]]]] = {}
        if self.workload.has_critic:
            critic = recipes.critic_loss(self.settings.algorithm)
            tasks["critic"] = lambda: self.backend.train("critic", samples, critic, step)
        baseline = self._kl_baseline(samples, step) if self.workload.algorithm == "kto" else None
        actor = recipes.actor_loss(
            self.workload,
            self.settings.algorithm,
            max_tokens=self.max_tokens,
            kl_baseline=baseline,
            custom=self.settings.custom.loss,
        )
        tasks["actor"] = lambda: self.backend.train("actor", samples, actor, step)
        with ThreadPoolExecutor(max_workers=len(tasks)) as pool:
            running = {role: pool.submit(task) for role, task in tasks.items()}
            metrics = {role: tuple(values) for role, values in results_of(running, self.backend.stop).items()}
        transfer = self.backend.sync(step) if self.workload.generates else None
        self.parts.learned(samples)
        return Learned(
            step=step,
            samples=tuple(samples),
            actor=metrics["actor"],
            critic=metrics.get("critic", ()),
            transfer=transfer,
            version=version,
            unused=tuple(sorted(asked - {sample.group for sample in samples})),
        )

    def _kl_baseline(self, samples: Sequence[Sample], step: int) -> float:
        """KTO's baseline: how far the policy is from the reference on responses of other prompts."""
        others = mismatched(samples)
        policy = self.backend.score(Call(role="actor", kind="logprob"), others, step)
        reference = self.backend.score(Call(role="reference", kind="logprob"), others, step)
        return kl_baseline(policy, reference)


class _Feeder:
    """The thread that keeps the rollout busy and the buffer filled; with dynamic sampling a second one scores
    groups by the rules and passes on those that teach."""

    step = 0
    """Iteration that is under way."""

    def __init__(self, loop: Loop, buffer: ExperienceBuffer, data: Position) -> None:
        self._loop = loop
        self._done = data.copy()
        self._buffer = buffer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="feeder", daemon=True)
        self._next = data.prompts // loop.workload.gen_prompts
        self._sampling = loop.workload.dynamic_sampling is not None
        self._judges = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")
        self._lock, self._groups = threading.Lock(), StepGroups(loop.workload)
        self._waiting: list[list[GenerationRequest]] = []
        self._late = loop.late
        self._sent: dict[int, list[GenerationRequest]] = {}
        """Requests of the groups that may have to be generated again."""
        self._rejected: dict[int, int] = {}
        self._open: dict[int, list[Sample]] = {}

    def start(self) -> None:
        """Begin to generate."""
        self._thread.start()

    def close(self) -> None:
        """End after the poll that runs."""
        self._stop.set()
        self._thread.join(timeout=30)
        self._judges.shutdown(wait=False, cancel_futures=True)

    def groups_since(self) -> StepGroups | None:
        """What happened to the groups since the last call of this; None without dynamic sampling."""
        if not self._sampling:
            return None
        with self._lock:
            groups, self._groups = self._groups, StepGroups(self._loop.workload)
        return groups

    def late_since(self, samples: Iterable[Sample]) -> LateGroups | None:
        """What was thrown away as too old since the last call of this; `samples` are trained on now."""
        if self._late == "wait":
            return None
        with self._lock:
            rejected, self._rejected = self._rejected, {}
            for group in {s.group for s in samples}:
                self._sent.pop(group, None)
        return LateGroups(tokens=rejected, again=self._late == "requeue")

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self.turn()
        except BaseException as error:
            self._buffer.fail(error)

    def turn(self) -> None:
        """Submit what the buffer has room for, and take what has finished."""
        self._submit()
        for completion in self._loop.backend.poll(0.2):
            self._receive(self._loop.prompter.sample(completion))

    def _submit(self) -> None:
        if self._late != "wait":  # what came too late is counted and, where it goes on, first
            rejected = self._buffer.rejected()
            with self._lock:
                self._rejected |= rejected
                again = [self._sent.pop(group) for group in sorted(rejected) if group in self._sent]
            self._waiting = again + self._waiting
        room = self._buffer.room()
        if room <= 0:
            return
        if not self._waiting:
            requests, size = self._loop.prompter.requests(self._next), self._loop.workload.samples
            fresh = [requests[i : i + size] for i in range(0, len(requests), size)]
            self._waiting = [g for g in fresh if g[0].id // len(g) not in self._done]
            self._next += 1
        chosen, self._waiting = self._waiting[:room], self._waiting[room:]
        numbers = [group[0].id // self._loop.workload.samples for group in chosen]
        if self._late == "requeue":
            with self._lock:
                self._sent |= dict(zip(numbers, chosen, strict=True))
        self._buffer.submitted(numbers)
        self._loop.backend.submit([r for group in chosen for r in group], self._next - 1)

    def _receive(self, sample: Sample) -> None:
        group = self._open.setdefault(sample.group, [])
        group.append(sample)
        if len(group) == self._loop.workload.samples:
            done = sorted(self._open.pop(sample.group), key=lambda s: s.id)
            if self._sampling:
                self._judges.submit(self._judge, done)
            else:
                self._buffer.put(done)

    def _judge(self, group: list[Sample]) -> None:
        try:
            group = self._loop.rewarded(group, self.step)
            with self._lock:
                kept = self._groups.add(group)
                self._groups.check()
            if kept:
                self._buffer.put(group)
            else:
                self._buffer.skip(group[0].group)
        except BaseException as error:
            self._buffer.fail(error)
