"""From nothing to an engine that can generate: interpreter, imports, model folder, engine."""

from __future__ import annotations

import time

from executor.microbench.decode import engine_at
from executor.microbench.setup import ProbeSetup
from rlhfsim.specs.hardware.measured import Measured, summarise

LAYERS = 2


def measure(setup: ProbeSetup) -> list[Measured]:
    """Seconds since the parent started this process; the weights of the tiny model take next to none."""
    engine = engine_at(setup, LAYERS)
    ready = time.monotonic() - setup.spawned
    engine.close()
    return [
        summarise("process_start", [ready], "s", "interpreter, imports and a vLLM engine with a tiny model")
    ]
