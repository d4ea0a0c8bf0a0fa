"""Forward passes that training and scoring engines share: micro-batches in, one result a sample out.

Legend: N response tokens of a micro-batch, R of one sample.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from executor.engines import device
from executor.engines.packing import MicroBatch, Select, filler, micro_batches
from executor.engines.protocols import EngineSpec
from executor.engines.transformers import attention
from executor.engines.transformers.heads import HeadedModel
from executor.samples import Floats, Sample
from rlhfsim.specs.workload.roles import Head

logger = logging.getLogger(__name__)


class ForwardPasses:
    """A module with its head, evaluated without gradients."""

    def __init__(
        self, spec: EngineSpec, model: HeadedModel, module: Callable[..., tuple[Tensor, Tensor]]
    ) -> None:
        """`module` is what is called: the model itself or DeepSpeed's engine around it."""
        self.spec, self.model, self.module = spec, model, module
        self.device = device.own()
        self._parts = dict[str, float]()
        """Seconds of the parts of steps, where this process sees them end."""

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-prob of every response token under the temperature, (R,) a sample."""
        return self._tokenwise(samples, "causal")

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Value before every response token, (R,) a sample."""
        return self._tokenwise(samples, "value")

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """Scalar at the last token of every sample."""
        self._expect("score")
        scores = dict[int, float]()
        for batch, flat in self._outputs(samples, "last"):
            scores.update(zip(batch.places, flat.tolist(), strict=True))
        return [scores[i] for i in range(len(samples))]

    def _tokenwise(self, samples: Sequence[Sample], head: Head) -> list[Floats]:
        self._expect(head)
        rows = dict[int, Floats]()
        for batch, flat in self._outputs(samples, "tokens"):
            rows.update(zip(batch.places, batch.split(flat), strict=True))
        return [rows[i] for i in range(len(samples))]

    def _outputs(self, samples: Sequence[Sample], select: Select) -> list[tuple[MicroBatch, Tensor]]:
        """Outputs (N,) of every micro-batch of this rank."""
        batches = self.micro_batches(samples, select=select, tokens=self.spec.score_tokens)
        fillers = self._rounds(len(batches)) - len(batches)  # a collective: before the forward passes
        with evaluated(self.model), torch.no_grad():
            outputs = [(batch, self.call(batch)[0]) for batch in batches]
            for _ in range(fillers):
                self.call(filler(self.device))
        return outputs

    def micro_batches(
        self,
        samples: Sequence[Sample],
        *,
        select: Select = "tokens",
        paired: bool = False,
        tokens: int | None = None,
    ) -> list[MicroBatch]:
        """Micro-batches of this rank's samples of at most `tokens`, by default those priced for training."""
        longest = max((sample.length for sample in samples), default=1)
        tokens = tokens or self.spec.micro_tokens or self.spec.layout.micro_batch * longest
        packed = self.spec.packing and attention.packs(self.model.config)
        return micro_batches(samples, tokens, packed=packed, select=select, paired=paired, device=self.device)

    def call(self, batch: MicroBatch, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """(outputs, entropies) of one micro-batch."""
        return self.module(batch.tokens, batch.positions, batch.index, batch.targets, entropy)

    def _rounds(self, mine: int) -> int:
        """Micro-batches that every rank runs."""
        return mine

    def _expect(self, head: Head) -> None:
        assert self.spec.head == head, f"{self.spec.role} has the head {self.spec.head}, not {head}"


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout, no recompute), and back to what it was."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def trim() -> None:
    """Give freed memory back: CUDA's cache to the device, the C heap to the system."""
    gc.collect()
    device.empty_cache()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc: freed pages stay with the process
        logger.debug("no malloc_trim in this C library")
