"""Scoring engine for a model that fits one process: transformers alone."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from executor.engines import device
from executor.engines.protocols import EngineSpec
from executor.engines.states import Movable, module_tensors
from executor.engines.transformers import heads


class TransformersEngine(Movable):
    """Every rank holds the whole model and scores its own samples; no collective at all."""

    def __init__(self, spec: EngineSpec) -> None:
        model = heads.load(
            spec.model,
            spec.head,
            spec.precision,
            temperature=spec.temperature,
            seed=spec.seed,
            device=device.own(),
        )
        model.requires_grad_(False).eval()
        super().__init__(spec, model, model)

    def _movable(self, *, weights: bool) -> Iterable[Tensor]:
        """Weights are all there is."""
        return module_tensors(self.model) if weights else ()
