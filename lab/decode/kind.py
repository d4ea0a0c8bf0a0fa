"""Time per output token in aggregated serving, against the points of the pinned development package.

Predicted from kernel curves and a few coefficients per engine, fitted on the even rows (see
`lab.decode.points.Serving.fitted`) and reported on the odd ones. What another planner, AIConfigurator,
predicts for the odd rows stands in `decode_peer.csv`, one figure a row, written once by
`python -m lab.fits.decode_peer`. `decode.later` are the rows that were not priced when the coefficients were fitted:
4-bit weights, gated delta net, sparse attention; no fit has read one.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from lab.decode.load import device_at, kv_precision_of, layout_of, left_out, model_at, predicted
from lab.decode.points import FILE, Serving, installed, servings, skip_reason
from rlhfsim.rollout.engine_step import CURVE_SPREAD, Spread
from rlhfsim.rollout.untimed import kernel_spread
from rlhfsim.units import MILLISECOND
from rlhfsim.validation.outcome import Outcome
from rlhfsim.validation.rows import Row

PEER_FILE = "decode_peer.csv"
SPREAD = {"vllm": (0.90, 1.17), "sglang": (0.78, 1.22), "trtllm": (0.81, 1.16)}
"""P10 and P90 of measured over predicted on the even rows; SGLang, fitted on one model and one GPU
only, as wide as its bias between models is unknown (prior)."""


def outcomes(rows: Sequence[Row] = ()) -> list[Outcome]:
    """One outcome a serving point; `rows` is not used, the points come from the package."""
    del rows
    points = servings()
    excluded = left_out(points)
    return [_outcome(point, excluded.get(point.id)) for point in points]


def _outcome(point: Serving, conflict: str | None) -> Outcome:
    reason = skip_reason(point) or conflict
    value = None if reason else predicted(point)
    low, high = spread_of(point)
    return Outcome(
        kind="decode.later" if point.later else "decode",
        file=FILE,
        line=point.line,
        source=f"{point.engine}, {'InferenceMAX' if point.family == 'inferencemax' else 'sweep'}",
        label=f"{point.model.rsplit('/', 1)[-1]} on {point.gpus} {point.system}, tp {point.tp}, "
        f"{point.isl}/{point.osl}, {point.batch:g} a rank",
        measured=point.tpot,
        predicted=value,
        low=None if value is None else value * low,
        high=None if value is None else value * high,
        skipped=reason,
        assumptions=() if reason else _assumptions(point),
        part="fit" if point.fitted else "report",
        detail=_detail(point),
    )


def spread_of(point: Serving) -> Spread:
    """P10 and P90 of measured over predicted: of the engine, or wider where kernels of the model were never timed."""
    if skip_reason(point):
        return SPREAD[point.engine]
    kernels = kernel_spread(device_at(point.system, point.engine), model_at(point.model), layout_of(point))
    return SPREAD[point.engine] if kernels is CURVE_SPREAD else kernels


def _detail(point: Serving) -> dict[str, float | str]:
    peer = peers().get(point.id)
    known: dict[str, float | str] = {"engine": point.engine, "model": point.model, "system": point.system}
    return known if peer is None else {**known, "peer_s": peer, "peer_error": peer / point.tpot - 1}


def _assumptions(point: Serving) -> tuple[str, ...]:
    lengths = "input and output lengths 0.8-1.0 of the stated (InferenceMAX random_range_ratio)"
    known = (f"KV cache {kv_precision_of(point)} (launch scripts)", "8192 tokens a step (launch scripts)")
    return (*point.notes, *known, *((lengths,) if point.family == "inferencemax" else ()))


@cache
def peers() -> dict[str, float]:
    """AIConfigurator's TPOT in seconds by row id, for the version it was asked from."""
    data = Path(__file__).parent / PEER_FILE
    if not data.is_file():
        return {}
    with data.open(encoding="utf-8") as file:
        found = {row["id"]: row["tpot_ms"] for row in csv.DictReader(file) if row["tpot_ms"]}
    return {key: float(value) * MILLISECOND for key, value in found.items()}


def available() -> bool:
    """Whether the development package, and with it the rows, is installed."""
    return installed() is not None
