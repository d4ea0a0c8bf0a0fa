"""What the driver computes for KTO: the baseline of its loss, on numpy, so that the driver needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from executor.samples import Floats, Sample


def mismatched(samples: Sequence[Sample]) -> list[Sample]:
    """Every prompt with the response of the next sample: what KTO's baseline is estimated on.

    Log-probs of these come from one more forward pass of policy and reference.
    """
    responses = [sample.response for sample in samples]
    moved = [*responses[1:], *responses[:1]]
    pairs = zip(samples, moved, strict=True)
    return [replace(sample, response=response) for sample, response in pairs]


def kl_baseline(policy: Sequence[Floats], reference: Sequence[Floats]) -> float:
    """KTO's baseline, max(0, mean log-ratio), from the log-probs of ALL mismatched samples of the step."""
    ratios = [float(np.sum(new - old)) for new, old in zip(policy, reference, strict=True)]
    return max(0.0, sum(ratios) / len(ratios))
