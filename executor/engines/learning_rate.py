"""Learning rate of every optimizer step."""

from __future__ import annotations

import math

from executor.settings import Optimizer


def learning_rate(optimizer: Optimizer, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step`, from 0.

        warm-up  rate (step + 1) / warmup_steps          while step < warmup_steps
        constant rate    linear  rate (1 - x)    cosine  rate (1 + cos(pi x)) / 2

    x is the share of the steps after warm-up that are done, so that the last step still learns.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.learning_rate * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    match optimizer.schedule:
        case "constant":
            return optimizer.learning_rate
        case "linear":
            return optimizer.learning_rate * (1.0 - done)
        case "cosine":
            return optimizer.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
