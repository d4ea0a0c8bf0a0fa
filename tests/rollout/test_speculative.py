"""Speculative decoding: tokens a step, bytes of the drafter, and when it pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import device_of
from rlhfsim.memory.kv_cache import draft_weights, kv_bytes_per_token, rollout_weights
from rlhfsim.rollout.decode import decode_step
from rlhfsim.rollout.generation import Generation, Requests, generate
from rlhfsim.rollout.speculative import speculative_step
from rlhfsim.search.request import Request
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.lengths import Fixed, LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

QWEN, ONE = resolve_model("qwen3-8b"), RolloutLayout(tp=1)
METHODS = {
    "ngram": Speculation(method="ngram", draft_tokens=3, acceptance=0.5),
    "mtp": Speculation(method="mtp", draft_tokens=1, acceptance=0.5),
    "eagle": Speculation(method="eagle", draft_tokens=3, acceptance=0.5),
    "draft": Speculation(method="draft", draft_tokens=4, acceptance=0.5, model="qwen3-0.6b"),
}


def per_token(speculation: Speculation | None, n: float, gpu: str = "h100") -> float:
    """Seconds for a token of each of n sequences."""
    device = device_of(parse_cluster(8, gpu).node_group)
    at, context = np.array([n]), np.array([2000.0])
    if speculation is None:
        return float(decode_step(device, QWEN, ONE, at, context).seconds[0])
    step = speculative_step(device, QWEN, ONE, speculation, at, context)
    return float(step.seconds[0]) / speculation.tokens_per_step


def test_tokens_of_a_step_by_hand() -> None:
    assert METHODS["eagle"].tokens_per_step == 1 + 0.5 + 0.25 + 0.125
    assert replace(METHODS["draft"], acceptance=1).tokens_per_step == 5
    assert replace(METHODS["ngram"], acceptance=0).tokens_per_step == 1


def test_bytes_of_drafters_by_hand() -> None:
    # Qwen3-8B: h 4096, ffn 12288, 32 query and 8 KV heads of 128, vocabulary 151936
    layer = 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288
    norms = QWEN.params_layer_norms
    eagle = 2 * (layer + norms + 3 * 4096**2 + 32_000 * 4096)
    assert draft_weights(QWEN, replace(ONE, speculation=METHODS["eagle"])) == eagle
    mtp = 2 * (layer + norms + 2 * 4096**2)
    assert draft_weights(QWEN, replace(ONE, speculation=METHODS["mtp"])) == mtp
    small = rollout_weights(resolve_model("qwen3-0.6b"), ONE)
    assert draft_weights(QWEN, replace(ONE, speculation=METHODS["draft"])) == small
    assert draft_weights(QWEN, replace(ONE, speculation=METHODS["ngram"])) == 0
    # DeepSeek-V3's MTP module has 11.5 billion weights of its own (its README, 14 B with embedding and head)
    deepseek, wide = resolve_model("deepseek-v3"), RolloutLayout(tp=8, speculation=METHODS["mtp"])
    assert 8 * draft_weights(deepseek, wide) == pytest.approx(2 * 11.5e9, rel=0.03)


def test_kv_bytes_hold_the_drafters_layers() -> None:
    own = kv_bytes_per_token(QWEN, ONE)
    assert kv_bytes_per_token(QWEN, replace(ONE, speculation=METHODS["eagle"])) == own * 37 / 36
    both = kv_bytes_per_token(QWEN, replace(ONE, speculation=METHODS["draft"]))
    assert both == own + resolve_model("qwen3-0.6b").kv_bytes_per_token()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [1, 16, 128, 1024])
@pytest.mark.parametrize("gpu", ["h100", "b200"])
def test_no_acceptance_never_gains_and_more_never_loses(method: str, n: float, gpu: str) -> None:
    times = [per_token(replace(METHODS[method], acceptance=a), n, gpu) for a in (0, 0.3, 0.6, 0.9, 1)]
    assert times[0] >= per_token(None, n, gpu) * (1 - 1e-9)
    assert times == sorted(times, reverse=True)


def test_gains_shrink_as_arithmetic_decides() -> None:
    compute = replace(METHODS["eagle"], acceptance=0.3)
    gains = [per_token(None, n) / per_token(compute, n) for n in (8, 64, 512, 4096)]
    assert gains[0] > 1.1
    assert gains[-1] < gains[0]
    assert per_token(None, 512) / per_token(replace(compute, acceptance=0.1), 512) < 1


def rolled(speculation: Speculation | None) -> Generation:
    device = device_of(parse_cluster(8, "gb200").node_group)
    asked = Requests(
        prompts=32,
        samples=32,
        prompt_lengths=Fixed(value=150),
        response_lengths=LogNormal(mean=6000, sigma=0.8, max=16384),
    )
    layout = RolloutLayout(tp=1, dp=32, speculation=speculation)
    return generate(device, QWEN, layout, asked, worker=True)


def test_a_rollout_gains_about_what_was_published() -> None:
    """1.8 times the throughput at 2.47 tokens a step (arXiv 2604.26779; batch and lengths assumed)."""
    eagle = replace(METHODS["eagle"], acceptance=0.683)
    assert eagle.tokens_per_step == pytest.approx(2.47, abs=0.01)
    plain, drafted = rolled(None), rolled(eagle)
    assert 1.8 * 0.8 < plain.seconds / drafted.seconds < 1.8 * 1.25
    assert drafted.decode_steps == pytest.approx(plain.decode_steps / eagle.tokens_per_step, rel=0.02)


def test_it_competes_where_the_framework_runs_it() -> None:
    work = Workload(
        algorithm="grpo",
        model="qwen3-8b",
        samples=8,
        reward=Reward(model=None, rules=Rules()),
        speculation=METHODS["eagle"],
    )
    request = Request(
        cluster=parse_cluster(8, "h100"), workload=work, backend="megatron", framework="nemo-rl"
    )
    found = {x.speculation for x in rollout_layouts(request, QWEN, 8, request.cluster.node_group)}
    assert found == {None, METHODS["eagle"]}
    for name, runs in {"rlhfsim": False, "verl": True, "nemo-rl": True, "trl": False}.items():
        assert (framework(name).lacks_workload(work) is None) == runs


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Speculation(method="draft", draft_tokens=3, acceptance=0.5), "draft needs model"),
        (
            lambda: Speculation(method="eagle", draft_tokens=3, acceptance=0.5, model="8b"),
            "eagle has no model",
        ),
        (lambda: RolloutLayout(pp=2, speculation=METHODS["eagle"]), "rollout pp 2"),
    ],
)
def test_what_cannot_be_is_refused(make: object, said: str) -> None:
    with pytest.raises(RlhfsimError, match=said):
        make()  # type: ignore[operator]


def test_a_dense_head_drafts_for_experts_whose_tokens_are_sent() -> None:
    """The head has no experts: nothing of it is sent, however the policy's layers send their tokens."""
    model, device = resolve_model("qwen3-235b-a22b"), device_of(parse_cluster(8, "h100").node_group)
    sent, batch, context = (
        RolloutLayout(tp=8, ep=8, dispatcher="deepep-ll"),
        np.array([8.0]),
        np.array([1024.0]),
    )
    plain = decode_step(device, model, sent, batch, context).seconds[0]
    drafted = speculative_step(device, model, sent, METHODS["eagle"], batch, context).seconds[0]
    assert plain < drafted < 4 * plain
