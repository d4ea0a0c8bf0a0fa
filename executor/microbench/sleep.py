"""vLLM's sleep and wake without copies (level 2). Not run so far: it needs a GPU."""

from __future__ import annotations

from executor.microbench.decode import engine_at
from executor.microbench.setup import ProbeSetup, timed, unavailable
from rlhfsim.specs.hardware.measured import Measured, summarise

LAYERS = 2


def measure(setup: ProbeSetup) -> list[Measured]:
    """Seconds of sleep at level 2 and of the wake after it."""
    if setup.device == "cpu":
        raise unavailable("vLLM's CPU build frees nothing when it sleeps; sleep and wake need a GPU")
    engine = engine_at(setup, LAYERS)
    asleep, awake = [], []
    try:
        for _ in range(setup.repeats(5, 3)):
            asleep.append(timed(lambda: engine.sleep(2), "cuda"))
            awake.append(timed(engine.wake, "cuda"))
    finally:
        engine.close()
    how = "vLLM, level 2, tiny model: no copies"
    return [summarise("sleep", asleep, "s", how), summarise("wake", awake, "s", how)]
