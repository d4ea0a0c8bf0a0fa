"""Seconds of the driver in one iteration with hundreds of ranks: hand out, collect and record all calls.

    python lab/benchmarks/many_ranks.py [--ranks 512] [--samples 4096] [--tokens 512] [--hosts 4]

Two scoring calls and a training call go to every rank, as they do in a GRPO step, each rank on samples of its
own. Ranks are fake engines that take no time, many in one process, because one machine does not hold hundreds of
processes; what the driver does for each is the same: one Ray call, one reply, one record. CPU seconds are those of
the driver's process alone. Limit: 2 s an iteration.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import ray

from executor.coordination.tracing import RunRecorder, Tags
from executor.coordination.worker import Worker, WorkerIdentity
from executor.coordination.worker_group import GroupSpec, WorkerGroup
from executor.engines.balance import balanced, optimizer_steps
from executor.engines.fake import Fakes
from executor.engines.protocols import EngineSpec
from executor.samples import LossSpec, Sample
from rlhfsim.specs.placement.layout import Layout

LIMIT_S, CALL_S, ITERATIONS = 2.0, 120.0, 4


@ray.remote
class Host:
    """Many ranks in one process."""

    def __init__(self, ranks: list[int], world: int) -> None:
        self.workers = {
            rank: Worker(WorkerIdentity(pool="all", rank=rank, ranks=world, fakes=Fakes(seconds={})))
            for rank in ranks
        }

    def call(self, rank: int, method: str, *args: Any) -> Any:
        """One method of one rank."""
        return getattr(self.workers[rank], method)(*args)


class Rank:
    """Looks like the Ray handle of a worker."""

    def __init__(self, host: Any, rank: int) -> None:
        self._host, self._rank = host, rank

    def __getattr__(self, method: str) -> Any:
        host, rank = self._host, self._rank

        class Method:
            """As a handle's."""

            @staticmethod
            def remote(*args: Any) -> Any:
                """The call, under way."""
                return host.call.remote(rank, method, *args)

        return Method


def main() -> None:
    """Print one row for each iteration, then the median."""
    parser = argparse.ArgumentParser()
    for name, default in (("ranks", 512), ("samples", 4096), ("tokens", 512), ("hosts", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    ray.init(
        num_cpus=asked.hosts, include_dashboard=False, object_store_memory=512 * 2**20, log_to_driver=False
    )
    hosts = [Host.remote(list(range(i, asked.ranks, asked.hosts)), asked.ranks) for i in range(asked.hosts)]
    group = WorkerGroup(
        spec=GroupSpec(
            name="actor", pool="all", roles=("actor",), places=tuple((0, i) for i in range(asked.ranks))
        ),
        actors=[Rank(hosts[i % asked.hosts], i) for i in range(asked.ranks)],
    )
    layout = Layout(dp=asked.ranks)
    group.call("build", EngineSpec(role="actor", model="", layout=layout), limit_s=CALL_S)
    some, recorder, spent = samples(asked.samples, asked.tokens), RunRecorder(), []
    print(f"{asked.ranks} ranks, {asked.samples} samples of {asked.tokens} tokens")
    print(f"{'iteration':>9} {'wall s':>8} {'driver CPU s':>13}")
    for number in range(ITERATIONS):
        wall, cpu = time.perf_counter(), time.process_time()
        iteration(group, asked.ranks, some, recorder)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        spent.append((wall, cpu))
        print(f"{number:9} {wall:8.2f} {cpu:13.2f}")
    wall, cpu = (float(np.median(column)) for column in zip(*spent[1:], strict=True))
    print(
        f"{'median':>9} {wall:8.2f} {cpu:13.2f}   limit {LIMIT_S} s  {'ok' if cpu <= LIMIT_S else 'MISSED'}"
    )
    ray.shutdown()


def iteration(group: WorkerGroup, ranks: int, some: list[Sample], recorder: RunRecorder) -> None:
    """Two scoring calls and a training call."""
    for name in ("actor.logprob", "reference.logprob"):
        parts = [[some[i] for i in share] for share in balanced(some, ranks)]
        tags = Tags(name=name, step=0, version=0)
        scatter(group, "forward", parts, ("actor", "logprobs", tags), recorder)
    batches = optimizer_steps(some, ranks=ranks, mini_batches=1, epochs=1, seed=(0,))
    tags = Tags(name="actor.train", step=0, version=0)
    scatter(group, "train", batches, ("actor", LossSpec(name="policy", settings={}), tags), recorder)


def scatter(group: WorkerGroup, method: str, parts: Any, args: Any, recorder: RunRecorder) -> None:
    """As the worker groups of a run hand out a call."""
    refs = [ray.put(part) for part in parts]
    for part, reply in zip(group.parts, group.call(method, *args, limit_s=CALL_S, each=refs), strict=True):
        recorder.add(reply, part=part)


def samples(count: int, tokens: int) -> list[Sample]:
    """Samples of equal length, with the arrays that a GRPO sample has."""
    zeros = np.zeros(tokens, np.float32)
    return [
        Sample(
            id=i,
            group=i // 8,
            prompt=np.zeros(128, np.int64),
            response=np.zeros(tokens, np.int64),
            rollout_logprobs=zeros,
            old_logprobs=zeros,
            advantages=zeros,
        )
        for i in range(count)
    ]


if __name__ == "__main__":
    main()
