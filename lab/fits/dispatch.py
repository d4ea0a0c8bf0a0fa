"""Fit of DeepEP's kernels inside one NVLink domain: `deepep_nvlink_efficiency`, `deepep_latency` and, of the
low-latency kernels, `deepep_ll_nvlink_efficiency`, `deepep_ll_latency`.

    python -m lab.fits.dispatch          prints the lines for hardware_profiles/<name>.yaml

    t = a + S copies (n-1)/n / (B eta)           S bytes of the tokens of a GPU, as `kernels.collectives.dispatch`
    copies: `Routing.copies` of the normal kernels, k of the low-latency ones

Tables of 8 GPUs (4 of GB200 and GB300). Normal: the way back in BF16, with the SMs that Megatron-Core gives it by
default. Low latency: there in FP8 with block scales, and back in BF16.
Soft-L1 on log time over half of the shapes; the interval is that of the other half.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.fits.kernel_tables import SYSTEMS, Floats, even, package, root
from rlhfsim.kernels.routing import Routing
from rlhfsim.rollout.collective_time import FP8_BLOCK_BYTES
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.mixers import BF16
from rlhfsim.units import MICROSECOND

TABLES = {name: f"comm/sglang/0.5.12/wideep_{name}_perf.parquet" for name in ("deepep_normal", "deepep_ll")}
NAMES = {"deepep_normal": "deepep", "deepep_ll": "deepep_ll"}
"""Table -> beginning of its coefficients."""
DEFAULT_SMS = 20
SHAPE = ["hidden_size", "num_token", "num_topk", "num_experts"]
WAYS = {"dispatch_avg_t_us": FP8_BLOCK_BYTES, "combine_avg_t_us": BF16}
"""Columns of the low-latency table, and bytes of an element on that way."""
START = np.log([30 * MICROSECOND, 0.5])
LOSS_SCALE = 0.1


class Fit(NamedTuple):
    """What a table says of one GPU."""

    latency: float
    efficiency: float
    ratio: Floats
    """Predicted over measured, of the shapes that the fit did not see."""


class Points(NamedTuple):
    """Measured seconds of a table, and what its bytes take at the rate of the link."""

    measured: Floats
    at_best: Floats
    shapes: list[str]


def points(table: pd.DataFrame, ranks: int, bandwidth: float) -> Points:
    """The ways of a table whose precision is known; `bandwidth` in byte/s."""
    normal = "combine_sms" in table
    rows = table[table.combine_sms == DEFAULT_SMS] if normal else table
    hidden, tokens, chosen = (rows[name].to_numpy(dtype=np.float64) for name in SHAPE[:3])
    sent = np.array([Routing(top_k=int(k)).copies(ranks) for k in chosen]) if normal else chosen
    there = hidden * tokens * sent * (ranks - 1) / ranks / bandwidth
    ways = {"combine_transmit_us": BF16} if normal else WAYS
    shapes = ["x".join(map(str, row)) for row in rows[SHAPE].to_numpy()]
    return Points(
        measured=np.concatenate([rows[name].to_numpy(dtype=np.float64) for name in ways]) * MICROSECOND,
        at_best=np.concatenate([there * width for width in ways.values()]),
        shapes=shapes * len(ways),
    )


def fit(known: Points) -> Fit:
    """Latency and share of the link's rate."""
    seen = even(known.shapes)

    def ratio(x: Floats) -> Floats:
        return (np.exp(x[0]) + known.at_best / np.exp(x[1])) / known.measured

    least_squares = import_module("scipy.optimize").least_squares
    found = least_squares(lambda x: np.log(ratio(x)[seen]), START, loss="soft_l1", f_scale=LOSS_SCALE)
    latency, efficiency = np.exp(found.x)
    return Fit(float(latency), float(efficiency), ratio(found.x)[~seen])


def lines(profile: str) -> Iterator[str]:
    """The lines of a profile, of the tables that the package has of it."""
    known = load_profile(profile)
    for name, table in TABLES.items():
        path = root() / SYSTEMS[profile] / table
        if not path.exists():
            continue
        found = fit(points(pd.read_parquet(path), known.node.gpus, known.scale_up.bandwidth.value))
        spread = np.percentile(found.ratio, (90, 10))
        off = np.median(np.abs(found.ratio - 1))
        source = (
            f"fitted on half of the shapes of {SYSTEMS[profile]}/{table} in {package()}, {known.node.gpus} GPUs; "
            f"{off:.0%} off on the others (lab.fits.dispatch)"
        )
        share, start = found.efficiency, found.latency / MICROSECOND
        low, high = share / spread
        yield _line(f"{NAMES[name]}_nvlink_efficiency", *(f"{x:.2f}" for x in (share, low, high)), source)
        low, high = start / spread
        yield _line(f"{NAMES[name]}_latency", *(f"{x:.1f} us" for x in (start, low, high)), source)


def _line(name: str, value: str, low: str, high: str, source: str) -> str:
    return f'  {name}: {{value: {value}, low: {low}, high: {high}, source: "{source}"}}'


def main() -> None:
    """Print the lines."""
    for profile in SYSTEMS:
        for text in lines(profile):
            sys.stdout.write(f"# {profile}\n{text}\n")


if __name__ == "__main__":
    main()
