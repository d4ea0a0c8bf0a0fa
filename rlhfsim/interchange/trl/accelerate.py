"""Keys of accelerate and DeepSpeed, which TRL's launches read: one row each, and the files that TRL ships."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhfsim.interchange.configuration.settings import FrameworkSettings, SettingMissing
from rlhfsim.interchange.table import Codec, marked
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.backends import Backend

DEEPSPEED, FSDP = "deepspeed_config.", "fsdp_config."
NAMED_FILE = "deepspeed"
"""Key of the file in which DeepSpeed's configuration lies."""
OWN_FILE = ("zero_optimization", "deepspeed.zero_optimization")
"""Groups of DeepSpeed's own file, and of a dictionary in a script."""
OVERLAPS = tuple(f"{group}.overlap_comm" for group in OWN_FILE)
"""Keys of DeepSpeed that have it reduce gradients while the backward pass runs on."""
PROCESSES, KIND = "num_processes", "distributed_type"
STAGE, VERSION = f"{DEEPSPEED}zero_stage", f"{FSDP}fsdp_version"
RESHARD = f"{FSDP}fsdp_reshard_after_forward"
STAGE_NAMED = re.compile(r"(?:zero|ds_?z|z|stage)[-_]?([0-3])")
"""How names of DeepSpeed's files say their stage: `ds_zero3.json`, `zero2_offload`, `ds_z3_config.json`."""
LAUNCHED: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {KIND: "NO"},
    "multi_gpu": {KIND: "MULTI_GPU"},
    **{f"zero{stage}": {STAGE: stage} for stage in (1, 2, 3)},
    "fsdp1": {VERSION: 1, RESHARD: "FULL_SHARD"},
    "fsdp2": {VERSION: 2, RESHARD: True},
}
"""Configurations of accelerate that TRL ships, 8 processes each (trl/accelerate_configs, 1.16.0)."""


def trained_by(s: FrameworkSettings) -> Backend:
    """FSDP where any of its keys says so, else DeepSpeed, of which data parallelism alone is stage 0."""
    fsdp = (s.has(FSDP.rstrip(".")), bool(s.find("fsdp")), s.find(KIND) == "FSDP")
    return "fsdp2" if any(fsdp) else "deepspeed"


def _processes(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> int:
    """One process a GPU: accelerate's number of all, or a node's of deepspeed or torchrun."""
    each = s.count("nproc_per_node", "num_gpus")
    nodes = s.count("nnodes", "num_nodes") or 1
    return each * nodes if each and s.find(*keys) is None else s.whole(*keys)


def _stage(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> int:
    """ZeRO stage, as it is said, or as the file behind `deepspeed` is called; 0 without DeepSpeed."""
    named = s.find(NAMED_FILE)
    if s.find(*keys) is not None or named is None:
        return s.whole(*keys, default=default)
    stage = STAGE_NAMED.search(str(named).lower())
    if stage is None:
        raise SettingMissing(keys[0], s.name)
    return int(stage[1])


def _sharded(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> int:
    """3 where FSDP cuts weights, 2 where it keeps them whole."""
    return 3 if s.text(*keys, default="true").lower() in ("true", "full_shard") else 2


def _kind(plan: Plan) -> str:
    if plan.placement.backend == "fsdp2":
        return "FSDP"
    return "DEEPSPEED" if plan.placement.actor.layout.zero else "MULTI_GPU"


ROWS: Mapping[str, Any] = {
    "KIND": KIND,
    "PROCESSES": PROCESSES,
    "RESHARD": RESHARD,
    "STAGE": STAGE,
    "VERSION": VERSION,
    "device": replace(marked("cpu", "cpu", "none"), write=lambda device: device),
    "kind": _kind,
    "processes": Codec(lambda n: n, _processes),
    "sharded": Codec(lambda zero: zero == 3, _sharded),
    "stage": Codec(lambda zero: zero or None, _stage),
}
"""What the rows of these keys name in `accelerate.yaml`."""
