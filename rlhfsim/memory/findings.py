"""What of a ledger its user should know: logits, what a sleeping engine keeps, states in host memory."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.finding import Finding
from rlhfsim.memory.ledger import Ledger
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.units import MIB, format

LARGE = 0.2
"""Share of a GPU above which logits are worth a word."""
ROUNDED = 2.0
"""Most bytes that pinned host memory takes for each byte that is asked for: torch's caching host allocator
rounds every block up to a power of two (aten/src/ATen/core/CachingHostAllocator.h)."""

RETAINED = (2440 * MIB, 7392 * MIB)
"""Bytes that nvidia-smi showed of a sleeping vLLM with tensor parallelism: 2,440 or 7,392 MiB at TP 2 by
commit (774 MiB at TP 1; NVIDIA-NeMo/RL issue 223, vLLM 0.8), 6,962 to 7,121 MiB at TP 8 (vLLM issue 47654,
0.23). Sleep unmaps weights and KV cache alone (vLLM pull request 45623)."""


def sleep_findings(memory: Ledger, placement: Placement) -> Iterator[Finding]:
    """Where a sleeping engine may keep more than the ledger counts of it plus what training leaves it."""
    rollout = placement.rollout
    if rollout is None or not rollout.sleep_level or rollout.layout.tp == 1:
        return
    trained = [p for p in memory.phases if p.name.endswith(".train") and p.pool == rollout.pool]
    for phase in sorted(trained, key=lambda p: p.capacity - p.bytes)[:1]:
        counted = sum(entry.bytes for entry in phase.entries if entry.role == "rollout")
        left = phase.capacity - phase.bytes
        if 0 <= left < RETAINED[1] - counted:
            yield Finding(
                what=f"asleep, an engine with tensor parallelism {rollout.layout.tp} kept "
                f"{format(RETAINED[0], 'byte')} to {format(RETAINED[1], 'byte')} of a GPU in other people's "
                f"runs; {format(counted, 'byte')} are counted, {phase.name} leaves {format(left, 'byte')}",
                remedy="compare with nvidia-smi while it sleeps; without tensor parallelism it keeps least",
            )


def logits_findings(memory: Ledger, placement: Placement, workload: Workload) -> Iterator[Finding]:
    """Where the logits of one micro-batch fill much of a GPU: in the fullest call."""
    held = [
        (entry.bytes, phase, entry.role)
        for phase in memory.phases
        for entry in phase.entries
        if entry.component == "logits" and entry.bytes > LARGE * phase.capacity
    ]
    if not held:
        return
    size, phase, role = max(held, key=lambda item: item[0])
    placed, batch = placement.trainers[role], batch_lengths(workload)
    tokens = batch.tokens(placed.layout, scoring=not phase.name.endswith("train")) / placed.layout.cp
    yield Finding(
        what=f"the logits of a micro-batch take {format(size, 'byte')} of {format(phase.capacity, 'byte')} a "
        f"GPU in {phase.name}: {tokens:,.0f} tokens (samples of up to {batch.max_tokens:,.0f}) x "
        f"{models_of(workload).of(role).vocab:,} entries of the vocabulary",
        remedy="smaller micro-batches, or a head that works through the vocabulary in chunks",
    )


def host_findings(memory: Ledger, placement: Placement) -> Iterator[Finding]:
    """Where host memory holds what leaves the GPUs only if pinned blocks are not rounded up."""
    for pool, held in memory.host_bytes.items():
        capacity = memory.host_capacity[pool]
        if held <= capacity < ROUNDED * held:
            yield Finding(
                what=f"a node under pool {pool} holds {format(held, 'byte')} of its "
                f"{format(capacity, 'byte')} host memory; pinned blocks are rounded up to powers of two, "
                f"so that it may take {format(ROUNDED * held, 'byte')}",
                remedy="leave the reference or the optimizer states on the GPU, or ask for more host memory",
            )
