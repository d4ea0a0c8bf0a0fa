"""Every local weight path, run and timed between one trainer and one rollout replica."""

from __future__ import annotations

import statistics
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from executor.algorithms import recipes
from executor.algorithms.advantages import advantages
from executor.coordination import cluster, weights
from executor.coordination.tracing import RunRecorder
from executor.coordination.worker_groups import WorkerGroups
from executor.launch import prepare
from executor.resolve import Job, environment
from executor.rewards.ahead import RuleRewards
from executor.samples import Sample
from executor.selfcheck import agreement
from executor.settings import Say, Settings
from executor.tasks.prompter import TaskPrompter
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, WeightPath

PROBES = 8
"""Responses whose log-probs are compared after each path's last sync."""


@frozen
class PathTime:
    """One path; the first transfer, which sets things up, apart."""

    path: WeightPath
    bytes: int
    first_s: float
    median_s: float
    low_s: float
    high_s: float
    logprob_gap: float
    """Largest |log-prob of the engine - of the trainer| after the last sync."""


def time_paths(plan: Plan, settings: Settings, scratch: Path, repeats: int, say: Say) -> list[PathTime]:
    """Start the plan's trainer and rollout once, then send the weights along every path `repeats` times.

    Adapters travel only where the plan trains LoRA; the other paths then carry merged weights.

    Raises:
        PartFailed: an end failed or the checksums differ.
    """
    job, prompter = prepare(plan, settings)
    with cluster.joined(plan, None, environment(job), job.limits.start) as reservation:
        workers = WorkerGroups(job, reservation, scratch, RunRecorder(), RuleRewards())
        with closing(workers):
            say("starting a trainer and a rollout replica")
            workers.start()
            return [
                _timed(workers, job, prompter, path, scratch, repeats, say)
                for path, rules in WEIGHT_PATHS.items()  # those that this executor carries there
                if job.plan.topology in rules.transports and not rules.needs_backend
            ]


def _timed(
    workers: WorkerGroups,
    job: Job,
    prompter: TaskPrompter,
    path: WeightPath,
    scratch: Path,
    repeats: int,
    say: Say,
) -> PathTime:
    placement = replace(job.plan.placement, weight_path=path)
    workers.reroute(
        weights.WeightRoute(
            replace(job, plan=replace(job.plan, placement=placement)), workers.trainer, scratch
        )
    )
    samples = [  # one update, so that a path that brings nothing is seen
        replace(s, reward=float(i % 2), old_logprobs=s.rollout_logprobs)
        for i, s in enumerate(_probes(workers, prompter))
    ]
    workload, algorithm = job.plan.workload, job.settings.algorithm
    loss = recipes.actor_loss(workload, algorithm, max_tokens=job.max_tokens)
    workers.train("actor", advantages(workload.algorithm, samples, algorithm), loss, 0)
    transfers = [workers.sync(step) for step in range(repeats + 1)]
    gap = agreement(workers, _probes(workers, prompter)).largest
    times = [transfer.seconds for transfer in transfers[1:]]
    say(f"{path}: {statistics.median(times):.3f} s, log-probs within {gap:.1e}")
    return PathTime(
        path=path,
        bytes=transfers[-1].bytes,
        first_s=transfers[0].seconds,
        median_s=statistics.median(times),
        low_s=min(times),
        high_s=max(times),
        logprob_gap=gap,
    )


def _probes(workers: WorkerGroups, prompter: TaskPrompter) -> list[Sample]:
    done = workers.generate(prompter.requests(0)[:PROBES], 0)
    return [prompter.sample(c) for c in done]
