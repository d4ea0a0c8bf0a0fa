"""SkyRL's trainer of given data, skyrl.train.main_sft (0.4.0): one row a key, read and never written.

Keys and defaults: skyrl/train/config/sft_config.py, SFTConfig; what happens to them there:
`build_skyrl_config_for_sft`. Layers are always computed again, and nothing leaves the GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import gcd
from typing import Any

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import ENTRY_POINT
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import refused
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.fields import Fields
from rlhfsim.interchange.given_data import fields_of
from rlhfsim.interchange.rows import rows_of
from rlhfsim.interchange.skyrl.keys import engine, layout_of, recompute
from rlhfsim.interchange.table import Table
from rlhfsim.specs.workload.workload import Algorithm

ALGORITHM: Algorithm = "sft"
STARTED = re.compile(r"\bmain_sft")
BATCH, MICRO_BATCH, LONGEST = "batch_size", "micro_train_batch_size_per_gpu", "max_length"
BINS, CAPACITY = "use_sequence_packing", "max_tokens_per_microbatch"
UNPADS, RENAMED = "remove_microbatch_padding", "use_sample_packing"
DUMMY = "dummy_run_full_ctx"


def trains_given(s: FrameworkSettings) -> bool:
    """Whether a configuration is one of this trainer."""
    return STARTED.search(str(s.find(ENTRY_POINT))) is not None


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    longest, megatron = read["limit.total"], read["backend"] == "megatron"
    capacity = (s.count(CAPACITY) or longest) if megatron and s.flag(BINS) else None
    s.overruled(*([] if capacity is None else [MICRO_BATCH]), "optimizer_config.offload_after_step")
    given: dict[str, Any] = {"micro_batch": read["actor.micro_batch"]}
    if capacity is not None:
        given = {"pack_tokens": max(1, capacity // read["actor.cp"])}
    given["recompute"] = recompute(s, read, "")
    return {
        **fields_of(
            ALGORITHM,
            model=s.model("model.path", default="Qwen/Qwen3-0.6B"),
            samples=read["samples_of_update"],
            limit=longest,
        ),
        "layout": layout_of(s, read, "actor", read["actor.gpus"], prefix="", **given),
        "workload.packing": s.flag(UNPADS, RENAMED, default=True) or capacity is not None,
        "full": s.flag(DUMMY),
        "workload.train_precision": "fp8" if megatron and s.find("megatron_config.fp8") else "bf16",
    }


TABLE = Table(
    lambda: rows_of(
        "skyrl",
        {"BATCH": BATCH, "LONGEST": LONGEST, "MICRO_BATCH": MICRO_BATCH, "engine": engine("actor", "")},
        "given_keys",
    ),
    _rest,
    follows={"shared": lambda s, read: True},
)


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Batches that SkyRL refuses (`_validate_batch_parallelism` of skyrl/train/sft_trainer.py), and packs."""
    if run.layout.pack_tokens is not None:
        yield from _bins(run)
        return
    ranks, micro = run.gpus // (run.layout.tp * run.layout.pp), run.layout.micro_batch
    if run.prompts % (ranks * micro):
        each = run.prompts // ranks
        yield refused(
            f"a batch of {run.prompts:,} samples is no multiple of micro-batches of {micro} on {ranks} "
            "ranks: SkyRL refuses it",
            BATCH,
            MICRO_BATCH,
            remedy=f"{MICRO_BATCH}={gcd(each, micro)}"
            if each and run.prompts % ranks == 0
            else f"{BATCH}={-(-run.prompts // (ranks * micro)) * ranks * micro}",
        )


def _bins(run: RunDescription) -> Iterator[Finding]:
    capacity, longest = (run.layout.pack_tokens or 0) * run.layout.cp, run.max_response or 0
    if capacity < longest:
        yield refused(
            f"bins of {capacity:,} tokens below the longest sample, {longest:,}: SkyRL refuses them",
            CAPACITY,
            LONGEST,
            remedy=f"{CAPACITY}={longest}",
        )
    if run.prompts < run.layout.dp:
        yield refused(
            f"{run.prompts:,} samples for {run.layout.dp} data-parallel ranks: SkyRL refuses a rank "
            "without a bin",
            BATCH,
            remedy=f"{BATCH}={run.layout.dp}",
        )
