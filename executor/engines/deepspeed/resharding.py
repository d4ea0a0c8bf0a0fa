"""State of a DeepSpeed engine that another number of data-parallel ranks saved.

ZeRO cuts vectors into equal parts, a rank each, the last one filled up with zeros: stages 1 and 2 the flat
vector of all parameters, stage 3 every parameter, whose parts a rank keeps end to end. Here a rank puts
together what it holds from the parts of the ranks that saved, mapped from their files. Stage 0 copies all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

State = Mapping[str, Any]
"""The file of a rank: `module`, and per tensor of the optimizer its `master` and `states`."""


def resharded(engine: Any, states: Sequence[State], masters: Sequence[Tensor]) -> State:
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
        return span(values, start, start + master.numel()) if whole else values[0]

    return _mapped(parts, mine)


def _of_stage_3(engine: Any, states: Sequence[State], masters: Sequence[Tensor]) -> State:
    """Each parameter's part, and the parts of all parameters end to end in the tensors of the optimizer."""
    old, rank = len(states), dist.get_rank()
    named = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    trained = [parameter for group in engine.optimizer.fp16_groups for parameter in group]
    module = dict(states[0]["module"])
    for parameter in engine.module.parameters():
        name, size = named[id(parameter)], parameter.ds_tensor.numel()
        pieces = [state["module"][name] for state in states]
        found = span([_cut(pieces, 0, parameter.ds_numel)], rank * size, (rank + 1) * size)
        module[name] = found.view(parameter.ds_tensor.shape)

    def of_all(values: Sequence[Sequence[Tensor]]) -> Tensor:
        """This rank's parts of all parameters, from the vectors of every rank that saved."""
        parts, start = list[Tensor](), 0
        for parameter in trained:
            size, before = parameter.ds_tensor.numel(), -(-parameter.ds_numel // old)
            pieces = [span(vectors, start, start + before) for vectors in values]
            whole = _cut(pieces, 0, parameter.ds_numel)
            parts.append(span([whole], rank * size, (rank + 1) * size))
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


def _mapped(parts: Sequence[State], of: Any) -> State:
    """Masters and states of one tensor of the optimizer, each put together by `of`."""
    keys = parts[0]["states"]
    return {
        "master": of([part["master"] for part in parts]),
        "states": {key: of([part["states"][key] for part in parts]) for key in keys},
    }


def _cut(pieces: Sequence[Tensor], start: int, end: int) -> Tensor:
    return span([piece.reshape(-1) for piece in pieces], start, end)


def span(parts: Sequence[Tensor], start: int, end: int) -> Tensor:
    """Elements `start` to `end - 1` of vectors end to end; zeros beyond their end."""
    found, offset = torch.zeros(end - start, dtype=parts[0].dtype), 0
    for part in parts:
        low, high = max(start, offset), min(end, offset + part.numel())
        if low < high:
            found[low - start : high - start] = part[low - offset : high - offset]
        offset += part.numel()
    return found
