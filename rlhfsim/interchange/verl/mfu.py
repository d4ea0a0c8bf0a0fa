"""What verl counts as MFU, and the peak of a GPU that a logged MFU was therefore taken of.

    mfu = FLOP epochs / (seconds GPUs peak),   FLOP = tokens (6 N + 12 layers heads head_dim length)

N counts the embedding and the LM head, also where they are one matrix (`verl/utils/flops_counter.py`, 0.9.1;
the attention term is half of that since v0.6). `seconds` are those of `update_policy` alone, the timer holds
loading as well: over steps of different length, timer = loading + FLOP epochs / (mfu GPUs peak).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model

MFU, TOKENS, TIMER = "perf/mfu/actor", "perf/total_num_tokens", "timing_s/update_actor"
FEW = 8
"""Steps from which loading can be told from work."""


def peak(run: RunDescription, steps: Sequence[Mapping[str, float]]) -> float | None:
    """FLOP/s of a GPU that were taken for 100 % MFU; None: not logged."""
    spec = resolve_model(run.model)
    rows = []
    for values in steps:
        mfu, tokens, seconds = (values.get(name, 0.0) for name in (MFU, TOKENS, TIMER))
        length = sum(values.get(f"{part}_length/mean", 0.0) for part in ("prompt", "response"))
        if min(mfu, tokens, seconds) > 0:
            flop = tokens * flop_per_token(spec, length) * max(1, run.epochs)
            rows.append((flop / (mfu * run.gpus), seconds))
    if not rows:
        return None
    least = median(work / seconds for work, seconds in rows)
    return _without_loading(rows[1:], least) or least


def flop_per_token(spec: ModelSpec, length: float) -> float:
    """Forward and backward of one token in a sequence of `length` tokens, as verl counts."""
    twice = spec.vocab * spec.hidden if spec.tied_embeddings else 0
    attention = 12 * spec.num_layers * spec.attention.num_heads * spec.attention.head_dim * length
    return 6.0 * (spec.num_active_params + twice) + attention


def _without_loading(rows: Sequence[tuple[float, float]], least: float) -> float | None:
    """The slope of timers over work; None where the steps are too few or too much alike."""
    if len(rows) < FEW:
        return None
    work, seconds = np.array(rows).T
    usual = seconds < 3 * np.median(seconds)
    if usual.sum() < FEW or np.std(work[usual]) < 0.03 * np.mean(work[usual]):
        return None
    slope = float(np.polyfit(work[usual], seconds[usual], 1)[0])
    return 1 / slope if slope > 0 and least < 1 / slope < 3 * least and math.isfinite(slope) else None
