"""What engines on DeepSpeed share, with a pipeline and without: a step, and checkpoints.

A checkpoint is the state of a DeepSpeed engine, written and read back bit for bit, one file a rank.

The file holds what the rank's memory holds: module parameters (ZeRO-3: their partitions), fp32 masters,
optimizer states, step counters and random streams.

Another number of data-parallel ranks may have saved it. ZeRO cuts vectors into equal parts, a rank each, the
last one filled up with zeros: stages 1 and 2 the flat vector of all parameters, stage 3 every parameter,
whose parts a rank keeps end to end. A rank then puts together what it holds from the parts of the ranks that
saved, mapped from their files. Stage 0 copies all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import getclosurevars
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.engines import states
from executor.engines.deepspeed.config import clips_itself
from executor.engines.learner import Learner
from executor.engines.transformers.heads import HeadedModel

State = Mapping[str, Any]
"""The file of a rank: `module`, and per tensor of the optimizer its `master` and `states`."""


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

    def _saved(self, folder: Path) -> State:
        return {
            "module": {name: compact(tensor) for name, tensor in _module_tensors(self.model)},
            "optimizer": [_optimizer_state(self.engine, master) for master in masters(self.engine)],
        }

    def _put_back(self, folder: Path, others: Sequence[State], own: State) -> None:
        state = _resharded(self.engine, others, masters(self.engine)) if others else own
        with torch.no_grad():
            for name, tensor in _module_tensors(self.model):
                tensor.copy_(state["module"][name])
            for master, optimizer_state in zip(masters(self.engine), state["optimizer"], strict=True):
                _put_optimizer_state(self.engine, master, optimizer_state)
        _refresh(self.engine)

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


def masters(engine: Any) -> list[Tensor]:
    """The tensors that the optimizer inside DeepSpeed updates, in a fixed order.

    They are the parameters themselves, or fp32 copies: flat partitions under ZeRO.
    """
    outer = engine.optimizer
    for name in (
        "fp32_partitioned_groups_flat",
        "single_partition_of_fp32_groups",
        "fp32_groups",
        "fp32_groups_flat_partition",
        "fp32_groups_flat",
    ):
        if (groups := getattr(outer, name, None)) is not None:
            return [tensor for group in groups for tensor in (group if isinstance(group, list) else [group])]
    return [tensor for group in engine.basic_optimizer.param_groups for tensor in group["params"]]


def _module_tensors(model: HeadedModel) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of every parameter, and buffers that transformers would save."""
    for name, parameter in model.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter.data)
    kept = model.state_dict().keys()
    yield from ((name, buffer.data) for name, buffer in model.named_buffers() if name in kept)


def _optimizer_state(engine: Any, master: Tensor) -> dict[str, Any]:
    states = engine.basic_optimizer.state.get(master, {})
    return {"master": compact(master), "states": {key: compact(value) for key, value in states.items()}}


def compact(value: Any) -> Any:
    """What `torch.save` may be given: it takes storages to the host one at a time, and each whole.

    So a tensor that fills its storage goes as it is; a view of a flat buffer, as a copy on the host.
    """
    if not isinstance(value, Tensor) or value.untyped_storage().nbytes() == value.nbytes:
        return value.detach() if isinstance(value, Tensor) else value
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _put_optimizer_state(engine: Any, master: Tensor, saved: Mapping[str, Any]) -> None:
    master.copy_(saved["master"])
    states = engine.basic_optimizer.state[master]
    for key, value in saved["states"].items():
        if isinstance(value, Tensor) and isinstance(states.get(key), Tensor):
            states[key].copy_(value)
        elif isinstance(value, Tensor) and value.shape == master.shape:
            states[key] = value.to(master.device, copy=True)
        else:  # a counter; torch keeps it on the host
            states[key] = value.clone() if isinstance(value, Tensor) else value


def _refresh(engine: Any) -> None:
    """ZeRO-3: parameters that stay gathered are gathered again from the partitions just read."""
    kept = getattr(engine.optimizer, "persistent_parameters", None)
    if kept:
        kept[0].partition(kept)
        kept[0].all_gather(kept)


def _resharded(engine: Any, states: Sequence[State], masters: Sequence[Tensor]) -> State:
    """What this rank would have saved; `states` are the files of the ranks that did, in their order."""
    match engine.zero_optimization_stage():
        case 0:
            return states[0]
        case 3:
            return _of_stage_3(engine, states, masters)
        case _:
            return {
                "module": states[0]["module"],
                "optimizer": [_flat([s["optimizer"][i] for s in states], m) for i, m in enumerate(masters)],
            }


def _flat(parts: Sequence[State], master: Tensor) -> State:
    """This rank's part of a flat vector and of its optimizer states; counters are equal on all ranks."""
    start = dist.get_rank() * master.numel()

    def mine(values: Sequence[Any]) -> Any:
        whole = isinstance(values[0], Tensor) and values[0].shape == parts[0]["master"].shape
        return _span(values, start, start + master.numel()) if whole else values[0]

    return {
        "master": mine([part["master"] for part in parts]),
        "states": {key: mine([part["states"][key] for part in parts]) for key in parts[0]["states"]},
    }


def _of_stage_3(engine: Any, states: Sequence[State], masters: Sequence[Tensor]) -> State:
    """Each parameter's part, and the parts of all parameters end to end in the tensors of the optimizer."""
    old, rank = len(states), dist.get_rank()
    named = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    trained = [parameter for group in engine.optimizer.fp16_groups for parameter in group]
    module = dict(states[0]["module"])
    for parameter in engine.module.parameters():
        name, size = named[id(parameter)], parameter.ds_tensor.numel()
        pieces = [state["module"][name].reshape(-1) for state in states]
        found = _span([_span(pieces, 0, parameter.ds_numel)], rank * size, (rank + 1) * size)
        module[name] = found.view(parameter.ds_tensor.shape)

    def of_all(values: Sequence[Sequence[Tensor]]) -> Tensor:
        """This rank's parts of all parameters, from the vectors of every rank that saved."""
        parts, start = list[Tensor](), 0
        for parameter in trained:
            size, before = parameter.ds_tensor.numel(), -(-parameter.ds_numel // old)
            pieces = [_span(vectors, start, start + before) for vectors in values]
            whole = _span(pieces, 0, parameter.ds_numel)
            parts.append(_span([whole], rank * size, (rank + 1) * size))
            start += before
        return torch.cat(parts)

    saved = [state["optimizer"] for state in states]
    first = saved[0][0]
    whole = {"master": of_all([[entry["master"] for entry in entries] for entries in saved])}
    for key, value in first["states"].items():
        if isinstance(value, Tensor) and value.shape == first["master"].shape:
            whole[key] = of_all([[entry["states"][key] for entry in entries] for entries in saved])
    optimizer, start = [], 0
    for master in masters:
        mine = {key: vector[start : start + master.numel()] for key, vector in whole.items()}
        optimizer.append({"master": mine.pop("master"), "states": first["states"] | mine})
        start += master.numel()
    return {"module": module, "optimizer": optimizer}


def _span(parts: Sequence[Tensor], start: int, end: int) -> Tensor:
    """Elements `start` to `end - 1` of vectors end to end; zeros beyond their end."""
    found, offset = torch.zeros(end - start, dtype=parts[0].dtype), 0
    for part in parts:
        low, high = max(start, offset), min(end, offset + part.numel())
        if low < high:
            found[low - start : high - start] = part[low - offset : high - offset]
        offset += part.numel()
    return found
