"""verl: `timing_s/*` and its console lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.logs.framework import Framework, metrics_of
from rlhfsim.interchange.logs.records import Record, number
from rlhfsim.interchange.verl.configuration import CONFIGURATION
from rlhfsim.interchange.verl.keys import CRITIC, ENGINE_NAME, ESTIMATOR, TABLE
from rlhfsim.interchange.verl.mfu import TOKENS, peak
from rlhfsim.interchange.verl.reward_model import LEGACY
from rlhfsim.interchange.verl.versions import EACH, KL_IN_REWARD, MODEL, SERVERS, VERSION, before

WEIGHTS = "timing_s/gen, weights"
"""What `gen` holds in addition to `generate_sequences`."""
_LINE = re.compile(r"\bstep:(\d{1,9}) - (.*)$")


def record_of_line(line: str) -> Record | None:
    """The record of `step:3 - timing_s/gen:1.5 - ...` (verl/utils/logger/aggregate_logger.py)."""
    match = _LINE.search(line)
    if match is None:
        return None
    pairs = (item.rpartition(":") for item in match[2].split(" - "))
    values = {name.strip(): number(text) for name, _, text in pairs}
    return Record(step=int(match[1]), values={k: v for k, v in values.items() if v is not None})


def as_today(values: Mapping[str, float]) -> dict[str, float]:
    """Names as since v0.2 (`timing/gen` before), and `gen` as weights and generation where that is logged.

    `generate_sequences` is the mean over the ranks, `generation_timing/max` the slowest: with `reshard` the
    rest of `gen` is generation, without it the rest of the slowest rank's generation is weights.
    """
    named = {_today(name): value for name, value in values.items()}
    gen, mean = named.get("timing_s/gen"), named.get("timing_s/generate_sequences")
    if gen is None or mean is None or "timing_s/update_weights" in named:
        named.pop("timing_s/generate_sequences", None)
        return named
    weights = named.get("timing_s/reshard", gen - named.get("timing_s/generation_timing/max", mean))
    if 0 <= weights < gen:
        named |= {WEIGHTS: weights, "timing_s/generate_sequences": gen - weights}
        del named["timing_s/gen"]
    return named


def gpus_of(values: Mapping[str, float]) -> float | None:
    """GPUs: tokens of a step over those a second and GPU (verl/trainer/ppo/metric_utils.py)."""
    rate = values.get("perf/throughput") or values.get("Tokens/Sec/GPU")
    seconds = values.get("perf/time_per_step") or values.get("time_per_step")
    tokens = values.get(TOKENS)
    return tokens / (rate * seconds) if tokens and rate and seconds else None


def engine_inside(settings: FrameworkSettings) -> bool:
    """Until v0.6 vLLM's worker was the trainer's (vllm_rollout_spmd.py), since then a server's."""
    return settings.find(ENGINE_NAME) in (None, "vllm") and before(settings.find(VERSION), SERVERS)


KEYS = {
    **TABLE.batch,
    "model": MODEL,
    "critic_model": CRITIC,
    "gpus_per_node": EACH,
    "max_response": TABLE.key("limit.response"),
    "reference": KL_IN_REWARD,
    "critic": ESTIMATOR,
    "reward": f"{LEGACY}.enable",
}


def version_of(metrics: Sequence[str]) -> str | None:
    """Version by names of metrics: no time of the step at first, `time_per_step`, then `reshard`."""
    names = set(metrics)
    if "timing_s/step" not in names:
        return "0.1" if "timing_s/gen" in names else None
    if "time_per_step" in names:
        return "0.2"
    return "0.5" if "timing_s/reshard" in names else None


def _today(name: str) -> str:
    if name.startswith("timing/"):
        return f"timing_s/{name.removeprefix('timing/')}"
    return f"perf/{name}" if name in ("mfu/actor", "mfu/critic", "total_num_tokens") else name


FRAMEWORK = Framework(
    configuration=CONFIGURATION,
    **metrics_of("verl"),
    as_today=as_today,
    version_of=version_of,
    gpus_of=gpus_of,
    keys=KEYS,
    engine_inside=engine_inside,
    peak=peak,
    console=lambda: record_of_line,
)
