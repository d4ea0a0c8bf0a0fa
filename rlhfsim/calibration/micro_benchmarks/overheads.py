"""Time of engines beyond their kernels: what is left of measured steps once the kernels are priced."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlhfsim.calibration.micro_benchmarks.changes import ProfileEntry, Seen
from rlhfsim.calibration.micro_benchmarks.fit import (
    decode_kernels,
    misfit,
    nonnegative,
    prefill_kernels,
    train_kernels,
)
from rlhfsim.specs.hardware.hardware import MAX_EFFICIENCY, Profile
from rlhfsim.specs.hardware.measured import WIDENING, Measured

LONG = 512
"""Tokens from which a prefill pass says how fast kernels are inside an engine."""


def overheads(seen: Seen, first: Profile) -> tuple[list[ProfileEntry], list[str]]:
    """Changes and notes; `first` holds the rates and kernel tables of the same session."""
    decode, notes = _decode(seen, first)
    return [*decode, *_prefill(seen, first), *_train(seen, first)], notes


def _decode(seen: Seen, first: Profile) -> tuple[list[ProfileEntry], list[str]]:
    """t - kernels(L, n, c) = a_step + a_layer L + a_seq n."""
    points = seen.points("decode_step")
    if len({p.at[0] for p in points}) < 2 or len({p.at[1] for p in points}) < 2:
        return [], []
    kernels = decode_kernels(first, points)
    rows = [(1.0, p.at[0], p.at[1]) for p in points]
    step, layer, sequence = nonnegative(rows, points, kernels)
    how = f"least squares over {len(points)} points, {points[-1].how}"
    pairs = (
        (step, "decode_step_overhead_vllm"),
        (step, "decode_step_overhead"),
        (layer, "decode_layer_overhead"),
        (sequence, "decode_sequence_overhead_vllm"),
        (sequence, "decode_sequence_overhead"),
    )
    off = misfit(rows, points, (step, layer, sequence), kernels)
    note = (
        f"decode steps: kernels and overheads explain the {len(points)} points "
        f"within {100 * off:.0f} % (median)"
    )
    return [seen.coefficient(name, fitted, how) for fitted, name in pairs], [note]


def _prefill(seen: Seen, first: Profile) -> list[ProfileEntry]:
    """Short prompts, where launching outlasts computing: t = a + a_launch L. Long ones: kernels / (t - a)."""
    points = seen.points("prefill_step")
    if len({p.at[0] for p in points}) < 2:
        return []
    short = min(p.at[1] * p.at[2] for p in points)
    few = [p for p in points if p.at[1] * p.at[2] == short]
    fixed, launch = nonnegative([(1.0, p.at[0]) for p in few], few)
    how = f"prefill of {short:g} tokens, {few[-1].how}"
    pairs = (
        (fixed, "prefill_overhead_vllm"),
        (fixed, "prefill_overhead"),
        (launch, "eager_layer_overhead"),
        (launch, "eager_decode_layer_time"),
    )
    entries = [seen.coefficient(name, fitted, how) for fitted, name in pairs]
    long = [p for p in points if p.at[1] * p.at[2] >= LONG]
    if not long:
        return entries
    ratios = [k / (p.value - fixed.value) for k, p in zip(prefill_kernels(first, long), long, strict=True)]
    low, middle, high = (min(float(x), MAX_EFFICIENCY) for x in np.percentile(ratios, [10, 50, 90]))
    efficiency = Measured(
        name="prefill_efficiency",
        value=middle,
        low=low / WIDENING,
        high=min(high * WIDENING, MAX_EFFICIENCY),
        n=sum(p.n for p in long),
        unit="1",
        how=f"kernels timed alone over passes of {LONG} tokens and more, {long[-1].how}",
    )
    return [*entries, seen.coefficient("prefill_efficiency", efficiency)]


def _train(seen: Seen, first: Profile) -> list[ProfileEntry]:
    """Launch of one direction of one layer, h, from b, forward and backward of one more layer.

        h = b/2 - (1 - w) k/2        k kernels, w = `overlap_launch` (0: the core that launches computes)

    Nothing is said where kernels outlast the launch, which then does not show.
    """
    points = seen.points("train_pass")
    if len({p.at[0] for p in points}) < 2:
        return []
    _, each = nonnegative([(1.0, p.at[0]) for p in points], points)
    kernels = train_kernels(first, points[0])
    shown = (1 - first["overlap_launch"]) * kernels / 2
    value, low, high = (x / 2 - shown for x in (each.value, each.low, each.high))
    if (first["overlap_launch"] > 0 and value < kernels / 2) or value <= 0:
        return []
    fitted = replace(each, value=value, low=max(low, 0.0), high=high, how=points[-1].how)
    return [seen.coefficient("host_layer_time", fitted)]
