"""The published measurements: rows of the tables in `lab/scoreboard/data`, and those that fitted a constant."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from rlhfsim.specs.model.presets import preset, preset_name
from rlhfsim.validation.rows import Row, parse_csv

DATA = Path(__file__).parent / "data"
Part = Literal["report", "fit"]
FIT_SHARE = 4
"""One in so many (publication, model) pairs of training rows is used to fit constants and is never scored."""
FIT_SOURCE = "llm-d-incubation/llm-d-planner"
"""Its activation peaks decided `sampler_bytes_per_logit`: KV figures that follow are not scored."""
NEVER_FITTED = ("training_moe.csv", "training_mlperf51.csv")
"""Training rows that came after the fits and are scored whole, but for `FIT_EFA`."""
FIT_EFA = ("training_moe.csv", 2)
"""The row that gave `efa_all_to_all_efficiency`."""
FIT_FILE = "rlhf_nemo_rl_v03.csv"
"""Its rows fitted `lab.fits.rlhf.NAMES` and are never scored."""
FIT_LOGS = "eric-haibin-lin/verl-data@math/"
"""Logs that fitted `lab.fits.verl.NAMES` and are never scored."""
FITTED = {
    "update_weights_from_distributed per tensor": "sync_load_latency",
    "vLLM native weight transfer (NCCL)": "sync_start_latency",
    "bucketed IPC + fp8 quantisation": "sync_quantise_latency",
    "hybrid engine reshard, mbridge": "sync_far_latency",
}
"""Mechanisms of the rows that a coefficient of weight sync was taken from."""
STAGED = "offload off"
"""In the training layout of verl's broadcasts that gave `sync_staging_time`."""


def rows_of(table: str) -> list[Row]:
    """The rows of a published table: `<table>.csv`, then every `<table>_<what>.csv`."""
    more = sorted(path for path in DATA.glob(f"{table}_*.csv"))
    return [row for path in (DATA / f"{table}.csv", *more) for row in parse_csv(path.read_bytes(), path.name)]


def part_of(kind: str, row: Row) -> Part:
    """`fit` for a row that decided a constant of its kind, `report` for the others."""
    if kind == "training":
        fitted = _of_training(row)
    elif kind.startswith("rlhf."):
        fitted = row.file == FIT_FILE or row.source.startswith(FIT_LOGS)
    elif kind == "memory.kv_tokens":
        fitted = row.source.startswith(FIT_SOURCE)
    else:
        fitted = kind.startswith("weight_sync") and _of_weight_sync(row)
    return "fit" if fitted else "report"


def _of_training(row: Row) -> bool:
    """Whether the MD5 of a (publisher, model) pair says so.

    The pair decides, not the row: variants of one experiment stay together, over all pages of one
    repository. Models with layers whose kernels nobody timed (`Recurrent`) are in no fit: what is wrong with
    our estimate of a scan is not to be found in the speed of a matrix product.
    """
    if row.file in NEVER_FITTED:
        return (row.file, row.line) == FIT_EFA
    known = preset_name(row.text("model_config_key") or row.text("model") or "")
    if known and preset(known).recurrent:
        return False
    key = f"{row.source.split('@')[0]}|{row.text('model_config_key') or row.text('model')}"
    return int(hashlib.md5(key.encode()).hexdigest(), 16) % FIT_SHARE == 0


def _of_weight_sync(row: Row) -> bool:
    mechanism = row.text("mechanism") or ""
    staged = mechanism == "NCCL full broadcast" and STAGED in (row.text("train_parallel") or "")
    return mechanism in FITTED or staged
