"""Activations, logits, calls and risks by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from rlhfsim.kernels.cost import Z90
from rlhfsim.memory import activations, components, kv_cache, logits, residency, risk, role_bytes, states
from rlhfsim.memory.activations import Activations
from rlhfsim.memory.findings import host_findings
from rlhfsim.memory.layer_tensors import RoutedExperts, layer_tensors
from rlhfsim.memory.ledger import EngineStart, Ledger, LedgerPhase, host_bytes, no_start
from rlhfsim.memory.role_bytes import Extra, RoleKind
from rlhfsim.memory.states import States
from rlhfsim.specs.hardware.hardware import Cluster, NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.mixers import DENSE
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.drafts import own_params
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, RolloutPlacement
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.units import GIB, MIB

H100 = load_profile("h100_sxm")
LLAMA, TIED, MOE = preset("llama-3.1-8b"), preset("llama-3.2-1b"), preset("qwen3-30b-a3b")


# --- activations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "vp", "count", "stage", "held"),
    [
        (1, 1, 8, "only", 1),
        (4, 1, 8, "first", 4),
        (4, 1, 2, "first", 2),
        (4, 1, 8, "last", 1),
        (4, 2, 8, "first", 4 * (1 + 3 / 8)),
        (4, 2, 8, "last", 1 + 3 / 8),
        (4, 2, 2, "first", 2),
        (4, 2, 5, "first", 5),
    ],
)
def test_micro_batches_whose_activations_a_stage_holds(pp, vp, count, stage, held) -> None:
    assert activations.in_flight(pp, vp, count, stage) == held


def test_activations_peak_at_the_loss_or_in_the_backward_pass() -> None:
    deep = Activations(saved=10, working=7, logits=5)
    assert (deep.peak, deep.beside(4)) == (17, 4)
    wide = Activations(saved=10, working=2, logits=5)
    assert (wide.peak, wide.beside(4), wide.beside(1)) == (15, 1, 0)


@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "fsdp2"])
def test_activations_of_a_training_call_add_up_layers(backend) -> None:
    """1000 tokens, cut over two ranks of context parallelism, through 32 layers."""
    layer = layer_tensors(LLAMA, 1, fused=backend == "megatron")
    got = activations.training_activations(
        LLAMA, Layout(dp=2, cp=2, recompute="none"), backend, activations.MicroBatches(tokens=1000, count=4)
    )
    assert got.saved == 500 * 32 * layer.total
    # DeepSpeed takes each gradient when it is whole; FSDP2 a layer's together, and the head's after all
    sums = list(accumulate(p.fixed for p in layer.backward)) if backend == "fsdp2" else None
    owned = {"deepspeed": [p.fixed for p in layer.backward], "fsdp2": sums}.get(backend) or [0.0] * 9
    head = 2 * 128256 * 4096 if backend == "fsdp2" else 0
    tokens = [p.token for p in layer.backward]
    assert got.working == max(500 * t + f for t, f in zip(tokens, owned, strict=False)) + head
    assert (got.layer, got.input) == (500 * layer.total, 500 * 2 * 4096)
    full = activations.training_activations(
        LLAMA, Layout(dp=2, cp=2, recompute="full"), backend, activations.MicroBatches(tokens=1000, count=4)
    )
    assert full.saved == 500 * 32 * 2 * 4096
    again = 500 * layer.total
    assert full.working == max(500 * t + f + again for t, f in zip(tokens, owned, strict=False)) + head
    assert full.layer == 500 * 2 * 4096
    frozen = activations.training_activations(
        LLAMA,
        Layout(dp=2, cp=2, recompute="none"),
        backend,
        activations.MicroBatches(tokens=1000, count=4),
        frozen=True,
    )
    assert frozen.working == max(500 * p.token for p in layer.backward)
    first = activations.training_activations(
        LLAMA,
        Layout(pp=2, dp=2, recompute="none"),
        backend,
        activations.MicroBatches(tokens=1000, count=4),
        stage="first",
    )
    assert (first.saved, first.logits) == (1000 * 16 * layer.total * 2, 0)


def test_a_tied_head_s_gradient_waits_for_the_embedding_s() -> None:
    def working(model, **options) -> float:
        return activations.training_activations(
            model,
            Layout(dp=1, recompute="none"),
            "deepspeed",
            activations.MicroBatches(tokens=1000, count=1),
            **options,
        ).working

    matrix = 2 * 128256 * 2048
    layer = layer_tensors(TIED, 1, fused=False)
    own = max(1000 * p.token + p.fixed for p in layer.backward)
    assert working(TIED) == own + matrix
    assert working(TIED.with_value_head()) == own
    assert working(TIED, frozen=True) == max(1000 * p.token for p in layer.backward)


def test_selective_recomputation_by_operation_keeps_products_and_attention() -> None:
    """A layer's input, attention of 32 heads and 8 values, gate and output: half of the products."""
    got = activations.training_activations(
        LLAMA,
        Layout(dp=1, zero=3, recompute="selective"),
        "fsdp2",
        activations.MicroBatches(tokens=10, count=1),
    )
    kept = 2 * 4096 + 2 * (32 * 256 + 8 * 128 + 14336 + 4096) + 4 * 32
    assert got.saved == 10 * 32 * kept
    layer = layer_tensors(LLAMA, 1, fused=False)
    again = layer.total + 2 * 4096 - kept
    fixed = accumulate(p.fixed for p in layer.backward)
    moments = (10 * (p.token + again) + f for p, f in zip(layer.backward, fixed, strict=True))
    assert got.working == pytest.approx(max(moments) + 2 * 128256 * 4096)
    bare = preset("qwen3-30b-a3b")
    assert activations._kept_by_operation(bare, 1) == 2 * (32 * 256 + 4 * 128) + 4 * 32


def test_a_scoring_call_has_one_layer_alive() -> None:
    got = activations.forward_activations(LLAMA, Layout(dp=2, cp=2), "megatron", tokens=1000)
    assert (got.saved, got.working) == (0, 500 * layer_tensors(LLAMA, 1).forward)
    scores = activations.forward_activations(
        LLAMA, Layout(tp=2, dp=2), "megatron", tokens=1000, score_length=700.0
    )
    assert scores.working == 1000 * (layer_tensors(LLAMA, 2, sequence_parallel=True).forward + 4 * 16 * 700)
    eager = activations.forward_activations(MOE, Layout(dp=2), "fsdp2", tokens=100, imbalance=2.0)
    layer = layer_tensors(
        MOE, 1, RoutedExperts(imbalance=2.0), fused=False, kind=MOE.kinds[0]._replace(layers=1)
    )
    assert eager.working == 100 * layer.forward


# --- logits -----------------------------------------------------------------------------------------------


def test_chunks_of_the_executor_s_head_by_hand() -> None:
    """256 MiB of FP32 logits: 523 rows of 128256; at least 16 rows, at most the tokens."""
    rows = 256 * MIB / (4 * 128256)
    assert logits._chunk(LLAMA, 10.0) == 4 * 128256 * 10
    assert logits._chunk(LLAMA, 1e6) == pytest.approx(4 * 128256 * rows)
    huge = replace(LLAMA, vocab=16_000_000)
    assert logits._chunk(huge, 1e6) == 4 * 16_000_000 * 16
    assert logits._chunk(LLAMA.with_value_head(), 1000.0) == 4000
    layout = Layout(dp=1)
    assert logits.head_peak(LLAMA, layout, "fsdp2", 10.0, None) == 10 * 4096 * 4 + 2 * 4 * 128256 * 10
    small, gradient = 4 * 128256 * 10.0, 2 * 128256 * 4096.0
    assert logits.head_gradient(LLAMA, Layout(tp=2)) == gradient / 2
    trained = logits.head_peak(LLAMA, layout, "deepspeed", 10.0, None, norm=6.0, gradients=True)
    assert trained == 10 * 4096 * 10 + max(5 * small, small + gradient)
    chunk = 4 * 128256 * rows
    many = logits.head_peak(LLAMA, layout, "deepspeed", 1e6, None, norm=6.0, gradients=True)
    assert many == pytest.approx(1e6 * 4096 * 10 + max(5 * chunk + gradient, chunk + 2 * gradient))
    frozen = logits.head_peak(LLAMA, layout, "deepspeed", 1e6, None, norm=6.0)
    assert frozen == pytest.approx(1e6 * 4096 * 10 + 5 * chunk)
    value = logits.head_peak(
        LLAMA.with_value_head(), layout, "deepspeed", 10.0, None, norm=6.0, gradients=True
    )
    assert value == 10 * 4096 * 10 + 5 * 40


def test_logits_of_a_head_that_holds_all_or_some_of_them() -> None:
    whole = Head(train_bytes=10, score_bytes=6, source="a test")
    assert logits.logits_bytes(LLAMA, Layout(tp=2), 100.0, whole, training=True) == 100 * 128256 / 2 * 10
    assert logits.logits_bytes(LLAMA, Layout(tp=2), 100.0, whole, training=False) == 100 * 128256 / 2 * 6
    assert (
        logits.logits_bytes(LLAMA, Layout(tp=2), 100.0, replace(whole, whole=True), training=True)
        == 100 * 128256 * 10
    )
    assert (
        logits.logits_bytes(LLAMA, Layout(), 100.0, replace(whole, tokens=40), training=True)
        == 40 * 128256 * 10
    )
    assert (
        logits.logits_bytes(LLAMA, Layout(), 10.0, replace(whole, tokens=40), training=True)
        == 10 * 128256 * 10
    )
    assert (
        logits.logits_bytes(LLAMA, Layout(), 100.0, replace(whole, vocab=1000), training=True)
        == 100 * 1000 * 10
    )
    value = logits.logits_bytes(LLAMA.with_value_head(), Layout(), 100.0, whole, training=True)
    assert value == 1000


# --- a role's calls ---------------------------------------------------------------------------------------


def _kind(**options) -> RoleKind:
    known = {"model": LLAMA, "backend": "megatron", "trained": True, "optimizer": "adam", "lora": None}
    return RoleKind(**(known | {"software": Software(), "fp8": False} | options))


def test_a_call_with_its_waste_by_hand() -> None:
    deep = role_bytes._extra(10.0, 20.0, Activations(saved=100, working=7, logits=5), 0.1)
    assert deep == Extra(10, 20, 107, 0, pytest.approx(13.7))
    wide = role_bytes._extra(10.0, 20.0, Activations(saved=100, working=5, logits=7), 0.1)
    assert wide == Extra(10, 20, 100, 7, pytest.approx(13.7))


@pytest.mark.parametrize(
    ("backward", "buffers"),
    [
        (
            Activations(saved=100, working=30, logits=10, layer=50, input=5),
            1 + 0,
        ),  # the next layer's are as many
        (Activations(saved=100, working=30, logits=10, layer=15, input=5), 1 + 40 - 15),  # beside the next
        (
            Activations(saved=100, working=10, logits=5, layer=15, input=5),
            1 + 40 + 20 + 5 - 10 - 15,
        ),  # its own
        (Activations(saved=100, working=30, logits=60, layer=15, input=5), 1 + 40 - 15 - (60 - 8 - 30)),
    ],
)
def test_fsdp2_s_gradients_of_a_layer_are_there_when_what_it_saved_is_gone(backward, buffers) -> None:
    """40 bytes of a layer in FP32, 20 of BF16, 8 of its weights, and 1 in the pool that reduces."""
    standing = role_bytes._Standing(
        States(),
        gathered=12,
        buffers=41,
        at_loss=1,
        again=0,
        experts=0,
        layer=20,
        running=8,
        step=0,
        layers=4,
    )
    held = role_bytes._training(standing, backward, 0.0)
    logits = max(0, backward.logits - 8)
    assert held.buffers == buffers
    assert held.gathered + held.activations + held.logits == 12 + 100 + max(backward.working, logits)


def test_without_recomputation_a_zero_3_actor_keeps_the_experts_it_gathered() -> None:
    def gathered(call: str, **options) -> float:
        layout = Layout(dp=8, zero=3, **options)
        placed = RolePlacement(pool="all", layout=layout)
        work = Workload(model="qwen3-30b-a3b", algorithm="grpo", prompts=8)
        models = models_of(work)
        held = role_bytes.role_memory(models, "actor", work, backend="deepspeed", profile=H100).of(placed)
        return getattr(held, call).gathered

    part = states.shard(MOE, Layout(dp=8, zero=3), "deepspeed")
    kept = 2 * (part.expert - part.layer)
    assert gathered("train", recompute="none") - gathered("train", recompute="full") == pytest.approx(kept)
    assert gathered("score", recompute="none") == gathered("score", recompute="full")


def test_what_a_role_keeps_between_its_calls() -> None:
    held = States(weights=2, gradients=4, optimizer=12, host=1, between=3)

    def kept(**options) -> States:
        placed = RolePlacement(pool="all", layout=Layout(dp=1), **options)
        return role_bytes.kept_states(held, placed, _kind(backend="megatron"))

    assert kept() == States(2, 3, 12, 0)
    assert kept(residency="offloaded") == kept(residency="recreated") == States(host=14)
    assert kept(offload_between=True) == States(weights=2, host=12)
    assert kept(residency="swapped") == States(host=1)
    frozen = RolePlacement(pool="all", layout=Layout(dp=1), residency="recreated")
    assert role_bytes.kept_states(held, frozen, _kind(trained=False)) == States()
    frees = Software(frees_gradients=True)
    resident = RolePlacement(pool="all", layout=Layout(dp=1))
    assert role_bytes.kept_states(held, resident, _kind(software=frees)).gradients == 0


def test_share_of_activations_that_modules_leave() -> None:
    one, layer = (1, 1, "none", 32), layer_tensors(LLAMA, 1, sequence_parallel=False)
    share = role_bytes._share_kept(_kind(software=Software(recomputed=("mlp",))), *one)
    dropped = layer.saved["mlp_activation_input"] + layer.saved["mlp_activation"]
    assert share == pytest.approx(1 - dropped / layer.total)
    norms = role_bytes._share_kept(_kind(software=Software(recomputed=("layernorm",))), *one)
    assert norms == pytest.approx(1 - 4 * 4096 / layer.total)
    assert role_bytes._share_kept(_kind(software=Software(recomputed=("mlp",))), 1, 1, "full", 32) == 1
    assert role_bytes._share_kept(_kind(software=Software(inputs_kept=8)), *one) == 0.25
    assert role_bytes._share_kept(_kind(software=Software(inputs_kept=64)), *one) == 1
    assert role_bytes._share_kept(_kind(), *one) == 1


def test_sets_of_adapters_stand_beside_one_base() -> None:
    layout = Layout(dp=2, zero=1)
    lora = Lora(rank=8)
    one = role_bytes._stood(_kind(lora=lora), [states.cut(layout)], [0], "only")
    two = role_bytes._stood(
        _kind(lora=lora, software=Software(adapters=3)), [states.cut(layout)], [0], "only"
    )
    own = 2 * states.lora_params(LLAMA, 8)
    assert two.states.weights - one.states.weights == 2 * own
    assert two.states.gradients == 3 * one.states.gradients
    quantised = role_bytes._stood(_kind(lora=Lora(rank=8, base="nf4")), [states.cut(layout)], [0], "only")
    assert quantised.gathered == 2 * states.shard(LLAMA, layout, "megatron").layer
    assert one.gathered == 0
    wide = role_bytes._stood(
        _kind(lora=lora, software=Software(base_bytes=4.0)), [states.cut(layout)], [0], "only"
    )
    assert wide.states.weights - one.states.weights == 2 * states.shard(LLAMA, layout, "megatron").elements


# --- the engine's drafts ----------------------------------------------------------------------------------


def test_drafters_by_hand() -> None:
    layout = RolloutLayout(tp=2)
    assert kv_cache.draft_weights(LLAMA, layout) == 0
    grams = Speculation(method="ngram", draft_tokens=3, acceptance=0.5)
    assert kv_cache.draft_weights(LLAMA, replace(layout, speculation=grams)) == 0
    whole = Speculation(method="draft", draft_tokens=3, acceptance=0.5, model="llama-3.2-1b")
    drafted = replace(layout, speculation=whole)
    assert kv_cache.draft_weights(LLAMA, drafted) == kv_cache.rollout_weights(TIED, layout)
    own = LLAMA.kv_bytes_per_token_per_gpu(2, 2.0) + TIED.kv_bytes_per_token_per_gpu(2, 2.0)
    assert kv_cache.kv_bytes_per_token(LLAMA, drafted) == own
    eagle = Speculation(method="eagle", draft_tokens=3, acceptance=0.5)
    head = kv_cache.draft_weights(LLAMA, replace(layout, speculation=eagle))
    layer = (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) / 2 + 2 * 4096
    assert head == pytest.approx(2 * layer + 2 * own_params(LLAMA, eagle) / 2, rel=1e-3)


# --- transfers, entries, risks ----------------------------------------------------------------------------


def test_buffers_of_a_weight_sync_by_hand() -> None:
    def found(path, backend="megatron", lora=None, model=LLAMA):
        return residency.sync_bytes(model, path, backend, lora, H100)

    bucket = H100["sync_bucket_bytes"]
    assert found("none") == components.NO_SYNC == components.SyncBytes(buffers=0, group=0)
    assert found("broadcast").buffers == max(bucket, 2 * 128256 * 4096)
    assert found("broadcast", "fsdp2").buffers == max(bucket, 4 * 128256 * 4096)
    assert found("broadcast", "fsdp2").buffers == 4 * 128256 * 4096 > bucket
    assert found("broadcast").group == H100["nccl_bytes"]
    assert found("ipc").group == 0
    assert found("broadcast").host == 0
    assert found("delta").host == found("delta-disk").host == 2 * LLAMA.num_params, "a copy of what was sent"
    assert found("lora", lora=Lora(rank=8)).buffers == 2 * states.lora_params(LLAMA, 8)
    wide = replace(MOE, vocab=1000, moe=replace(MOE.moe, expert_ffn=200_000))
    assert found("broadcast", model=wide).buffers == 2 * 3 * 2048 * 200_000


def test_an_entry_has_the_interval_of_its_coefficient() -> None:
    def spread(role: str, component: str) -> tuple[float, float]:
        e = components.entry(H100, role, component, 10.0)
        return e.low / 10, e.high / 10

    c = H100.coefficient("state_spread")
    assert spread("actor", "weights") == pytest.approx((c.low / c.value, c.high / c.value))
    assert spread("rollout", "weights") == spread("rollout", "kv_cache") == (1, 1)
    c = H100.coefficient("fragmentation")
    assert spread("actor", "fragmentation") == pytest.approx(
        ((c.low - 1) / (c.value - 1), (c.high - 1) / (c.value - 1))
    )
    c = H100.coefficient("cuda_graph_bytes")
    assert spread("rollout", "cuda_graphs") == pytest.approx((c.low / c.value, c.high / c.value))
    core = load_profile("cpu_core")
    assert components.entry(core, "rollout", "cuda_graphs", 10.0).high == 10


def test_moments_of_a_log_normal_item_by_hand() -> None:
    s = math.log(4) / (2 * Z90)
    mean, variance = risk.moments(risk.Item(2.0, 1.0, 4.0))
    assert mean == pytest.approx(2 * math.exp(s * s / 2))
    assert variance == pytest.approx(mean**2 * (math.exp(s * s) - 1))
    assert risk.moments(risk.Item(0.0, 0.0, 0.0)) == (0, 0)
    low = risk.moments(risk.Item(2.0, 0.0, 4.0))
    assert low == pytest.approx(risk.moments(risk.Item(2.0, 0.004, 4.0)))
    tiny = risk.moments(risk.Item(8.0, 0.0, 4.0))
    assert tiny == pytest.approx(risk.moments(risk.Item(8.0, 0.008, 4.0)))


@pytest.mark.parametrize("doubt", [1.0, 2.0])
def test_the_sum_of_uncertain_bytes_exceeds_a_limit_by_hand(doubt: float) -> None:
    items = [risk.Item(2.0, 1.0, 4.0), risk.Item(3.0, 2.0, 5.0)]
    pairs = [risk.moments(i) for i in items]
    mean, variance = sum(m for m, _ in pairs), sum(v for _, v in pairs)
    s2 = math.log1p(doubt**2 * variance / mean**2)
    z = (math.log(7) - math.log(mean) + s2 / 2) / math.sqrt(s2)
    expected = 0.5 * math.erfc(z / math.sqrt(2))
    assert risk.probability_above(items, 7.0, doubt) == pytest.approx(expected)
    arrays = np.array([mean]), np.array([variance])
    assert risk.risky(*arrays, 7.0, expected * 0.99, doubt).tolist() == [True]
    assert risk.risky(*arrays, 7.0, expected * 1.01, doubt).tolist() == [False]
    rows = np.array([[[6.9, mean, variance]]])
    assert risk.fitting(rows, 7.0, expected * 1.01, doubt).tolist() == [True]
    assert risk.fitting(rows, 7.0, expected * 0.99, doubt).tolist() == [False]
    assert risk.fitting(rows, 6.8, 1.0, doubt).tolist() == [False]
    two = np.array([[[1.0, 1.0, 0.0], [9.0, 9.0, 0.0]]])
    assert risk.fitting(two, 7.0, 0.5, doubt).tolist() == [False]


def test_certain_sums_exceed_or_do_not() -> None:
    assert risk.probability_above([risk.Item(5.0, 5.0, 5.0)], 4.0) == 1
    assert risk.probability_above([risk.Item(5.0, 5.0, 5.0)], 6.0) == 0
    assert risk.probability_above([], 6.0) == 0
    assert risk.probability_above([risk.Item(5.0, 4.0, 6.0)], 0.0) == 1
    sure = np.array([5.0, 3.0]), np.zeros(2)
    assert risk.risky(*sure, 4.0, 0.5).tolist() == [True, False]
    assert risk.risky(*sure, 4.0, 0.0).tolist() == [True, False]
    assert risk.risky(np.array([5.0]), np.array([1.0]), 4.0, 1.0).tolist() == [False]
    assert risk.risky(np.array([5.0]), np.array([1.0]), 40.0, 0.0).tolist() == [False]


# --- the ledger -------------------------------------------------------------------------------------------


def _phase(name: str, size: float, capacity: float, *, spread: float = 1.0) -> LedgerPhase:
    e = components.MemoryEntry(
        role="actor", component="weights", bytes=size, low=size / spread, high=size * spread
    )
    return LedgerPhase(name=name, pool="all", entries=(e,), capacity=capacity)


def _ledger(*phases: LedgerPhase, engine: EngineStart | None = None, others=(), host=0.0) -> Ledger:
    return Ledger(
        phases=phases,
        host_bytes={"all": host},
        host_capacity={"all": 100.0},
        engine=engine,
        other_stages=others,
    )


def test_a_ledger_names_its_peak_and_its_riskiest_phase() -> None:
    small, large = _phase("a.train", 9, 10, spread=1.3), _phase("b.train", 16, 20)
    held = _ledger(small, large)
    assert (held.peak, held.riskiest(), held.kv_tokens) == (small, small, None)
    assert held.peak_entry.bytes == 9
    assert held.probability_out_of_memory == small.probability_out_of_memory > 0
    assert held.fits
    sure = _ledger(_phase("a.train", 5, 10), large)
    assert (sure.peak, sure.riskiest(), sure.probability_out_of_memory) == (large, large, 0)
    doubted = _ledger(_phase("a.train", 8, 20, spread=1.7), large)
    assert (doubted.riskiest().name, doubted.riskiest(0.34).name) == ("a.train", "b.train")
    assert "b.train needs" in str(_ledger(small, _phase("b.train", 21, 20)).rejected_by)
    assert "host memory" in str(_ledger(large, host=101.0).rejected_by)
    assert _ledger(large, host=100.0).fits
    other = _ledger(large, others=(_phase("b.train", 9, 10, spread=1.3),))
    assert other.probability_out_of_memory == small.probability_out_of_memory


def test_an_engine_without_room_for_the_longest_sequence_does_not_fit() -> None:
    engine = EngineStart(pool="all", kv_tokens=100, needed_tokens=101, probability_of_no_start=0.2)
    held = _ledger(_phase("a.train", 5, 10), engine=engine)
    assert (held.kv_tokens, held.probability_out_of_memory) == (100, 0.2)
    assert "KV cache for 100 tokens" in str(held.rejected_by)
    assert _ledger(_phase("a.train", 5, 10), engine=replace(engine, needed_tokens=100)).fits
    risky = replace(engine, needed_tokens=50, probability_of_no_start=0.6)
    assert "risk of 60%" in str(_ledger(_phase("a.train", 5, 10), engine=risky).rejected_by)
    assert _ledger(_phase("a.train", 5, 10), engine=replace(risky, probability_of_no_start=0.49)).fits


def test_a_run_ends_in_the_first_call_that_is_likely_to() -> None:
    move, call = _phase("a.train.load", 12, 10), _phase("b.train", 11, 10)
    held = _ledger(move, call, _phase("c.train", 13, 10))
    assert held.breaks_in(0.5) is call
    assert _ledger(_phase("a.train", 5, 10, spread=1.1)).breaks_in(0.5).name == "a.train"


def test_host_bytes_of_the_fullest_node_by_hand() -> None:
    """Twelve GPUs and four on two nodes of eight: the second node has both pools."""
    pools = (ResourcePool(name="a", gpus=12), ResourcePool(name="b", start=12, gpus=4))
    role = RolePlacement(pool="a", layout=Layout(dp=12, zero=3))
    placed = Placement(pools=pools, actor=role, weight_path="none")
    cluster = Cluster(node_groups=(NodeGroup(profile=H100, gpus=16, gpus_per_node=8),))
    held = host_bytes(placed, cluster, {"a": 1 * GIB, "b": 3 * GIB})
    assert held == {"a": 16 * GIB, "b": 16 * GIB}
    light = host_bytes(placed, cluster, {"a": 1 * GIB, "b": 0.5 * GIB})
    assert light == {"a": 8 * GIB, "b": 6 * GIB}
    wide = replace(
        placed,
        actor=RolePlacement(pool="a", layout=Layout(dp=4, zero=3)),
        pools=(ResourcePool(name="a", gpus=4), ResourcePool(name="b", start=4, gpus=12)),
    )
    assert host_bytes(wide, cluster, {"a": 0.0, "b": GIB}) == {"a": 4 * GIB, "b": 8 * GIB}
    assert DENSE.layers == 1


# --- the other side of a branch ---------------------------------------------------------------------------


def test_pinned_blocks_that_are_rounded_up_may_not_fit() -> None:
    role = RolePlacement(pool="all", layout=Layout(dp=1))
    placed = Placement(pools=(ResourcePool(name="all", gpus=1),), actor=role, weight_path="none")
    found = [
        len(list(host_findings(_ledger(_phase("a.train", 5, 10), host=held), placed)))
        for held in (50.0, 51.0, 100.0, 101.0)
    ]
    assert found == [0, 1, 1, 0]


def test_experts_of_the_fullest_rank_count_where_they_are_spread() -> None:
    work = Workload(model="qwen3-30b-a3b", algorithm="grpo", prompts=8)
    held = role_bytes.role_memory(models_of(work), "actor", work, backend="megatron", profile=H100)
    assert (held.imbalance, held.waste) == (H100["ep_hot_rank_factor"], H100["fragmentation"] - 1)
    even = role_bytes.role_memory(
        models_of(work), "actor", work, backend="megatron", profile=H100, software=Software(balanced=True)
    )
    dense = replace(work, model="llama-3.1-8b")
    plain = role_bytes.role_memory(models_of(dense), "actor", dense, backend="megatron", profile=H100)
    assert (even.imbalance, plain.imbalance) == (1, 1)

    def activations_of(memory, **layout) -> float:
        placed = RolePlacement(pool="all", layout=Layout(dp=4, recompute="none", **layout))
        return memory.of(placed).train.activations

    assert activations_of(held) == activations_of(even)
    assert activations_of(held, ep=4) > activations_of(even, ep=4)
    quick = role_bytes.role_memory(
        models_of(work), "reference", work, backend="megatron", profile=H100, beside_actor=True
    )
    assert (quick.framework, quick.kind.trained, held.framework) == (0, False, H100["framework_bytes"])
    alone = role_bytes.role_memory(
        models_of(work), "reference", work, backend="deepspeed", profile=H100, beside_actor=True
    )
    assert alone.framework == H100["framework_bytes"]


def test_ranks_of_experts_buffers_and_steps_on_the_other_side() -> None:
    layout = Layout(tp=2, dp=8, ep=2, etp=2)
    part = states.shard(MOE, layout, "megatron")
    assert (part.expert_ranks, part.expert) == (4, 48 * 3 * 2048 * 384 * 64)
    small = states.Shard(
        dense=800, expert=600, dense_ranks=8, expert_ranks=2, layer=100, root=40, matrix=30, num_layers=7
    )
    assert states.gradient_buffer_bytes(small, Layout(dp=2, cp=2, zero=2), "fsdp2") == 400
    whole = states.trained_states(small, Layout(dp=8, zero=0, offload_optimizer="cpu"), "deepspeed")
    assert whole.host == 12 * 1400
    assert states.root_params(LLAMA, 2, "first") == -(-128256 // 256) * 256 / 2 * 4096
    assert kv_cache.rollout_weights(TIED, RolloutLayout()) == pytest.approx(2 * TIED.num_params, rel=1e-3)
    bare = replace(MOE, moe=replace(MOE.moe, expert_ffn=1, top_k=1))
    width = 2 * (32 + 4) * 128 - 36 * 128 + 2 * 32 * 128
    assert kv_cache.forward_bytes(bare, 1) == 2 * (2 * 2048 + width)


def test_an_engine_starts_as_likely_as_its_parts_leave_room() -> None:
    role = RolloutPlacement(pool="all", layout=RolloutLayout(memory_utilization=0.45))
    held = kv_cache.engine_bytes(LLAMA, role, profile=H100)
    work = Workload(model="llama-3.1-8b", algorithm="grpo", prompts=8)
    models, batch = models_of(work), batch_lengths(work)
    weights = kv_cache.rollout_weights(LLAMA, role.layout)
    one = batch.max_tokens * kv_cache.kv_bytes_per_token(LLAMA, role.layout)

    def item(size: float, name: str) -> risk.Item:
        c = H100.coefficient(name)
        return risk.Item(size, size * c.low / c.value, size * c.high / c.value)

    items = [
        risk.Item(weights, weights * 0.99, weights * 1.02),
        item(held.profile_peak, "sampler_bytes_per_logit"),
        item(held.non_torch, "vllm_non_torch_bytes"),
        item(held.cuda_graphs, "cuda_graph_bytes"),
        risk.Item(one, one, one),
    ]
    for share in (0.25, 0.28, 0.31):
        asked = replace(role, layout=replace(role.layout, memory_utilization=share))
        expected = risk.probability_above(items, share * H100.usable_memory.value)
        assert 0 < expected < 1
        assert no_start(models, asked, H100, held, batch) == pytest.approx(expected)
