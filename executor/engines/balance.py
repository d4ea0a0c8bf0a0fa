"""Samples in shares of about equal work: of optimizer steps, ranks and micro-batches. Deterministic.

Samples that belong together (both sides of a pair) are never separated. Needs no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from executor.engines.protocols import MiniBatch
from executor.samples import Sample


def units_of(samples: Sequence[Sample], paired: bool) -> list[list[int]]:
    """Indices of what is never separated: single samples, or those of a group."""
    if not paired:
        return [[i] for i in range(len(samples))]
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    return list(groups.values())


def alike(lengths: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Units of similar length together, longest first, so that few tokens are padding."""
    shares: list[list[int]] = []
    width = rows = 0
    for unit in sorted(range(len(lengths)), key=lambda u: (-max(lengths[u]), u)):
        if not shares or (rows + len(lengths[unit])) * width > tokens:
            shares, width, rows = [*shares, []], max(lengths[unit]), 0
        shares[-1].append(unit)
        rows += len(lengths[unit])
    return shares


def bins(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """As few packs as longest-first balancing gets within `tokens`, of about equal tokens, fullest first."""
    number = max(1, -(-sum(lengths) // tokens))
    while True:
        shares = lightest_first(lengths, number)
        loads = [sum(lengths[u] for u in share) for share in shares]
        if max(loads) <= max([tokens, *lengths]) or number >= len(lengths):
            return [shares[i] for i in sorted(range(number), key=lambda i: -loads[i]) if shares[i]]
        number += 1


def lightest_first(lengths: Sequence[int], number: int) -> list[list[int]]:
    """Indices in `number` shares of about equal sums: longest first to the lightest share.

    Longest-processing-time rule: within 4/3 of the best (Graham 1969, SIAM J. Appl. Math. 17(2)).
    """
    heap = [(0, share) for share in range(number)]
    shares: list[list[int]] = [[] for _ in range(number)]
    for one in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, share = heapq.heappop(heap)
        shares[share].append(one)
        heapq.heappush(heap, (load + lengths[one], share))
    return shares


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
