"""OpenRLHF's trainers of given data: openrlhf/cli/train_sft.py, train_rm.py, train_dpo.py (0.11.2, 0.9.10).

One row each, written from a plan and read. torchrun or DeepSpeed's launcher starts one process a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfsim.interchange.configuration.configuration import ENTRY_POINT
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.fields import Fields
from rlhfsim.interchange.given_data import fields_of, samples_of
from rlhfsim.interchange.openrlhf.keys import (
    BATCH,
    ENGINE,
    HOSTED,
    LONGEST,
    MICRO_BATCH,
    OFFLOAD,
    PACKED,
    REFERENCE_AWAY,
    software_of,
)
from rlhfsim.interchange.openrlhf.releases import OF_GIVEN_DATA
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.table import Table
from rlhfsim.specs.workload.workload import Algorithm, sequences_of

TRAINERS: Mapping[str, Algorithm] = {
    "openrlhf.cli.train_sft": "sft",
    "openrlhf.cli.train_rm": "reward_model",
    "openrlhf.cli.train_dpo": "dpo",
}
"""Entry point -> what it trains by."""
_USUAL = {"sft": (8, 2048), "dpo": (8, 512), "reward_model": (1, 512)}
"""Algorithm -> samples of a micro-batch and tokens of a sequence where nothing is said."""


def trainer_of(s: FrameworkSettings) -> Algorithm | None:
    """What a command trains by; None: by PPO and its like."""
    return TRAINERS.get(str(s.find(ENTRY_POINT)))


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    algorithm: Algorithm = read["workload.algorithm"]
    model = s.model(*TABLE.named("--model.model_name_or_path"))
    away = s.flag(*TABLE.named(REFERENCE_AWAY))
    s.overruled("local_rank", *TABLE.named("--ref.model_name_or_path"))
    return {
        **fields_of(algorithm, model=model, samples=read["samples_of_update"], limit=read["limit.total"]),
        "actor.micro_batch": sequences_of(algorithm) * read["actor.micro_batch"],
        "workload.packing": s.flag(*TABLE.named(PACKED)) or read["actor.cp"] > 1,
        "backend": "deepspeed",
        "software": software_of(s),
        "reference.residency": "offloaded" if away and read["actor.zero"] in HOSTED else "resident",
    }


TABLE = Table(
    lambda: rows_of(
        "openrlhf",
        {
            "BATCH": BATCH,
            "ENGINE": ENGINE,
            "LONGEST": LONGEST,
            "MICRO_BATCH": MICRO_BATCH,
            "OFFLOAD": OFFLOAD,
            "REFERENCE_AWAY": REFERENCE_AWAY,
        },
        "given_keys",
    ),
    _rest,
    {"samples_of_update": samples_of, "paired": lambda plan: plan.workload.paired},
    {
        "workload.algorithm": lambda s, read: trainer_of(s),
        "usual.micro_batch": lambda s, read: _USUAL[read["workload.algorithm"]][0],
        "usual.limit": lambda s, read: _USUAL[read["workload.algorithm"]][1],
        "shared": lambda s, read: True,
    },
    releases=OF_GIVEN_DATA,
)
