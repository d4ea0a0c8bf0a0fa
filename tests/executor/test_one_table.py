"""Numbers that the planner prices and an engine is handed: one table, read by both."""

from __future__ import annotations

import ast
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from executor.engines.deepspeed.config import ds_config
from executor.engines.protocols import RolloutSpec
from executor.engines.vllm.start import arguments
from executor.resolve import Job
from executor.settings import Optimizer, Settings
from rlhfsim.memory import states
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import preset, preset_name
from rlhfsim.specs.placement.engine_numbers import CPU_SYNC_BUCKET_BYTES, DEEPSPEED, SYNC_BUCKET_BYTES, VLLM
from rlhfsim.specs.placement.layout import Layout, RolloutLayout

ROOT = Path(__file__).resolve().parent.parent.parent
NUMBERS = {*asdict(DEEPSPEED).values(), *asdict(VLLM).values(), SYNC_BUCKET_BYTES, CPU_SYNC_BUCKET_BYTES}
READERS = {
    "rlhfsim/memory/states.py": {"DEEPSPEED"},
    "rlhfsim/memory/kv_cache.py": {"VLLM"},
    "rlhfsim/rollout/decode.py": {"VLLM"},
    "rlhfsim/rollout/schedule.py": {"VLLM"},
    "rlhfsim/rollout/steady_state.py": {"VLLM"},
    "rlhfsim/simulation/asynchronous/engine.py": {"VLLM"},
    "rlhfsim/specs/placement/layout.py": {"VLLM"},
    "executor/engines/deepspeed/config.py": {"DEEPSPEED"},
    "executor/engines/transformers/heads.py": {"LOGIT_CHUNK_BYTES", "LOGIT_CHUNK_ROWS"},
    "rlhfsim/memory/logits.py": {"LOGIT_CHUNK_BYTES", "LOGIT_CHUNK_ROWS"},
    "executor/resolve.py": {"SYNC_BUCKET_BYTES", "CPU_SYNC_BUCKET_BYTES"},
}
"""Module -> what it takes from the table."""
TOLD_APART = {16, 1024, 8192, 512, 0.9}
"""Numbers of the table that mean other things elsewhere: a literal of theirs proves nothing."""


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_deepspeed_gets_the_bucket_sizes_that_are_priced(zero: int, cuda: bool) -> None:
    layout = Layout(dp=4, zero=zero, micro_batch=3)
    config = ds_config(layout, Optimizer(), "bf16", cuda=cuda)
    section = config["zero_optimization"]
    assert section["reduce_bucket_size"] == DEEPSPEED.reduce_bucket
    assert section["allgather_bucket_size"] == DEEPSPEED.allgather_bucket
    assert config["train_micro_batch_size_per_gpu"] == layout.micro_batch
    if zero == 3:
        assert section["stage3_prefetch_bucket_size"] == (DEEPSPEED.prefetch if cuda else 0)
        assert section["stage3_max_live_parameters"] == DEEPSPEED.live
        assert section["stage3_max_reuse_distance"] == DEEPSPEED.reuse
        assert section["sub_group_size"] == DEEPSPEED.sub_group
        assert section["stage3_param_persistence_threshold"] == DEEPSPEED.persistent


def test_what_is_priced_is_deepspeeds_own_default() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig()
    defaults = {
        "reduce_bucket": config.reduce_bucket_size,
        "allgather_bucket": config.allgather_bucket_size,
        "live": config.max_live_parameters,
        "reuse": config.max_reuse_distance,
        "prefetch": config.prefetch_bucket_size,
        "sub_group": config.sub_group_size,
    }
    assert asdict(DEEPSPEED) == defaults | {"persistent": DEEPSPEED.persistent}


@pytest.mark.parametrize(("zero", "buckets"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_gradient_buffers_are_priced_as_whole_buckets(zero: int, buckets: int) -> None:
    layout = Layout(dp=4, zero=zero)
    part = states.shard(preset(preset_name("70b") or ""), layout, "deepspeed")
    assert states.gradient_buffer_bytes(part, layout, "deepspeed") == 2 * buckets * DEEPSPEED.reduce_bucket


def test_a_model_that_trains_fewer_elements_than_a_bucket_is_handed_and_priced_its_own() -> None:
    layout = Layout(dp=4, zero=1)
    part = replace(states.shard(preset(preset_name("70b") or ""), layout, "deepspeed"), dense=1e6, expert=0)
    section = ds_config(layout, Optimizer(), "bf16", cuda=True, trained=10**6)["zero_optimization"]
    assert section["reduce_bucket_size"] == 10**6
    assert states.gradient_buffer_bytes(part, layout, "deepspeed") == 2 * 10**6


def test_live_and_prefetched_weights_are_priced() -> None:
    layout = Layout(dp=4, zero=3)
    part = states.shard(preset(preset_name("70b") or ""), layout, "deepspeed")
    gathered = states.gathered_bytes(part, layout, "deepspeed")
    assert gathered == 2 * (DEEPSPEED.live + DEEPSPEED.prefetch + part.matrix)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_gets_the_batches_and_the_memory_of_the_layout(device: str) -> None:
    layout = RolloutLayout()
    spec = RolloutSpec(
        model="nowhere", layout=layout, max_model_len=512, max_num_seqs=layout.max_num_seqs, kv_bytes=2**30
    )
    handed = arguments(spec, device)  # type: ignore[arg-type]
    assert handed["max_num_seqs"] == VLLM.max_num_seqs
    assert handed["max_num_batched_tokens"] == VLLM.max_batched_tokens
    if device == "cuda":
        assert handed["gpu_memory_utilization"] == VLLM.memory_utilization
    else:  # vLLM's own CPU kernel is wrong for latent attention: test_families
        assert "-rotary_embedding" in handed["compilation_config"]["custom_ops"]
    assert handed["kv_cache_memory_bytes"] == spec.kv_bytes
    assert not {"block_size", "cudagraph_capture_sizes", "max_cudagraph_capture_size"} & handed.keys()


def test_what_is_priced_but_not_handed_over_is_vllms_own_default() -> None:
    config = pytest.importorskip("vllm.config")
    assert VLLM.block_tokens == config.CacheConfig.DEFAULT_BLOCK_SIZE


def test_weights_travel_in_the_buckets_that_are_priced() -> None:
    profile = load_profile("h100")
    assert profile["sync_bucket_bytes"] == SYNC_BUCKET_BYTES
    job = Job(plan=None, settings=Settings(), model="", gpu=True, max_prompt=1)  # type: ignore[arg-type]
    assert job.bucket_bytes == SYNC_BUCKET_BYTES
    assert replace(job, gpu=False).bucket_bytes == CPU_SYNC_BUCKET_BYTES
    assert replace(job, settings=Settings(bucket_bytes=4096)).bucket_bytes == 4096


@pytest.mark.parametrize("path", READERS)
def test_a_reader_imports_the_table_and_writes_none_of_its_numbers(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "rlhfsim.specs.placement.engine_numbers"
        for alias in node.names
    }
    assert imported == READERS[path]
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not literals & (NUMBERS - TOLD_APART), path


def test_no_other_module_writes_a_bucket_size() -> None:
    """As a literal or as a product with a unit, which is how such numbers are written."""
    for top in ("rlhfsim", "executor"):
        for path in (ROOT / top).rglob("*.py"):
            tree = ast.parse(path.read_text())
            if path.name == "engine_numbers.py":
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.Dict | ast.keyword):
                    text = ast.unparse(node)
                    assert not ("BUCKET" in text.upper() and _product_of_a_bucket(text)), f"{path}: {text}"


def _product_of_a_bucket(text: str) -> bool:
    written = ("500 * MILLION", "500000000", "50 * MILLION", "50000000", "64 * 2 ** 20", "64 * MIB")
    return any(number in text for number in written)
