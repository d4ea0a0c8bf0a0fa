"""Steps of the real vLLM engine on models so small that its own time is nearly all of them.

One process an engine: `part` is its number of layers. Two depths tell time per step from time per layer,
batch sizes give the time per sequence; `calibration.micro_benchmarks.profile` separates them. Steps go
through `VllmEngine`, as in a run: log-probs, sampling with a seed per request, and completions are inside.
"""

from __future__ import annotations

import time

import numpy as np

from executor.engines.protocols import RolloutSpec
from executor.engines.vllm.engine import VllmEngine
from executor.microbench.setup import ProbeSetup
from executor.samples import GenerationRequest
from executor.settings import Precision
from executor.tasks import tiny
from rlhfsim.specs.hardware.measured import HEADS, HIDDEN, KV_HEADS, Measured, summarise
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.units import MIB

MAX_LEN, MAX_BATCH = 512, 32
POINTS = ((1, 16), (8, 16), (32, 16), (1, 192), (8, 192), (32, 192))
QUICK = ((1, 16), (16, 16), (32, 128))
"""(sequences, prompt tokens)."""
WARM = 3
"""First decode steps of a point, not counted."""


def measure(setup: ProbeSetup) -> list[Measured]:
    """`decode_step` by (layers, sequences, mean context), `prefill_step` by (layers, prompts, length)."""
    layers = int(setup.part)
    engine = engine_at(setup, layers)
    points: list[Measured] = []
    try:
        _point(engine, 2, 16, 8)  # what compiles or allocates at the first use
        for sequences, prompt in QUICK if setup.quick else POINTS:
            points += _measured(engine, layers, sequences, prompt, setup.repeats(40, 14))
    finally:
        engine.close()
    return points


def engine_at(setup: ProbeSetup, layers: int) -> VllmEngine:
    """An engine on a new tiny model."""
    folder = tiny.build(setup.scratch / "model", hidden=HIDDEN, layers=layers, heads=HEADS, kv_heads=KV_HEADS)
    precision: Precision = "bf16" if setup.device == "cuda" else "fp32"
    layout = RolloutLayout()
    return VllmEngine(
        RolloutSpec(
            model=str(folder),
            layout=layout,
            max_model_len=MAX_LEN,
            max_num_seqs=MAX_BATCH,
            kv_bytes=256 * int(MIB),
            precision=precision,
        )
    )


def _measured(engine: VllmEngine, layers: int, sequences: int, prompt: int, steps: int) -> list[Measured]:
    first, decode = _point(engine, sequences, prompt, steps)
    again, _ = _point(engine, sequences, prompt, 2)
    third, _ = _point(engine, sequences, prompt, 2)
    how = f"vLLM, {layers} layers of width {HIDDEN}, log-probs and completions included"
    context = prompt + 1 + WARM + len(decode) / 2
    return [
        summarise("decode_step", decode, "s", how, at=(layers, sequences, context)),
        summarise("prefill_step", [first, again, third], "s", how, at=(layers, sequences, prompt)),
    ]


def _point(engine: VllmEngine, sequences: int, prompt: int, steps: int) -> tuple[float, list[float]]:
    """Seconds of the prefill pass, and of each decode step between the first ones and the last."""
    draw = np.random.default_rng(sequences * 1000 + prompt)
    engine.add(
        [
            GenerationRequest(
                id=i,
                prompt=draw.integers(4, 60, prompt),
                max_tokens=WARM + steps + 2,
                temperature=1.0,
                top_p=1.0,
                seed=i,
            )
            for i in range(sequences)
        ]
    )
    taken = []
    while engine.unfinished:
        started = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - started)
    whole = taken[1 + WARM : 1 + WARM + steps]
    return taken[0], whole
