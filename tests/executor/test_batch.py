"""From samples to padded tensors, and what KTO needs before its loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from executor.algorithms.batch import collate
from executor.algorithms.kto_baseline import kl_baseline, mismatched
from executor.samples import Sample


def sample(number: int, length: int, **fields_: Any) -> Sample:
    tokens = np.full(length, number, np.int64)
    return Sample(id=number, group=number // 2, prompt=np.array([number]), response=tokens, **fields_)


def test_mismatched_samples_pair_every_prompt_with_the_next_response() -> None:
    moved = mismatched([sample(0, 2), sample(1, 3), sample(2, 1)])
    assert [(s.prompt[0], *s.response) for s in moved] == [(0, 1, 1, 1), (1, 2), (2, 0, 0)]


def test_the_baseline_of_kto_is_never_negative() -> None:
    low, high = [np.array([-2.0, -1.0], np.float32)], [np.array([-1.0, -1.0], np.float32)]
    assert kl_baseline(high, low) == pytest.approx(1.0)
    assert kl_baseline(low, high) == 0.0


def test_collate_pads_to_the_longest_response_and_leaves_out_what_a_sample_lacks() -> None:
    rows = [
        sample(
            i,
            length,
            label=1.0 - 2 * i,
            advantages=np.full(length, 2.0, np.float32),
            values=np.ones(length, np.float32),
        )
        for i, length in enumerate((2, 3))
    ]
    batch = collate([*rows[:1], replace(rows[1], values=None)], num_tokens=10, num_sequences=4)
    assert batch.mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [[2, 2, 0], [2, 2, 2]]
    assert batch.old_values is None
    assert batch.labels is not None
    assert batch.labels.tolist() == [1.0, -1.0]
    assert batch.group is not None
    assert batch.group.tolist() == [0, 0]
    assert collate([], num_tokens=1, num_sequences=1).mask.shape == (0, 0)
