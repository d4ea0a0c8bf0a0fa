"""How a batch is cut: optimizer steps, then data-parallel ranks of equal work. Deterministic in its seed.

Samples that belong together (both sides of a DPO pair) are never separated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from executor.engines.protocols import MiniBatch
from executor.samples import Sample


def balanced(samples: Sequence[Sample], ranks: int, *, pairs: bool = False) -> list[list[int]]:
    """Indices for every rank, of about equal token counts; longest first to the lightest rank.

    Longest-processing-time rule: within 4/3 of the best (Graham 1969, SIAM J. Appl. Math. 17(2)).
    """
    units = _units(samples, pairs)
    lengths = [sum(samples[i].length for i in unit) for unit in units]
    heap = [(0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for unit in sorted(range(len(units)), key=lambda u: (-lengths[u], u)):
        load, rank = heapq.heappop(heap)
        shares[rank] += units[unit]
        heapq.heappush(heap, (load + lengths[unit], rank))
    return [sorted(share) for share in shares]


def _units(samples: Sequence[Sample], pairs: bool) -> list[list[int]]:
    if not pairs:
        return [[i] for i in range(len(samples))]
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    return list(groups.values())


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
    units = _units(samples, pairs)
    for epoch in range(epochs):
        order = (
            np.random.default_rng([*seed, epoch]).permutation(len(units))
            if mini_batches > 1
            else np.arange(len(units))
        )
        for chunk in np.array_split(order, min(mini_batches, len(units))):
            chosen = [samples[i] for u in chunk for i in units[u]]
            shares = balanced(chosen, ranks, pairs=pairs)
            tokens = sum(s.num_tokens for s in chosen)
            for steps, share in zip(plan, shares, strict=True):
                mine = tuple(chosen[i] for i in share)
                steps.append(MiniBatch(samples=mine, global_tokens=tokens, global_sequences=len(chosen)))
    return plan
