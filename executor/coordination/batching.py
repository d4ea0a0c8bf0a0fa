"""How a batch is cut: optimizer steps, then data-parallel ranks of equal work. Deterministic in its seed.

Samples that belong together (both sides of a pair) are never separated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor.engines.balance import lightest_first, units_of
from executor.engines.protocols import MiniBatch
from executor.samples import Sample


def balanced(samples: Sequence[Sample], ranks: int, *, pairs: bool = False) -> list[list[int]]:
    """Indices for every rank, of about equal token counts."""
    units = units_of(samples, pairs)
    lengths = [sum(samples[i].length for i in unit) for unit in units]
    return [sorted(i for u in share for i in units[u]) for share in lightest_first(lengths, ranks)]


def optimizer_steps(
    samples: Sequence[Sample],
    *,
    ranks: int,
    mini_batches: int,
    epochs: int,
    seed: Sequence[int],
    pairs: bool = False,
) -> list[list[MiniBatch]]:
    """For every rank its mini-batch of every optimizer step; normalisers count all ranks.

    Fewer units (samples, or pairs) than mini-batches, as in a self-check, make as many steps as units.
    """
    plan: list[list[MiniBatch]] = [[] for _ in range(ranks)]
    units = units_of(samples, pairs)
    for epoch in range(epochs):
        order = (
            np.random.default_rng([*seed, epoch]).permutation(len(units))
            if mini_batches > 1
            else np.arange(len(units))
        )
        for chunk in np.array_split(order, min(mini_batches, len(units))):
            chosen = [samples[i] for u in chunk for i in units[u]]
            shares = balanced(chosen, ranks, pairs=pairs)
            tokens = max(1, sum(s.num_learned for s in chosen))
            for steps, share in zip(plan, shares, strict=True):
                mine = tuple(chosen[i] for i in share)
                steps.append(MiniBatch(samples=mine, global_tokens=tokens, global_sequences=len(chosen)))
    return plan
