"""NeMo-RL: `timing/train/*` and its console lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median

from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.logs.framework import Framework, metrics_of
from rlhfsim.interchange.logs.records import DECIMAL, block_reader
from rlhfsim.interchange.nemo_rl.configuration import CONFIGURATION
from rlhfsim.units import TERA

P = "timing/train/"
TFLOPS, UTILIZATION = "train/tflops_per_rank", "train/fp_utilization_percent"
_STEP = re.compile(r"= Step (\d{1,9})/")
_TIME = re.compile(rf"^(?=\W)\s*+[^\w\s]?\s*+([\w/][\w/ ]*): ({DECIMAL})s(?: \({DECIMAL}%\))?\s*$")
_MFU = (
    (re.compile(rf"Training FLOPS: {DECIMAL} TFLOPS \(({DECIMAL}) TFLOPS per rank\)"), TFLOPS),
    (re.compile(rf"Training Model Floating Point Utilization: ({DECIMAL})%"), UTILIZATION),
)
"""FLOP/s of each GPU that trains (`log_training_step`); their quotient is the peak that it counts with."""
_LENGTH = re.compile(rf"Mean Generation Length: ({DECIMAL})\s*$")


def values_of(line: str) -> dict[str, float]:
    """Metrics of a line below `==== Step 3/100 ====`."""
    if match := _TIME.match(line):
        name = "total_step_time" if match[1] == "Total step time" else match[1].strip()
        return {P + name: float(match[2])}
    if length := _LENGTH.search(line):
        return {"train/mean_gen_tokens_per_sample": float(length[1])}
    return {name: float(m[1]) for pattern, name in _MFU if (m := pattern.search(line))}


def peak(run: RunDescription, steps: Sequence[Mapping[str, float]]) -> float | None:
    """FLOP/s of a GPU that were taken for 100 % MFU; None: not logged."""
    both = [(v[TFLOPS], v[UTILIZATION]) for v in steps if v.get(TFLOPS, 0) > 0 and v.get(UTILIZATION, 0) > 0]
    return median(tflops * TERA / (percent / 100) for tflops, percent in both) if both else None


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    **metrics_of("nemo-rl"),
    peak=peak,
    console=lambda: block_reader(_STEP, values_of),
)
