"""verl's trainer of given data until 0.7.0, fsdp_sft_trainer: one row a key, read and never written.

Keys and defaults: verl/trainer/config/sft_trainer.yaml of 0.2.0.post2 to 0.7.0; what it does with them:
verl/trainer/fsdp_sft_trainer.py. Its data set pads every sample to the longest that may come
(verl/utils/dataset/sft_dataset.py); only the ranks of a sequence go without the padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfsim.interchange.configuration.configuration import ENTRY_POINT
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.fields import Fields, cut
from rlhfsim.interchange.given_data import fields_of
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.table import Table
from rlhfsim.interchange.verl.given_keys import (
    ALGORITHM,
    BEFORE,
    GENERATES,
    LONGEST,
    LORA_RANK,
    MICRO_BATCH,
    MODEL_GROUP,
    PRETRAINED,
)
from rlhfsim.interchange.verl.software import FsdpKeys, in_fsdp
from rlhfsim.interchange.verl.versions import EACH, NODES, TRAIN_BATCH, ULYSSES, VERSION, before
from rlhfsim.specs.frameworks.verl.heads import HEADS

LAST = "0.6.1"
"""The last recorded release with it."""
IGNORED = "data.micro_batch_size"
"""In its configuration and in its examples, and read by no release since 0.2."""
UNPADS = "use_remove_padding"
STRATEGY = f"{MODEL_GROUP}.strategy"
OFFLOADS = tuple(f"{MODEL_GROUP}.fsdp_config.{name}" for name in ("cpu_offload", "offload_params"))
STRATEGY_SINCE = (0, 4)
"""Release since which a strategy can be said, and layers are computed again, where nothing is said."""


def is_old(values: Mapping[str, Any]) -> bool:
    """Whether a configuration is of this trainer."""
    started = values.get(ENTRY_POINT)
    if started:
        return BEFORE in str(started)
    return PRETRAINED in values and not any(key.startswith(GENERATES) for key in values)


def _fsdp(s: FrameworkSettings) -> FsdpKeys:
    first = before(s.find(VERSION), STRATEGY_SINCE)
    return FsdpKeys(
        strategy=STRATEGY, dtype=f"{MODEL_GROUP}.fsdp_config.model_dtype", usual="fsdp" if first else "fsdp2"
    )


def hosts(s: FrameworkSettings) -> tuple[bool, bool]:
    """Whether states shall be on the host, and whether it is FSDP1 that is told: FSDP2 gets its object."""
    keys, asked = _fsdp(s), [s.flag(key) for key in OFFLOADS]
    return all(asked), s.text(keys.strategy, default=keys.usual) == "fsdp"


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    s.overruled(NODES, EACH, IGNORED)
    unpads = s.flag(UNPADS) and read["actor.cp"] > 1
    hosted = "cpu" if all(hosts(s)) else "none"
    head = HEADS["eager_unpadded" if unpads else "eager_padded"]
    return {
        **fields_of(
            ALGORITHM, model=s.model(PRETRAINED), samples=read["samples_of_update"], limit=read["limit.total"]
        ),
        "backend": "fsdp2",
        "layout": cut(read, read["actor.gpus"], zero=3, offload_optimizer=hosted, offload_params=hosted),
        "workload.packing": unpads,
        "full": not unpads,
        "limit.total": read["limit.total"],
        "software": in_fsdp(s, _fsdp(s), head, adapters=read["workload.lora.rank"] > 0),
    }


TABLE = Table(
    lambda: rows_of(
        "verl",
        {
            "LONGEST": LONGEST,
            "LORA_RANK": LORA_RANK,
            "MICRO_BATCH": MICRO_BATCH,
            "TRAIN_BATCH": TRAIN_BATCH,
            "ULYSSES": ULYSSES,
            "recompute": lambda read: "none" if before(read["version"], STRATEGY_SINCE) else "full",
        },
        "old_given_keys",
    ),
    _rest,
    follows={"version": lambda s, read: s.find(VERSION), "shared": lambda s, read: True},
)
