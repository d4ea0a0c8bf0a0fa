"""Numbers that an engine works with and the planner prices: the one table that planner and executor read.

What a layout or the settings of a run fix (micro-batch, running sequences) is stored there; here are the
engines' own sizes and the defaults of what may be set.
"""

from __future__ import annotations

from rlhfsim.frozen import frozen
from rlhfsim.units import BILLION, GIB, MIB, MILLION


@frozen
class DeepSpeedNumbers:
    """ZeRO's sizes in elements: DeepSpeed's defaults (docs/config-json.md, DeepSpeed 0.19), handed over as
    they are."""

    reduce_bucket: int = int(500 * MILLION)
    """Gradients that are reduced together; a model that trains fewer is handed its own number, because
    DeepSpeed allocates all of a bucket."""
    allgather_bucket: int = int(500 * MILLION)
    """Weights that ZeRO 1 and 2 gather together after a step."""
    live: int = int(BILLION)
    """ZeRO-3: weights that may be gathered at one time."""
    reuse: int = int(BILLION)
    """ZeRO-3: weights that are used again before so many others stay gathered, above all those of the last
    layers between forward and backward pass; `live` bounds only what is gathered ahead."""
    prefetch: int = int(50 * MILLION)
    """ZeRO-3: weights that are gathered ahead; none on CPUs, where nothing overlaps."""
    sub_group: int = int(BILLION)
    """ZeRO-3: elements that one optimizer step takes at a time."""
    persistent: int = 10_000
    """ZeRO-3 keeps parameters up to this size gathered (norms): gathering them would be all latency. Not
    priced; DeepSpeed's default is ten times it."""


@frozen
class VllmNumbers:
    """vLLM's defaults where a rollout layout does not say otherwise."""

    max_num_seqs: int = 1024
    memory_utilization: float = 0.9
    max_batched_tokens: int = 8192
    block_tokens: int = 16
    """Tokens of a KV block; not handed over: some attention kernels ask for another number (64, 128)."""
    graph_limit: int = 512
    """Largest captured batch (vLLM 0.11-0.32, `max_cudagraph_capture_size`); not handed over."""


LOGIT_CHUNK_BYTES = int(256 * MIB)
"""FP32 logits that the executor's head computes at one time (executor/engines/transformers/heads.py)."""
LOGIT_CHUNK_ROWS = 16
"""Places that a chunk has at least."""

CHECKPOINT_COPIES = 0.5
"""Share of the free host memory that copies of states may take at most while a checkpoint is written
during the steps (executor/engines/background.py)."""

DEEPSPEED = DeepSpeedNumbers()
VLLM = VllmNumbers()
SYNC_BUCKET_BYTES = int(GIB)
"""Bytes of one bucket of a weight transfer between GPUs, two a side; coefficient `sync_bucket_bytes` of the
profiles."""
CPU_SYNC_BUCKET_BYTES = int(64 * MIB)
"""Between processes on CPUs, which share the memory of one host."""
