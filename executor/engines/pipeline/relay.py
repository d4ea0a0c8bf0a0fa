"""Forward passes through the stages without gradients: hidden states go from rank to rank, results to all.

DeepSpeed's eval_batch needs as many micro-batches on every replica and a loss, and keeps all logits; a relay
needs neither: each stage takes a micro-batch when the one before hands it over and goes on to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from executor.engines.mesh import coordinates, rank_at
from executor.engines.packing import MicroBatch
from executor.engines.scoring import evaluated
from rlhfsim.specs.placement.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """Where this rank stands in its pipeline."""

    module: Any
    """PipelineModule with this rank's stage."""
    layout: Layout
    rank: int
    group: Any
    """Process group of the ranks of this pipeline."""
    hidden: int
    """Width of the hidden states."""
    dtype: torch.dtype
    device: torch.device

    def run(
        self, batches: Sequence[MicroBatch], read: Callable[[Tensor, MicroBatch], Tensor]
    ) -> list[tuple[MicroBatch, Tensor]]:
        """Every micro-batch with its results, (N,) fp32 of its N places, on every rank of the pipeline.

        `read` runs on the last stage, with the hidden states (B, L, H). A collective over the pipeline.
        """
        outputs = []
        with evaluated(self.module), torch.no_grad():
            for micro in batches:
                hidden = self._stage(micro)
                if hidden is not None:
                    outputs.append(read(hidden, micro))
        sizes = [len(micro.index) for micro in batches]
        return list(zip(batches, self._share(outputs, sum(sizes)).split(sizes), strict=True))

    def _stage(self, micro: MicroBatch) -> Tensor | None:
        """Hidden states on the last stage, else None."""
        place = coordinates(self.rank, self.layout)
        if place.pp == 0:
            received = micro.tokens.to(self.device)
        else:
            shape = (*micro.tokens.shape, self.hidden)
            received = torch.empty(shape, dtype=self.dtype, device=self.device)
            dist.recv(received, src=self._stage_rank(place.pp - 1))
        output = self.module.forward((received, micro.positions.to(self.device)))
        if place.pp == self.layout.pp - 1:
            return output  # type: ignore[no-any-return]
        dist.send(output[0].contiguous(), dst=self._stage_rank(place.pp + 1))
        return None

    def _share(self, outputs: Sequence[Tensor], numbers: int) -> Tensor:
        """(numbers,) fp32 from the last stage to every rank of the pipeline."""
        whole = torch.cat(list(outputs)).float() if outputs else torch.empty(numbers, device=self.device)
        if numbers:
            dist.broadcast(whole, src=self._stage_rank(self.layout.pp - 1), group=self.group)
        return whole

    def _stage_rank(self, stage: int) -> int:
        """The rank of this pipeline (same replica, same shard) at `stage`."""
        place = coordinates(self.rank, self.layout)
        return rank_at(self.layout, pp=stage, dp=place.dp, tp=place.tp)
