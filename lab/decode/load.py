"""What a measured serving point asks of the model: device, layout, load; and which points to leave out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Literal

from lab.decode.points import PROFILES, Serving, skip_reason
from lab.decode.serving import Terms, serving_terms, time_per_output_token
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of, with_engine
from rlhfsim.memory import kv_cache
from rlhfsim.rollout.decode import Engine
from rlhfsim.rollout.generation import kv_capacity
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.units import MILLISECOND

RANGE_MEAN = 0.9
"""InferenceMAX draws lengths uniformly from 0.8 to 1.0 of the stated ones (`random_range_ratio`)."""
TWIN_RATIO = 1.25
"""Rows that agree in everything the table says but differ by more contradict each other."""
IMPOSSIBLE_UTILISATION = 0.8
"""Share of the datasheet FLOP/s over a request's whole life that no serving engine reaches."""


def conflicts(points: Iterable[Serving]) -> dict[str, str]:
    """Rows whose twin (same engine, version, architecture, layout and load) differs by over 25 %.

    One of the two has a setting that the table does not name, such as speculative decoding: R1 and
    V3 are one architecture, and TensorRT-LLM 1.1.0rc2.post2 on 8 H200 at concurrency 4 gives 8.6
    and 13.8 ms.
    """
    groups: dict[tuple[object, ...], list[Serving]] = defaultdict(list)
    for p in points:
        if skip_reason(p) is None:
            name = "deepseek-v3" if "DeepSeek" in p.model else p.model
            groups[
                name, p.engine, p.version, p.system, p.weights(), p.tp, p.attention_dp, p.isl, p.osl, p.batch
            ].append(p)
    found = {}
    for group in groups.values():
        times = [p.tpot for p in group]
        if max(times) > TWIN_RATIO * min(times):
            why = f"contradicted by a row with the same columns: {min(times) / MILLISECOND:.1f} and {max(times) / MILLISECOND:.1f} ms"
            found.update({p.id: why for p in group})
    return found


def impossible(points: Iterable[Serving]) -> dict[str, str]:
    """All rows of a sweep in which one row needs more FLOP/s than the GPU can give.

        n 2 N_a (isl + osl) / (t F) > 0.8 (TTFT + (osl - 1) TPOT)

    Prompts were then not computed (prefix cache) or not sent.
    """
    sweeps: dict[tuple[str, str, str, str], list[Serving]] = defaultdict(list)
    for p in points:
        if skip_reason(p) is None:
            sweeps[p.model, p.system, p.engine, p.version].append(p)
    why = "prompts cannot have been computed: a row of this sweep needs over 80 % of peak FLOP/s"
    return {
        p.id: why
        for sweep in sweeps.values()
        if max(utilisation(p) for p in sweep) > IMPOSSIBLE_UTILISATION
        for p in sweep
    }


def misfits(points: Iterable[Serving]) -> dict[str, str]:
    """Rows whose weights alone exceed the memory of the stated GPUs: offloaded, or the layout is wrong."""
    why = "the weights exceed the memory of the stated GPUs"
    return {
        p.id: why
        for p in points
        if skip_reason(p) is None
        and kv_cache.rollout_weights(model_at(p.model), layout_of(p))
        > device_at(p.system, p.engine).profile.usable_memory.value
    }


def left_out(points: Sequence[Serving]) -> dict[str, str]:
    """Every row that its own table or the datasheet contradicts, with the reason."""
    return conflicts(points) | impossible(points) | misfits(points)


def utilisation(point: Serving) -> float:
    """Share of the datasheet FLOP/s that the matrix products alone need over a request's life."""
    device, weights = device_at(point.system, point.engine), point.weights()
    peak = device.profile.peak
    rate = peak[{"fp8": "fp8", "nvfp4": "fp4"}.get(weights or "", "bf16")].value
    life = point.ttft + (point.osl - 1) * point.tpot
    flop = 2.0 * model_at(point.model).num_matmul_params_active * (point.isl + point.osl)
    return point.batch * flop / (life * point.tp * rate)


def predicted(point: Serving) -> float:
    """Predicted TPOT of a point, seconds."""
    isl, osl, running = load(point)
    device, model = device_at(point.system, point.engine), model_at(point.model)
    return time_per_output_token(device, model, layout_of(point), running, isl, osl, engine=point.engine)


def terms(point: Serving) -> Terms:
    """GPU seconds of a point, before the engine's coefficients: what the fit reads."""
    isl, osl, running = load(point)
    device, model = device_at(point.system, point.engine), model_at(point.model)
    return serving_terms(device, model, layout_of(point), running, isl, osl, engine=point.engine)


def load(point: Serving) -> tuple[float, float, float]:
    """Mean input and output tokens, and the requests that run: those in flight, or what the KV cache
    holds."""
    scale = RANGE_MEAN if point.family == "inferencemax" else 1.0
    isl, osl, layout = point.isl * scale, point.osl * scale, layout_of(point)
    held = (
        kv_capacity(device_at(point.system, point.engine), model_at(point.model), layout)
        / layout.attention_dp
    )
    if held < isl + osl:  # the run took place, so it gave the engine more memory than we assume
        return isl, osl, point.batch
    return isl, osl, max(1.0, min(point.batch, held / (isl + osl / 2)))


def kv_precision_of(point: Serving) -> Literal["bf16", "fp8"]:
    """FP8 cache with FP8 and NVFP4 weights, as the published launch scripts set it; SGLang keeps BF16."""
    if point.weights() not in ("fp8", "nvfp4") or point.engine == "sglang":
        return "bf16"
    return "fp8" if point.engine == "trtllm" or point.family == "inferencemax" else "bf16"


def layout_of(point: Serving) -> RolloutLayout:
    """The layout of the replica."""
    return point.layout(kv_precision=kv_precision_of(point))


@cache
def device_at(system: str, engine: Engine) -> Device:
    """A GPU of a system of the file, with the engine's kernels."""
    profile = load_profile(PROFILES[system])
    gpus = max(profile.node.gpus, profile.scale_up.domain)
    return with_engine(
        device_of(NodeGroup(profile=profile, gpus=gpus, gpus_per_node=profile.node.gpus)), engine
    )


@cache
def model_at(name: str) -> ModelSpec:
    """The model of a checkpoint."""
    return resolve_model(name)
