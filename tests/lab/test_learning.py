"""What is said of runs that learn, and of one seed alone."""

from __future__ import annotations

from typing import Any

import pytest

from lab import learning
from rlhfsim.specs.workload.workload import GROUPED


def run(algorithm: str, seed: int, end: float) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "seed": seed,
        "reward": {"0": 0.2, str(learning.ITERATIONS): end},
        "seconds": 9,
    }


def test_a_rise_has_the_interval_of_its_seeds() -> None:
    runs = [run("gspo", seed, end) for seed, end in enumerate((0.4, 0.5, 0.6))]
    mean, half = learning.rise_of(runs)
    assert mean == pytest.approx(0.3)
    assert half == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)  # Student's t, two degrees of freedom
    text = learning.report([*runs, run("dapo", 0, 0.4)])
    assert "| gspo | +0.300 | +0.052 to +0.548 | +0.200, +0.300, +0.400 | 0.20 0.50 | 9 s |" in text
    assert "| dapo | +0.200 | one seed |" in text


@pytest.mark.parametrize("algorithm", learning.ALGORITHMS)
def test_all_algorithms_learn_from_as_many_sequences(algorithm: str) -> None:
    work = learning.workload(algorithm)
    assert work.num_sequences == learning.SEQUENCES
    assert (work.samples > 1) == (algorithm in GROUPED)
