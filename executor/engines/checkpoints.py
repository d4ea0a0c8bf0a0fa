"""The file that a rank writes into a checkpoint, its random streams, and a copy for users in safetensors.

It fits the same layout, precision and model; another number of data-parallel ranks where an engine cuts the
states anew, which each of its ranks does from the files of all that saved.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from executor.engines import device, lora
from executor.engines.background import copied, size_of
from executor.engines.protocols import EngineSpec, LaterWrites
from executor.engines.transformers.heads import HeadedModel
from executor.engines.weights import grouped
from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError

GATHER_BYTES = 256 * 2**20
"""Bytes of one bucket of the copy for users."""
FILE_BYTES = 4 * 2**30
"""Bytes of one of its files; a larger tensor has its own."""
ADAPTER = "adapter"
"""Folder of a LoRA adapter, as peft reads it, next to the merged weights."""
FORMAT = 2
BESIDE_WEIGHTS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
    "generation_config.json",
)
"""Files of the folder that the role began with, as they were."""


class Saved(Protocol):
    """What is saved."""

    spec: EngineSpec
    model: HeadedModel
    steps: int

    def buckets(self, bucket_bytes: int) -> Iterator[list[Named]]:
        """Full weights; a collective."""


def write(
    saved: Saved, folder: Path, state: Mapping[str, Any], background: LaterWrites | None = None
) -> None:
    """This rank's file with `state`; rank 0 also a copy for users; a collective.

    Files appear under their names only when they are complete. What `background` has memory for is copied,
    and written when this has returned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    common = {"identity": _identity(saved.spec), "steps": saved.steps, "random": _random()}
    whole, path = {**common, **state}, _path(folder)
    if background is not None and background.fits(size_of(whole)):
        background.submit(partial(_put, path, torch.save, copied(whole)))
    else:
        _put(path, torch.save, whole)
    export(saved, folder, background)
    dist.barrier()


def _put(path: Path, put: Callable[[Any, Path], None], what: Any) -> None:
    """A file under its name only when it is complete."""
    put(what, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def read(saved: Saved, folder: Path) -> dict[str, Any]:
    """This rank's file; its steps and random streams are put back.

    Raises:
        RlhfsimError: no file for this rank, or one of another number of ranks, layout, precision or head.
    """
    path = _path(folder)
    if not path.is_file():
        raise RlhfsimError(
            "no-checkpoint",
            f"{folder} has no {path.name}: it was not saved by {dist.get_world_size()} ranks",
            help="resume with the layout that saved it, or start from its safetensors files",
        )
    state = _checked(saved, path, _identity(saved.spec))
    saved.steps = state["steps"]
    _put_random(state["random"])
    return state


def read_all(saved: Saved, folder: Path) -> list[dict[str, Any]]:
    """The files of all ranks that saved, where they were not as many as now; else none.

    The steps are put back, and the random streams of a rank that saved.

    Raises:
        RlhfsimError: as `read`, except for the number of data-parallel ranks.
    """
    paths = sorted(folder.glob("rank-*-of-*.pt"), key=lambda path: int(path.name.split("-")[1]))
    if not paths or _path(folder).is_file():
        return []
    wanted = {key: value for key, value in _identity(saved.spec).items() if key != "dp"}
    states = [_checked(saved, path, wanted) for path in paths]
    saved.steps = states[0]["steps"]
    _put_random(states[dist.get_rank() % len(states)]["random"])
    return states


def _checked(saved: Saved, path: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's file, mapped."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise RlhfsimError(
            "checkpoint-unreadable",
            f"{path} is not what a run of this version saved: {str(error).splitlines()[0]}",
            help="resume from an older checkpoint of the run, or start from its safetensors files",
        ) from error
    before = state["identity"]
    for key, value in wanted.items():
        if before.get(key) != value:
            raise RlhfsimError(
                "checkpoint-layout",
                f"{path} was saved with {key}={before.get(key)}, this run has {key}={value}",
                help="resume with the layout that saved it, or start from its safetensors files",
            )
    return state


def _path(folder: Path) -> Path:
    return folder / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.pt"


def _identity(spec: EngineSpec) -> dict[str, Any]:
    layout = spec.layout
    return {
        "format": FORMAT,
        "backend": spec.backend,
        "tp": layout.tp,
        "dp": layout.dp,
        "zero": layout.zero,
        "head": spec.head,
        "precision": spec.precision,
        "lora_rank": spec.lora_rank,
    }


def _random() -> dict[str, Any]:
    drawn: Any = np.random.get_state()  # noqa: NPY002  the stream that libraries draw from
    generator, words, *rest = drawn
    return {
        "python": random.getstate(),
        "numpy": (generator, torch.from_numpy(words.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "device": device.random_state(),
    }


def _put_random(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    generator, words, *rest = state["numpy"]
    np.random.set_state((generator, words.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    device.put_random_state(state.get("device", state.get("cuda")))


def export(saved: Saved, folder: Path, background: LaterWrites | None = None) -> None:
    """A model folder as transformers and vLLM load it, with tokenizer and generation config; a collective.

    With LoRA its weights are merged, and the adapter alone lies in `adapter/`. Rank 0 holds the tensors of
    one file at a time, or of those that `background` has memory for. A model larger than a file is in
    several, with an index.
    """
    weight_map, total = dict[str, str](), 0
    for number, group in enumerate(grouped(_on_host(saved), FILE_BYTES), 1):
        path = folder / f"model-{number:05d}.safetensors"
        weight_map |= dict.fromkeys((name for name, _ in group), path.name)
        size = sum(tensor.nbytes for _, tensor in group)
        total += size
        if background is not None and background.fits(size):
            background.submit(partial(_put, path, _tensors, dict(group)))
        else:
            _put(path, _tensors, dict(group))
        group.clear()  # before the next file's tensors are gathered
    last = partial(_name_files, folder, weight_map, total)
    last() if background is None else background.submit(last)
    if dist.get_rank() == 0:
        _configuration(saved).save_pretrained(folder)
        for name in BESIDE_WEIGHTS:
            if (Path(saved.spec.model) / name).is_file():
                shutil.copyfile(Path(saved.spec.model) / name, folder / name)
    if saved.spec.lora_rank is not None:
        lora.export(saved.model, saved.spec, folder / ADAPTER, here=dist.get_rank() == 0)


def _tensors(named: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(named, path, metadata={"format": "pt"})


def _name_files(folder: Path, weight_map: Mapping[str, str], total: int) -> None:
    """One file has the usual name, several have an index."""
    if len(names := set(weight_map.values())) == 1:
        (folder / names.pop()).replace(folder / "model.safetensors")
    elif weight_map:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _configuration(saved: Saved) -> Any:
    """With a scalar head that of a sequence classifier of one label, as other libraries read it."""
    config = copy.deepcopy(saved.model.config)
    if saved.spec.head != "causal":
        config.num_labels = 1
        names = config.architectures or []
        config.architectures = [name.replace("ForCausalLM", "ForSequenceClassification") for name in names]
    return config


def _on_host(saved: Saved) -> Iterator[tuple[Named, int]]:
    """Full weights with their bytes on rank 0, nothing elsewhere; a collective."""
    for bucket in saved.buckets(GATHER_BYTES):
        for name, tensor in bucket:
            yield (name, tensor.to("cpu", copy=True)), tensor.nbytes
