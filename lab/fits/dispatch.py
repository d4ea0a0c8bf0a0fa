"""Fit of DeepEP's normal kernels inside one NVLink domain: `deepep_nvlink_efficiency` and `deepep_latency`.

    python -m lab.fits.dispatch          prints the lines for hardware_profiles/<name>.yaml

    t = a + S copies(n) (n-1)/n / (B eta)        S bytes of the tokens of a GPU, as `kernels.collectives.dispatch`

Tables of 8 GPUs (4 of GB200 and GB300), the way back in BF16, with the SMs that Megatron-Core gives it by default.
Soft-L1 on log time over half of the shapes; the interval is that of the other half.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.fits.kernel_tables import SYSTEMS, Floats, even, package, root
from rlhfsim.kernels.collectives import copies
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.mixers import BF16
from rlhfsim.units import MICROSECOND

TABLE = "comm/sglang/0.5.12/wideep_deepep_normal_perf.parquet"
DEFAULT_SMS = 20
SHAPE = ["hidden_size", "num_token", "num_topk", "num_experts"]
START = np.log([30 * MICROSECOND, 0.5])
LOSS_SCALE = 0.1


class Fit(NamedTuple):
    """What a table says of one GPU."""

    latency: float
    efficiency: float
    ratio: Floats
    """Predicted over measured, of the shapes that the fit did not see."""


def fit(table: pd.DataFrame, ranks: int, bandwidth: float) -> Fit:
    """Latency and share of `bandwidth` (byte/s) of the way back among `ranks` GPUs."""
    rows = table[table.combine_sms == DEFAULT_SMS]
    hidden, tokens, chosen = (rows[name].to_numpy(dtype=np.float64) for name in SHAPE[:3])
    leaving = [copies(ranks, int(k)) * (ranks - 1) / ranks for k in chosen]
    at_best = BF16 * hidden * tokens * np.array(leaving) / bandwidth
    measured = rows.combine_transmit_us.to_numpy(dtype=np.float64) * MICROSECOND
    seen = even(["x".join(map(str, row)) for row in rows[SHAPE].to_numpy()])

    def ratio(x: Floats) -> Floats:
        return (np.exp(x[0]) + at_best / np.exp(x[1])) / measured

    least_squares = import_module("scipy.optimize").least_squares
    found = least_squares(lambda x: np.log(ratio(x)[seen]), START, loss="soft_l1", f_scale=LOSS_SCALE)
    latency, efficiency = np.exp(found.x)
    return Fit(float(latency), float(efficiency), ratio(found.x)[~seen])


def line(profile: str) -> str | None:
    """The line of a profile; None where the package has no table of it."""
    path, known = root() / SYSTEMS[profile] / TABLE, load_profile(profile)
    if not path.exists():
        return None
    found = fit(pd.read_parquet(path), known.node.gpus, known.scale_up.bandwidth.value)
    low, high = (found.efficiency / q for q in np.percentile(found.ratio, (90, 10)))
    off = np.median(np.abs(found.ratio - 1))
    source = (
        f"fitted on half of the shapes of {SYSTEMS[profile]}/{TABLE} in {package()}, {known.node.gpus} GPUs, "
        f"{DEFAULT_SMS} SMs; {off:.0%} off on the others, latency {found.latency / MICROSECOND:.0f} us (lab.fits.dispatch)"
    )
    return (
        f"  deepep_nvlink_efficiency: {{value: {found.efficiency:.2f}, low: {low:.2f}, high: {high:.2f}, "
        f'source: "{source}"}}'
    )


def main() -> None:
    """Print the lines."""
    for profile in SYSTEMS:
        if text := line(profile):
            sys.stdout.write(f"# {profile}\n{text}\n")


if __name__ == "__main__":
    main()
