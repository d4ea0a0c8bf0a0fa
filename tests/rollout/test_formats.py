"""Number formats of the rollout: bytes by hand, seconds in order, and what goes over the wire."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfsim.kernels.devices import device_of
from rlhfsim.memory.kv_cache import kv_bytes_per_token, rollout_weights
from rlhfsim.rollout.decode import decode_step
from rlhfsim.search.request import Request, switched
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.weight_sync.endpoints import mean_bytes, weights_of

QWEN, GPT = resolve_model("qwen3-8b"), resolve_model("gpt-oss-20b")
BF16, FP8, MXFP4 = (RolloutLayout(precision=p) for p in ("bf16", "fp8", "mxfp4"))
MIXED = replace(FP8, bf16_attention=True)
WORK = Workload(algorithm="grpo", model="qwen3-8b", samples=8, reward=Reward(model=None, rules=Rules()))


def seconds(layout: RolloutLayout, n: float, model: str = "qwen3-8b", gpu: str = "h100") -> float:
    device = device_of(parse_cluster(8, gpu).node_group)
    step = decode_step(device, resolve_model(model), layout, np.array([n]), np.array([1000.0]))
    return float(step.seconds[0])


def test_bytes_of_weights_by_hand() -> None:
    # Qwen3-8B, 36 layers: h 4096, ffn 12288, 32 query and 8 KV heads of 128, vocabulary 151936
    attention, mlp = 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096, 3 * 4096 * 12288
    rest = 2 * (36 * QWEN.params_layer_norms + 2 * 151936 * 4096)
    assert rollout_weights(QWEN, BF16) == 36 * 2 * (attention + mlp) + rest
    assert rollout_weights(QWEN, FP8) == 36 * (attention + mlp) + rest
    assert rollout_weights(QWEN, MIXED) == 36 * (2 * attention + mlp) + rest
    assert rollout_weights(QWEN, MXFP4) == 36 * (2 * attention + mlp * 17 / 32) + rest
    ends = 4 * 2 * (attention + mlp) + 32 * (2 * attention + mlp)
    assert rollout_weights(QWEN, replace(MIXED, bf16_layers=4)) == pytest.approx(ends + rest)
    assert rollout_weights(QWEN, replace(FP8, bf16_layers=99)) == rollout_weights(QWEN, BF16)


def test_gpt_oss_in_its_own_format_is_near_what_vllm_logs() -> None:
    """13.47 GiB on an H100 80 GB (lab/scoreboard/data/memory.csv); its kernels pad the experts."""
    assert rollout_weights(GPT, MXFP4) / 2**30 == pytest.approx(13.47, rel=0.06)


def test_an_fp8_kv_cache_takes_half() -> None:
    half = replace(BF16, kv_precision="fp8")
    assert kv_bytes_per_token(QWEN, half) == kv_bytes_per_token(QWEN, BF16) / 2


@pytest.mark.parametrize("gpu", ["h100", "b200"])
@pytest.mark.parametrize("model", ["qwen3-8b", "gpt-oss-20b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("n", [16, 64, 256])
def test_more_in_bf16_is_never_faster(n: float, model: str, gpu: str) -> None:
    ladder = (FP8, MIXED, replace(MIXED, bf16_layers=8), replace(MIXED, bf16_layers=999))
    times = [seconds(x, n, model, gpu) for x in ladder]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(seconds(BF16, n, model, gpu))
    assert seconds(MXFP4, n, model, gpu) <= seconds(BF16, n, model, gpu) * (1 + 1e-9)


def test_narrow_weights_gain_nothing_where_arithmetic_decides() -> None:
    gains = [seconds(BF16, n) / seconds(MXFP4, n) for n in (1, 4096)]
    assert gains[0] > 1.3
    assert gains[1] == pytest.approx(1, abs=1e-6)


def test_the_wire_carries_what_the_rollout_stores() -> None:
    weights = weights_of(QWEN)
    share = weights.ffn / weights.params
    assert mean_bytes(weights, FP8) == 1
    assert mean_bytes(weights, MIXED) == pytest.approx(share + 2 * (1 - share))
    assert mean_bytes(weights, MXFP4) == pytest.approx(share * 17 / 32 + 2 * (1 - share))
    assert mean_bytes(weights, replace(FP8, bf16_layers=18)) == pytest.approx(1.5)


def test_formats_compete_only_where_allowed_and_run() -> None:
    work = switched(WORK, {"fp8", "fp8-kv", "mxfp4"})
    assert (work.rollout_precision, work.kv_precision) == ("mxfp4", "fp8")
    mixed = replace(WORK, rollout_precision="fp8", kv_precision="fp8", rollout_bf16_layers=2)
    for name, runs in {"nemo-rl": True, "verl": False}.items():
        asked = Request(cluster=parse_cluster(8, "h100"), workload=mixed, backend="megatron", framework=name)
        found = rollout_layouts(asked, QWEN, 8, asked.cluster.node_group)
        assert bool(found) == runs
        assert all(x.kv_precision == "fp8" and x.bf16_layers == 2 for x in found)
    for name in ("rlhfsim", "verl", "nemo-rl", "openrlhf", "trl"):
        assert framework(name).lacks_rollout(MXFP4, one_node=True) is not None
