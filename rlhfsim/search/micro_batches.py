"""Sizes of a micro-batch that compete: sequences, or packs where lengths differ and the framework packs.

Both double from one sequence of the longest length on: less does not hold it, and what a micro-batch costs
apart from its tokens (launches, weights that ZeRO-3 gathers) falls with their number, so that finer steps
differ little. Where all sequences are alike, packs are numbers of sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhfsim.search.request import Request
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.micro_batch import BatchLengths, batch_lengths
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.specs.workload.workload import Workload

FEATURE = "micro-batches by tokens"
RUNGS = 4
"""Sizes that compete at least: 1, 2, 4 and 8 sequences."""
SATURATED = 16384.0
"""Tokens of a GPU up to which larger ones compete too: ZeRO-3 moves about 8 B a parameter at 50 GB/s while an
H100 computes its 6 FLOP a token at 600 TFLOP/s, so that 16,000 tokens hide all of it."""

SEQUENCES = {"micro_batch", "score_micro_batch"}

Fields = Mapping[str, int | str]


def lengths_key(workload: Workload) -> tuple[float, float, bool, bool]:
    """What of the lengths decides which sizes compete."""
    batch = batch_lengths(workload)
    return batch.max_tokens, batch.mean_tokens, workload.packing, batch.deviation > 0


def sizes(request: Request, role: str, cp: int) -> list[dict[str, Any]]:
    """Fields of a layout with `cp` for every size of its micro-batch, smallest first."""
    batch, fixed = batch_lengths(request.workload), request.fix.get(role, {})
    unit = batch.together if role in TRAINED else 1
    if {"pack_tokens", "score_pack_tokens"} & set(fixed) or (
        _packs(request, role, batch) and not SEQUENCES & set(fixed)
    ):
        least = math.ceil(batch.max_tokens / cp)
        packs = _fixed(fixed, "pack_tokens") or [least * n for n in _doubled(least, unit)]
        [scoring] = _fixed(fixed, "score_pack_tokens") or [None]
        return [{"pack_tokens": size, "score_pack_tokens": scoring} for size in packs]
    sequences = _fixed(fixed, "micro_batch") or _doubled(batch.mean_tokens / cp, unit)
    scored = {name: fixed[name] for name in ("score_micro_batch",) if name in fixed}
    return [{"micro_batch": size, **scored} for size in sequences]


def has_work(layout: Layout, batch: BatchLengths) -> bool:
    """Whether a mini-batch fills a micro-batch of every rank, and an interleaved pipeline evenly.

    A pack may stay part-filled where each rank has a single one.
    """
    pack = layout.pack(scoring=False)
    if pack is None:
        size = layout.dp * layout.micro_batch
        return size <= batch.sequences and (layout.vp == 1 or batch.sequences // size % layout.pp == 0)
    filled = pack <= batch.max_tokens or pack * layout.dp <= batch.sequences * batch.mean_tokens
    stages = layout.vp == 1 or batch.micro_batches(layout) >= layout.pp  # frameworks fill up the last round
    return layout.dp <= batch.sequences and filled and stages


def _packs(request: Request, role: str, batch: BatchLengths) -> bool:
    """Whether packs compete for a role: a bound on its sequences asks for sequences."""
    runs = request.runs is None or FEATURE in request.runs.features
    differ = batch.deviation > 0 or (request.runs is not None and request.runs.says.packs)
    asked = any(limit.role == role and limit.field == "micro_batch" for limit in request.limits)
    if request.runs is not None and request.runs.serves(role):
        return not asked  # engines batch tokens
    return request.workload.packing and differ and runs and not asked


def _doubled(tokens: float, unit: int) -> list[int]:
    """1, 2, 4, ... times `tokens` of a GPU, of 2 on where pairs train."""
    last = max(RUNGS - 1, math.ceil(math.log2(SATURATED / tokens) - 1e-9)) if tokens > 0 else RUNGS - 1
    return [1 << n for n in range(last + 1) if 1 << n >= unit]


def _fixed(fixed: Fields, name: str) -> list[Any]:
    return [fixed[name]] if name in fixed else []
