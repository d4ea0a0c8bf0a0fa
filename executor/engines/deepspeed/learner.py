"""What engines on DeepSpeed share, with a pipeline and without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import getclosurevars
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from executor.engines import states
from executor.engines.deepspeed import checkpoints
from executor.engines.deepspeed.config import clips_itself
from executor.engines.learner import Learner


class DeepSpeedLearner(Learner):
    """A model behind DeepSpeed that learns, or only infers where its spec has no optimizer."""

    engine: Any
    """DeepSpeed's; None: a pipeline that only infers."""

    def _optimizer(self) -> torch.optim.Optimizer:
        return cast(torch.optim.Optimizer, self.engine.basic_optimizer)

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over data-parallel ranks, the loss is a sum over them
        self.engine.backward(loss * self.spec.layout.dp)

    def _update(self) -> None:
        self._apply(self.engine.step)

    def _apply(self, update: Callable[[], object]) -> None:
        """Clip where DeepSpeed would not tell the norm, then `update`; not at all where it is not finite."""
        assert self.spec.optimizer is not None
        if not clips_itself(self.spec.layout, self.spec.precision):
            update()
            overflow = getattr(self.engine.optimizer, "overflow", False)
            self._norm = math.inf if overflow else float(self.engine.get_global_grad_norm())
            return
        from deepspeed.runtime.utils import clip_grad_norm_

        limit = self.spec.optimizer.max_grad_norm
        self._norm = float(clip_grad_norm_(self.model.parameters(), limit, mpu=self.engine.mpu))
        if math.isfinite(self._norm):
            update()
        else:
            self._norm = math.inf
            self.engine.zero_grad()

    def _saved(self, folder: Path) -> Mapping[str, Any]:
        return checkpoints.state_of(self.model, self.engine)

    def _put_back(self, folder: Path, others: Sequence[Mapping[str, Any]], own: Mapping[str, Any]) -> None:
        checkpoints.put_back(self.model, self.engine, others, own)

    def _movable(self, *, weights: bool) -> Iterator[Tensor]:
        return states.engine_tensors(self.engine, weights=weights)

    def close(self) -> None:
        """Free everything."""
        if self.engine is not None:
            self.engine.destroy()
            _let_go(self.engine.module)
        del self.engine
        super().close()


def _let_go(module: nn.Module) -> None:
    """Take a destroyed engine of ZeRO-3 from a list and a cache that DeepSpeed keeps for the whole process.

    A layer that is computed again ends before its last modules leave the list.
    Source: 0.19.8, runtime/zero/parameter_offload.py line 315, partitioned_param_coordinator.py line 633.
    """
    from deepspeed.runtime.zero import parameter_offload as offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    own = set(module.modules())
    offload.FWD_MODULE_STACK[:] = [other for other in offload.FWD_MODULE_STACK if other not in own]
    cached = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    getclosurevars(cached).nonlocals["func"].cache_clear()
