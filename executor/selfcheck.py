"""The first minute: one of everything before the long work, then the state as it was.

generate -> log-prob agreement -> save -> one step -> sync -> agreement -> load -> sync -> agreement.

Where all states are larger than `CHECK_BYTES`, that much of them goes to files and back and is compared, and
weights are synced as they are: a step that is not taken needs no 240 GB to be undone.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from executor.algorithms.iteration import Loop
from executor.coordination.worker_groups import WorkerGroups
from executor.samples import Sample
from executor.settings import Say
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.workload.dataflow import Call
from rlhfsim.units import GB

PROMPTS = 2
"""Prompts of the check; their samples must fill every data-parallel rank."""
CHECK = -1
"""Step number of the check's spans; ids of its requests are negative."""
CHECK_BYTES = int(GB)
"""Most that the check writes and reads."""


@frozen
class LogprobAgreement:
    """Log-probs of the engine against the trainer's forward on the same tokens."""

    mean: float
    largest: float
    tokens: int


def agreement(workers: WorkerGroups, samples: list[Sample]) -> LogprobAgreement:
    """Compare; the samples must come from the present weights."""
    trained = workers.score(Call(role="actor", kind="logprob"), samples, CHECK)
    gaps = np.concatenate(
        [np.abs(t - s.rollout_logprobs)[s.sampled] for t, s in zip(trained, samples, strict=True)]
    )
    return LogprobAgreement(mean=float(gaps.mean()), largest=float(gaps.max()), tokens=len(gaps))


def self_check(workers: WorkerGroups, loop: Loop, scratch: Path, say: Say) -> None:
    """Run it.

    Raises:
        RlhfsimError: the engine's log-probs are not the trainer's, or weights did not arrive.
    """
    limit = workers.job.settings.logprob_tolerance
    before = _samples(workers, loop)
    first = agreement(workers, before)
    say(
        f"log-probs of engine and trainer differ by {first.mean:.1e} on average, "
        f"{first.largest:.1e} at most ({first.tokens} tokens)"
    )
    _refuse(first, limit, "initial weights")
    folder = scratch / "self-check"
    if workers.job.limits.state_bytes > CHECK_BYTES:
        moved = workers.save_and_compare(folder, CHECK_BYTES)
        say(f"{moved:,} bytes of the states saved and loaded: equal")
        say(f"weights synced: {workers.sync(CHECK).bytes:,} bytes, checksums equal")
        _refuse(agreement(workers, _samples(workers, loop)), limit, "weights after a sync")
    else:
        _step_and_back(workers, loop, before, folder, say)
    shutil.rmtree(folder, ignore_errors=True)


def _step_and_back(workers: WorkerGroups, loop: Loop, before: list[Sample], folder: Path, say: Say) -> None:
    """One training step and its sync, then the state as it was."""
    limit = workers.job.settings.logprob_tolerance
    workers.save(folder)
    say("state saved")
    learned = loop.learn(CHECK, _rewarded(before))
    sent = learned.transfer.bytes if learned.transfer else 0
    say(f"one training step and sync: {sent:,} bytes, checksums equal")
    second = agreement(workers, _samples(workers, loop))
    say(f"after the sync they differ by {second.mean:.1e} on average")
    _refuse(second, limit, "weights after a sync")
    workers.restore(folder)
    workers.sync(CHECK)
    third = agreement(workers, _samples(workers, loop))
    _refuse(third, limit, "restored weights")
    say("state restored and synced; the run starts")


def check_restored(workers: WorkerGroups, loop: Loop, say: Say) -> None:
    """After a restore and its sync: the engine has the weights that the trainer goes on with.

    Raises:
        RlhfsimError: their log-probs differ.
    """
    gap = agreement(workers, _samples(workers, loop))
    say(f"state restored and synced; log-probs of engine and trainer differ by {gap.mean:.1e} on average")
    _refuse(gap, workers.job.settings.logprob_tolerance, "restored weights")


def _samples(workers: WorkerGroups, loop: Loop) -> list[Sample]:
    """A few responses under the present weights."""
    requests = loop.prompter.requests(0)[: max(PROMPTS * loop.workload.samples, workers.most_ranks)]
    done = workers.generate([replace(r, max_tokens=min(r.max_tokens, 32)) for r in requests], CHECK)
    return [loop.prompter.sample(c) for c in done]


def _rewarded(samples: list[Sample]) -> list[Sample]:
    """Rewards that differ within every group, so that there is something to learn; all calls' results."""
    return [
        replace(
            s,
            reward=float(i % 2),
            old_logprobs=s.rollout_logprobs,
            reference_logprobs=s.rollout_logprobs,
            values=np.zeros(s.num_tokens, np.float32),
        )
        for i, s in enumerate(samples)
    ]


def _refuse(gap: LogprobAgreement, limit: float, what: str) -> None:
    if not gap.mean <= limit:
        raise RlhfsimError(
            "logprob-mismatch",
            f"{what}: log-probs of the rollout engine and the trainer differ by {gap.mean:.3g} on average, "
            f"more than {limit:g}",
            help="the engine does not compute what is trained: check dtype, tokenizer and tied embeddings; "
            "raise logprob_tolerance only for a known cause (BF16, FP8)",
        )
