"""Scoring engine for a model that fits one process: transformers alone."""

from __future__ import annotations

from pathlib import Path

from executor.engines import heads
from executor.engines.protocols import EngineSpec
from executor.engines.scoring import Scorer, trim
from executor.engines.states import Storages, module_tensors


class TransformersEngine(Scorer):
    """Every rank holds the whole model and scores its own samples; no collective at all."""

    def __init__(self, spec: EngineSpec) -> None:
        model = heads.load(
            spec.model, spec.head, spec.precision, temperature=spec.temperature, seed=spec.seed
        )
        model.requires_grad_(False).eval()
        super().__init__(spec, model, model)
        model.to(self.device)
        self._away: Storages | None = None

    def offload(self, folder: Path | None = None, *, weights: bool = True) -> None:
        """Weights, which are all there is, to host memory, or to files in `folder`."""
        assert self._away is None, "already offloaded"
        self._away = Storages(module_tensors(self.model) if weights else (), folder)

    def reload(self) -> None:
        """Undo `offload`."""
        assert self._away is not None, "not offloaded"
        self._away.restore()
        self._away = None

    def close(self) -> None:
        """Drop the weights."""
        if self._away is not None:
            self._away.drop()
        del self.model, self.module
        trim()
