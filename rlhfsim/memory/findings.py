"""What of a ledger its user should know: logits of a micro-batch, and states that wait in host memory."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.frameworks.configuration.findings import Finding
from rlhfsim.memory.ledger import Ledger
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Placement, RolePlacement
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.units import format

LARGE = 0.2
"""Share of a GPU above which logits are worth a word."""
ROUNDED = 2.0
"""Most bytes that pinned host memory takes for each byte that is asked for: torch's caching host allocator
rounds every block up to a power of two (aten/src/ATen/core/CachingHostAllocator.h)."""


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
    placed, batch = placement.roles[role], batch_lengths(workload)
    assert isinstance(placed, RolePlacement)
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
