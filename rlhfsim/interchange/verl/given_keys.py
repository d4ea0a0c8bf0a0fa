"""verl's trainers of given data, sft_trainer and sft_trainer_ray (0.6.1 to 0.9.1): one row a key.

Keys and defaults: verl/trainer/config/sft_trainer_engine.yaml and its groups model, engine and optim.
torchrun starts one process a GPU; the trainer on Ray has the keys of nodes that other trainers have. The
engine is that of a policy (verl/workers/engine), at temperature 1 and without entropy (sft_trainer.py, line
351 of 0.9.1; workers/utils/losses.py, `sft_loss`): BF16 logits over which their gradient is written, masters
and moments in FP32, layers computed again, no reference and no rollout.
"""

from __future__ import annotations

import re
from typing import Any

from rlhfsim.interchange.configuration.configuration import ENTRY_POINT
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.fields import Fields
from rlhfsim.interchange.given_data import fields_of, samples_of
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.table import Codec, Table
from rlhfsim.interchange.verl.engines import (
    PLANNED,
    Prefixes,
    engine,
    engine_not_read,
    gradient_sums,
    layout_of,
    recomputing,
)
from rlhfsim.interchange.verl.software import FsdpKeys, in_fsdp, in_megatron, scaled_of
from rlhfsim.interchange.verl.versions import EACH, NODES, TRAIN_BATCH, UNPADDED, VERSION, default
from rlhfsim.specs.frameworks.verl.heads import HEADS, head_of
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.workload import Algorithm

ALGORITHM: Algorithm = "sft"
STARTS = "verl.trainer.sft_trainer"
BEFORE = "fsdp_sft_trainer"
"""Names the trainer until 0.7.0, which has keys of its own (`old_given_keys`)."""
GENERATES = "actor_rollout_ref"
"""Begins keys of the trainers that generate."""
STARTED = re.compile(r"\bsft_trainer|_sft_trainer")
ENGINE, OPTIMIZER, MODEL_GROUP = "engine", "optim", "model"
"""Groups of the configuration, each also a key that chooses its file."""
PRETRAINED = f"{MODEL_GROUP}.partial_pretrain"
"""The model, until 0.7.0."""
MODEL, REMOVES_PADDING = f"{MODEL_GROUP}.path", f"{MODEL_GROUP}.use_remove_padding"
LORA_RANK = f"{MODEL_GROUP}.lora_rank"
FUSES, PAD_MODE = f"{MODEL_GROUP}.use_fused_kernels", "data.pad_mode"
MICRO_BATCH = "data.micro_batch_size_per_gpu"
BUDGET, LONGEST = "data.max_token_len_per_gpu", "data.max_length"
MEGATRON_FSDP = f"{ENGINE}.use_megatron_fsdp"
KEYS = Prefixes(
    role="actor",
    strategy=f"{ENGINE}.strategy",
    fsdp=ENGINE,
    megatron=ENGINE,
    model=MODEL_GROUP,
    optimizer=OPTIMIZER,
)
FSDP = FsdpKeys(
    strategy=KEYS.strategy,
    dtype=f"{ENGINE}.model_dtype",
    sums_whole=f"{ENGINE}.use_no_sync_for_gradient_accumulation",
)
BACKENDS = {"megatron": "megatron", "fsdp": "fsdp2"}
"""Word of `engine` -> training backend here; fsdp is the default."""
MARKS = (f"{ENGINE}.ulysses_", f"{ENGINE}.model_dtype", BUDGET, PAD_MODE)
"""Beginnings of keys that no other framework has."""


def trains_given(s: FrameworkSettings) -> bool:
    """Whether a configuration is one of this trainer, or of that before it."""
    started = s.find(ENTRY_POINT)
    if started is not None:
        return STARTED.search(str(started)) is not None
    return s.says(BUDGET, PAD_MODE, PRETRAINED) and not s.has(GENERATES)


def _backend(s: FrameworkSettings, keys: tuple[str, ...], usual: Any) -> str:
    """The training backend of an engine.

    Raises:
        RlhfsimError: another engine, or Megatron-FSDP, neither of which is priced.
    """
    said = s.text(*keys, default=usual)
    if said not in BACKENDS:
        raise engine_not_read(s, keys[0], said, BACKENDS)
    if s.flag(MEGATRON_FSDP):
        raise engine_not_read(s, MEGATRON_FSDP, True, ("false",))
    return BACKENDS[said]


USUAL = "fsdp"
"""Engine, and file of its optimizer's keys, where nothing is said."""
WORDS = {backend: word for word, backend in BACKENDS.items()}
_BACKEND = Codec(WORDS.get, _backend, tuple(WORDS))


def _software(s: FrameworkSettings, read: Fields) -> Software | None:
    """What the keys say of the head, and of FSDP; None: as `runs` has it."""
    fused, packing = s.flag(FUSES), bool(read["workload.packing"])
    if read["backend"] == "megatron":
        return in_megatron(HEADS["megatron_fused"] if fused else None)
    usual = head_of(packing=packing, entropy=False, scaled=scaled_of(s.find(VERSION)))
    head = HEADS["fused"] if fused else usual
    return in_fsdp(s, FSDP, head, adapters=read["workload.lora.rank"] > 0)


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    s.overruled(MODEL_GROUP, OPTIMIZER, NODES, EACH, f"{ENGINE}.use_remove_padding")
    s.overruled(MICRO_BATCH if read["actor.packs"] else BUDGET)
    layout = layout_of(s, read, KEYS)
    samples = read["samples_of_update"]
    return {
        **fields_of(
            ALGORITHM,
            model=s.model(MODEL),
            samples=max(layout.dp, samples - samples % layout.dp),
            limit=read["limit.total"],
        ),
        "layout": layout,
        "actor.residency": "offloaded" if read["actor.hosted"] else "resident",
        "actor.offload_between": read["actor.leaves"],
        "software": _software(s, read),
    }


TABLE = Table(
    lambda: rows_of(
        "verl",
        {
            "BUDGET": BUDGET,
            "EACH": EACH,
            "ENGINE": ENGINE,
            "LONGEST": LONGEST,
            "LORA_RANK": LORA_RANK,
            "MICRO_BATCH": MICRO_BATCH,
            "MODEL": MODEL,
            "NODES": NODES,
            "OPTIMIZER": OPTIMIZER,
            "REMOVES_PADDING": REMOVES_PADDING,
            "TRAIN_BATCH": TRAIN_BATCH,
            "USUAL": USUAL,
            "backend": _BACKEND,
            "engine": engine(KEYS),
            "gradient_sums": gradient_sums(KEYS),
            "packing": lambda read: bool(default(UNPADDED, read["version"])),
            "recomputing": recomputing(KEYS),
            "word": lambda plan: WORDS[plan.placement.backend],
        },
        "given_keys",
    ),
    _rest,
    {**PLANNED, "samples_of_update": samples_of},
    {
        "workload.algorithm": lambda s, read: ALGORITHM,
        "version": lambda s, read: s.find(VERSION),
        "leader": lambda s, read: "actor",
        "shared": lambda s, read: True,
    },
)
