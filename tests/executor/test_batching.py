"""Samples over ranks and optimizer steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from executor.engines.balance import balanced, optimizer_steps
from executor.samples import Sample


def sample(number: int, group: int | None = None) -> Sample:
    prompt, response = np.ones(2, np.int64), np.ones(1 + number % 3, np.int64)
    return Sample(id=number, group=number if group is None else group, prompt=prompt, response=response)


@pytest.mark.parametrize(("count", "ranks", "mini_batches"), [(12, 2, 3), (7, 2, 4), (5, 3, 1)])
def test_every_sample_is_in_one_optimizer_step_of_one_rank(count: int, ranks: int, mini_batches: int) -> None:
    samples = [sample(i) for i in range(count)]
    plan = optimizer_steps(samples, ranks=ranks, mini_batches=mini_batches, epochs=1, seed=[0])
    assert [len(steps) for steps in plan] == [mini_batches] * ranks
    seen = [s.id for steps in plan for batch in steps for s in batch.samples]
    assert sorted(seen) == list(range(count))
    for step in zip(*plan, strict=True):
        tokens = sum(s.num_tokens for batch in step for s in batch.samples)
        assert {batch.global_tokens for batch in step} == {tokens}


def test_ranks_have_equal_tokens_up_to_one_sample_where_lengths_are_long_tailed() -> None:
    lengths = np.random.default_rng(0).lognormal(5, 1, 200).astype(int) + 1
    many = [replace(sample(i), response=np.ones(n, np.int64)) for i, n in enumerate(lengths)]
    plan = optimizer_steps(many, ranks=8, mini_batches=2, epochs=1, seed=[0])
    shares = [[[s.length for s in step.samples] for step in steps] for steps in plan]
    shares += [[[many[i].length for i in share]] for share in balanced(many, 8)]
    for ranks in (*zip(*shares[:8], strict=True), [share for [share] in shares[8:]]):
        loads = [sum(share) for share in ranks]
        assert max(loads) - min(loads) <= min(max(share) for share in ranks)
        assert max(loads) < 1.02 * sum(loads) / 8


def test_no_optimizer_step_is_empty_where_samples_are_few() -> None:
    plan = optimizer_steps([sample(0), sample(1)], ranks=1, mini_batches=4, epochs=2, seed=[0])
    assert [len(batch.samples) for batch in plan[0]] == [1, 1, 1, 1]


def test_sides_of_a_pair_stay_together() -> None:
    samples = [sample(2 * g + side, g) for g in range(3) for side in (0, 1)]
    plan = optimizer_steps(samples, ranks=2, mini_batches=2, epochs=1, seed=[0], pairs=True)
    for steps in plan:
        for batch in steps:
            groups = [s.group for s in batch.samples]
            assert all(groups.count(g) == 2 for g in groups)
