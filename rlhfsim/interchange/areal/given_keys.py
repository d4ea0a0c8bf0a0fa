"""AReaL's SFTTrainer (1.0.4: `SFTConfig` of areal/api/cli_args.py): its keys, read and never written.

The engine and the loss around its logits are those of a policy (areal/trainer/sft/lm_engine.py), which is
alone; a batch of its data set is one update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhfsim.finding import Finding
from rlhfsim.interchange.areal.allocations import gpus_of
from rlhfsim.interchange.areal.keys import (
    ALLOCATIONS,
    BACKENDS,
    BATCH,
    BUDGETS,
    LONGEST,
    OFFLOADS,
    POLICY,
    TYPE,
    adapters,
    gradients,
    layout_of,
)
from rlhfsim.interchange.areal.keys import TABLE as GENERATES
from rlhfsim.interchange.configuration.configuration import ENTRY_POINT
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import refused, uneven_batch
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.fields import Fields
from rlhfsim.interchange.given_data import fields_of
from rlhfsim.interchange.table import Key, Table, limit, whole
from rlhfsim.specs.workload.workload import Algorithm

ALGORITHM: Algorithm = "sft"
SCRIPT = r"\bexamples/\w+/(?=\w*_sft)\w+\.py"
"""A script that trains so, where its configuration does not say it."""


def trains_given(s: FrameworkSettings) -> bool:
    """Whether a configuration is one of this trainer."""
    return s.find(TYPE) == ALGORITHM or "_sft" in str(s.find(ENTRY_POINT))


def _allocation(s: FrameworkSettings) -> str:
    """`fsdp:d8`; `allocation_mode`, as `d8`, is that of FSDP where it names no engine."""
    key = BACKENDS[0]
    mode = s.find(ALLOCATIONS) if s.find(key) is None else None
    said = str(mode) if mode is not None else s.text(key)
    return said if ":" in said else f"fsdp:{said}"


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    trains, samples = _allocation(s), read["samples_of_update"]
    megatron = trains.startswith("megatron")
    s.overruled("valid_dataset.", "rollout.", *OFFLOADS)
    return {
        **fields_of(ALGORITHM, model=s.model(POLICY), samples=samples, limit=read["limit.total"]),
        "workload.packing": True,
        "workload.lora.rank": adapters(s),
        "workload.gradients": gradients(s, megatron),
        "backend": "megatron" if megatron else "fsdp2",
        "actor.gpus": gpus_of(trains),
        "actor.each": read["cluster.each"],
        "layout": layout_of(s, "actor", trains, samples, samples),
    }


TABLE = Table(
    lambda: {
        "where it runs": tuple(row for row in GENERATES.keys if row.field == "cluster.each"),
        "batch and lengths": (
            Key("samples_of_update", BATCH, 1, whole(1)),
            Key("limit.total", LONGEST, 0, limit()),
        ),
    },
    _rest,
    follows={"shared": lambda s, read: True, "actor.gpus": lambda s, read: gpus_of(_allocation(s))},
)


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Packs below the longest sample, and batches that the ranks do not share alike."""
    budget, longest = s.find(BUDGETS[0]), run.max_response
    if isinstance(budget, int) and longest is not None and budget < longest:
        yield refused(
            f"a sample of up to {longest:,} tokens exceeds the budget of {budget:,} tokens: AReaL stops "
            "at the first batch with one",
            BUDGETS[0],
            LONGEST,
            remedy=f"{BUDGETS[0]}={longest}",
        )
    yield from uneven_batch(run, BATCH, then="AReaL stops at it")
