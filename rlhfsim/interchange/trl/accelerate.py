"""Keys of accelerate and DeepSpeed, which TRL's launches read: one row each, and the files that TRL ships."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhfsim.interchange.configuration.settings import FrameworkSettings, SettingMissing
from rlhfsim.interchange.predictions import predicted
from rlhfsim.interchange.table import Codec, FixedKey, Key, count, flag, given_that, marked, of_call
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


def _device(field: str, part: str, when: str = "") -> Key:
    """Where a part of the states lies."""
    own = tuple(f"{group}.offload_{part}.device" for group in OWN_FILE)
    codec = replace(marked("cpu", "cpu", "none"), write=lambda device: device)
    return Key(field, f"{DEEPSPEED}offload_{part}_device", codec=codec, also=own, when=when)


def _third(plan: Plan) -> bool:
    return plan.placement.actor.layout.zero == 3


def _kind(plan: Plan) -> str:
    if plan.placement.backend == "fsdp2":
        return "FSDP"
    return "DEEPSPEED" if plan.placement.actor.layout.zero else "MULTI_GPU"


ROWS = (
    Key("actor.nodes", "num_machines", 1, count(), why=predicted),
    Key("actor.gpus", PROCESSES, codec=Codec(lambda n: n, _processes), also=("n_gpus", "world_size")),
    FixedKey(KIND, _kind),
    *given_that(
        "backend=deepspeed",
        Key(
            "actor.zero",
            STAGE,
            0,
            Codec(lambda zero: zero or None, _stage),
            also=("zero_stage", *(f"{group}.stage" for group in OWN_FILE)),
            why=of_call("actor.train"),
        ),
        _device("actor.offload_optimizer", "optimizer", "actor.zero"),
        _device("actor.offload_params", "param", "actor.zero=3"),
        FixedKey(f"{DEEPSPEED}offload_param_device", "none", "actor.zero !actor.zero=3"),
        FixedKey(f"{DEEPSPEED}zero3_init_flag", _third, "actor.zero"),
        FixedKey(f"{DEEPSPEED}zero3_save_16bit_model", _third, "actor.zero"),
    ),
    *given_that(
        "backend=fsdp2",
        FixedKey(VERSION, 2, why=of_call("actor.train")),
        FixedKey(f"{FSDP}fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        FixedKey(f"{FSDP}fsdp_cpu_ram_efficient_loading", True),
        Key("actor.offload_optimizer", f"{FSDP}fsdp_offload_params", "none", flag("cpu", "none", both=True)),
        Key("actor.zero", RESHARD, 3, Codec(lambda zero: zero == 3, _sharded)),
        FixedKey(f"{FSDP}fsdp_state_dict_type", "FULL_STATE_DICT"),
    ),
)
