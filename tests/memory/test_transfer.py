"""What both ends of a weight sync hold where vLLM's engines carry it, by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rlhfsim.memory.components import ENGINE, NO_SYNC, ROLE, engine_components, role_components
from rlhfsim.memory.framework_sync import _broadcast
from rlhfsim.memory.kv_cache import engine_bytes
from rlhfsim.memory.residency import sync_bytes
from rlhfsim.memory.transfer import Arrival, _arrivals, _front, _packed, buckets_of, modules, transfer_bytes
from rlhfsim.specs.frameworks.runs import OWN
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.placement import RolloutPlacement
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.units import GIB

LLAMA, EXPERTS = resolve_model("llama-3.1-8b"), resolve_model("qwen3-30b-a3b")
H100 = load_profile("h100")
TABLE = 2.0 * 128256 * 4096
EACH = [(4.0,), (1.0, 2.0), (3.0, 3.0), (1.0,), (4.0,)]
"""Tensors of five modules."""


def test_a_bucket_closes_before_the_tensor_that_would_exceed_it_or_after_it() -> None:
    assert buckets_of(EACH, 4.0, over=False) == [[4.0], [1.0, 2.0], [3.0], [3.0, 1.0], [4.0]]
    assert buckets_of(EACH, 4.0, over=True) == [[4.0, 1.0], [2.0, 3.0], [3.0, 1.0, 4.0]]


def test_an_engine_clones_a_bucket_and_keeps_a_tensor_until_its_module_is_whole() -> None:
    found = list(_arrivals(EACH, buckets_of(EACH, 4.0, over=False), slots=1))
    assert found == [(4, 4), (3, 3), (3, 0), (4 + 3, 6), (4, 1), (4, 4)]
    assert _front(found) == (Arrival(7, 6),)


def test_of_a_broadcast_three_buckets_are_there_and_a_module_keeps_those_of_its_tensors() -> None:
    found = list(_arrivals(EACH, buckets_of(EACH, 4.0, over=True), slots=2))
    assert _front(found) == (Arrival(5 + 5 + 8, 0), Arrival(5 + 8, 6))
    long = [(1.0,), (1.0, 1.0, 1.0, 1.0), (1.0,)]
    found = list(_arrivals(long, buckets_of(long, 0.5, over=True), slots=2))
    assert _front(found) == (Arrival(4, 4),), "of the four buckets none goes before the module is made"


def test_a_sharded_trainer_has_gathered_from_the_bucket_s_first_tensor_to_the_end_of_its_group() -> None:
    chunks, groups = [buckets_of(EACH, 4.0, over=over) for over in (True, False)]
    # buckets of 5, 5, 8; groups end at 4, 7, 10, 14, 18: with the second bucket 5 to 10, with the third 10 to 18
    assert _packed(chunks, groups) == (5 + 8, 5 + 8 + 8)
    assert _packed([[5.0], [5.0]], [[7.0], [3.0]]) == (10, 5 + 5 + 5)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "qwen2.5-0.5b"])
def test_the_modules_are_the_model_but_for_norms_and_biases(name: str) -> None:
    model = resolve_model(name)
    assert sum(map(sum, modules(model))) == pytest.approx(2 * model.num_params, rel=2e-4)


def test_the_last_expert_s_matrix_of_a_bucket_is_a_copy() -> None:
    matrix = 2 * 768 * 2048
    assert transfer_bytes(EXPERTS, "ipc", GIB).sent == GIB + matrix
    plain, each = transfer_bytes(EXPERTS, "broadcast", GIB), list(modules(EXPERTS))
    pairs = [sum(chunk) for chunk in buckets_of(each, GIB, over=True)]
    assert plain.sent == max(a + b for a, b in pairwise(pairs)) + 2 * matrix


def test_buckets_of_llama_8b() -> None:
    ipc = transfer_bytes(LLAMA, "ipc", GIB)
    assert ipc.sent == ipc.group == GIB
    assert ipc.arrivals[-1] == (TABLE, TABLE), "the embedding, alone in its bucket"
    assert transfer_bytes(LLAMA, "ipc", 1e6).sent == TABLE, "a tensor is never split"
    assert transfer_bytes(LLAMA, "ipc", 1e12).sent == pytest.approx(2 * LLAMA.num_params, rel=1e-4)
    broadcast = transfer_bytes(LLAMA, "broadcast", GIB)
    assert GIB < broadcast.group < 2 * (GIB + TABLE)
    assert 2 * GIB < broadcast.sent < 2 * (GIB + TABLE)
    assert 3 * GIB < broadcast.arrivals[0].arrived < 3 * (GIB + TABLE)
    assert transfer_bytes(LLAMA, "host", GIB)[::2] == (0, (Arrival(0, TABLE),))


def test_all_experts_of_a_layer_wait_at_the_engine_as_whole_tensors() -> None:
    layer = 2.0 * 128 * 3 * 2048 * 768
    [moment] = transfer_bytes(EXPERTS, "ipc", GIB).arrivals
    assert moment.module == layer
    assert layer < moment.arrived < layer + GIB


def test_a_sharded_trainer_gathers_gates_and_ups_of_all_experts_at_once() -> None:
    deepseek = resolve_model("deepseek-v3")
    both = 2.0 * 256 * 2 * 2048 * 7168
    assert transfer_bytes(deepseek, "ipc", GIB).group == transfer_bytes(deepseek, "disk", GIB).group == both
    assert transfer_bytes(deepseek, "broadcast", GIB).group > both
    assert transfer_bytes(EXPERTS, "ipc", GIB).group == GIB, "2 x 128 x 2048 x 768 are less than a bucket"


def test_other_frameworks_have_a_bucket_on_either_side_and_ours_what_was_read() -> None:
    other = sync_bytes(LLAMA, "ipc", "deepspeed", None, H100, framework="verl", shared=True)
    assert (other.buffers, other.arrivals, other.gathered) == (GIB, (Arrival(GIB, 0),), 0), "clones a bucket"
    slime = sync_bytes(LLAMA, "ipc", "megatron", None, H100, framework="slime", shared=True)
    assert (slime.buffers, slime.arrivals) == (2 * GIB, ()), "a bucket and a flat copy of it"
    apart = sync_bytes(LLAMA, "broadcast", "megatron", None, H100, framework="slime")
    assert (apart.buffers, apart.arrivals) == (GIB, ()), "a bucket on either side"
    held = transfer_bytes(LLAMA, "ipc", GIB)
    ours = sync_bytes(LLAMA, "ipc", "deepspeed", None, H100, framework=OWN, shared=True)
    assert (ours.buffers, ours.arrivals, ours.gathered) == (held.sent, held.arrivals, held.group)
    delta = sync_bytes(LLAMA, "delta", "deepspeed", None, H100, framework=OWN)
    assert (delta.buffers, delta.host) == (0, 2 * LLAMA.num_params), "changes are found on the host"
    lora = sync_bytes(LLAMA, "lora", "deepspeed", Lora(rank=8), H100, framework=OWN, shared=True)
    assert 0 < lora.buffers < GIB / 10
    assert lora.arrivals == (Arrival(0, TABLE),), "merged on the host, made a module on the GPU"


GATE_UP, DOWN = 2.0 * 128 * 2 * 2048 * 768, 2.0 * 128 * 2048 * 768
"""All experts of a layer of qwen3-30b-a3b, as transformers keeps them."""


def _held(framework, path, backend, model=LLAMA, lora=None):
    shared = path != "broadcast"
    return sync_bytes(model, path, backend, lora, H100, framework=framework, shared=shared)


def test_skyrl_gathers_a_tensor_in_fp32_next_to_what_vllm_packs() -> None:
    one = _held("skyrl", "ipc", "fsdp2")
    assert (one.buffers, one.gathered) == (GIB, 3 * TABLE), "FP32 and BF16 of the embedding"
    assert one.arrivals == transfer_bytes(LLAMA, "ipc", GIB).arrivals
    assert _held("skyrl", "ipc", "fsdp2", EXPERTS).gathered == 3 * GATE_UP
    whole = _held("skyrl", "ipc", "megatron")
    assert (whole.buffers, whole.gathered) == (GIB + TABLE, 0), "every rank of Megatron's exports"
    assert _held("skyrl", "ipc", "megatron", EXPERTS).buffers == GIB + 2 * EXPERTS.params_embedding
    apart = _held("skyrl", "broadcast", "fsdp2")
    assert apart.buffers == pytest.approx(transfer_bytes(LLAMA, "broadcast", GIB).sent)
    assert apart.buffers + apart.gathered > 3 * GIB, "the bucket that is sent, and one twice"
    assert apart.arrivals == (Arrival(GIB, 0),)


def test_trl_loads_tensors_where_they_were_gathered() -> None:
    one = _held("trl", "ipc", "deepspeed", EXPERTS)
    assert (one.buffers, one.gathered, one.arrivals) == (0, GATE_UP + DOWN, (Arrival(0, 0),))
    assert _held("trl", "ipc", "fsdp2", EXPERTS).gathered == 2 * (GATE_UP + DOWN), "in FP32"
    rounded, plain = _held("trl", "broadcast", "deepspeed"), _held("trl", "broadcast", "fsdp2")
    assert rounded.buffers == pytest.approx(transfer_bytes(LLAMA, "broadcast", GIB).sent)
    assert plain.buffers > rounded.buffers + TABLE / 2, "FP32 is sent"
    assert (rounded.arrivals, plain.arrivals) == ((Arrival(GIB, 0),), (Arrival(2 * TABLE, 0),))


def test_trl_gathers_the_whole_base_of_adapters_under_zero_3() -> None:
    plain, quantised = Lora(rank=8), Lora(rank=8, base="nf4")
    for path in ("ipc", "broadcast"):
        assert _held("trl", path, "deepspeed", lora=plain).gathered == 2 * LLAMA.num_params
    small = _held("trl", "ipc", "deepspeed", lora=quantised).gathered / LLAMA.num_params
    assert 0.5 < small < 0.6
    assert _held("trl", "ipc", "fsdp2", lora=plain).gathered < 2 * GIB, "adapters are merged in shards"


def test_areal_fills_a_bucket_while_one_is_sent_and_saves_tensor_by_tensor() -> None:
    one = _held("areal", "broadcast", "fsdp2")
    assert (one.buffers, one.gathered, one.arrivals) == (2 * GIB, 3 * TABLE, (Arrival(GIB, 0),))
    whole = _held("areal", "broadcast", "megatron")
    assert (whole.buffers, whole.gathered) == (GIB + TABLE, 0)
    disk = _held("areal", "disk", "fsdp2")
    assert (disk.buffers, disk.gathered, disk.arrivals) == (0, 2 * TABLE, (Arrival(0, 0),))
    assert _held("areal", "disk", "megatron").buffers == TABLE
    alone = _held("areal", "broadcast", "fsdp2", lora=Lora(rank=8))
    assert 0 < alone.buffers < GIB / 10, "adapters"
    assert alone.arrivals == (Arrival(alone.buffers, 0),)


def test_a_broadcast_holds_a_bucket_the_next_one_and_its_tensors_by_hand() -> None:
    assert _broadcast([3.0, 3.0, 1.0], 4.0, 1.0) == (7, 12), "3+3 twice; then 6 beside 1 twice"
    assert _broadcast([1.0, 6.0], 4.0, 3.0) == (7, 19), "1, and 6 while they are 18"
    assert _broadcast([5.0, 5.0], 4.0, 1.0) == (10, 15)


def test_an_engine_cuts_modules_over_its_ranks_and_a_sharded_trainer_gathers_a_bucket() -> None:
    sync = replace(NO_SYNC, buffers=3.0, gathered=2.0, arrivals=(Arrival(9, 0), Arrival(6, 8)))
    engines = [
        engine_bytes(LLAMA, RolloutPlacement(pool="all", layout=RolloutLayout(tp=tp)), profile=H100)
        for tp in (1, 4)
    ]
    rows = np.array(engines, dtype=ENGINE)
    assert engine_components(rows, "ready", sync=sync, syncs=True)["sync_buffers"].tolist() == [14, 9]
    assert engine_components(rows, "ready", sync=sync)["sync_buffers"].tolist() == [0, 0]
    plain = replace(sync, arrivals=())
    for alone, size in ((True, 3.0), (False, 0.0)):
        held = engine_components(rows, "ready", sync=plain, syncs=True, alone=alone)
        assert held["sync_buffers"].tolist() == [size, size]
    trainers = np.zeros(2, dtype=ROLE)
    trainers["score"]["gathered"][1] = 1.0
    assert role_components(trainers, "sync", sync=sync)["sync_buffers"].tolist() == [3, 5]
