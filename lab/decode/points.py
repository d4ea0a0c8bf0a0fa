"""Measured serving points of the pinned development package aiconfigurator_core: read, corrected, split.

The file `systems/silicon_sample.csv` (5,221 rows in 0.12.0) holds time per output token (TPOT) of
vLLM, SGLang and TensorRT-LLM under fixed concurrency. It is not shipped with rlhfsim: where the
package is not installed, there are no rows.
"""

from __future__ import annotations

import csv
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rlhfsim.rollout.decode import Engine
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.units import MILLISECOND

PACKAGE = "aiconfigurator_core"
FILE = "silicon_sample.csv"
ENGINES: tuple[Engine, ...] = ("vllm", "sglang", "trtllm")
NODE_GPUS = 8
"""GPUs of every machine whose rows the dumps double-count."""
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")
_WEIGHTS = {"fp8": "fp8", "fp8_block": "fp8", "bf16": "bf16", "bfloat16": "bf16", "nvfp4": "nvfp4"}
FOUR_BIT = ("nvfp4", "mxfp4")
_MXFP4 = "openai/gpt-oss"
"""Ships in MXFP4, whatever the columns say."""
_LATER = ("qwen/qwen3.5", "zhipuai/glm-5", "deepseek-ai/deepseek-v3.2")
"""Gated delta net and sparse attention (DSA): priced since the fit, so in no fit."""
PROFILES = {
    "h100_sxm": "h100_sxm",
    "h200_sxm": "h200_sxm",
    "b200_sxm": "b200_sxm",
    "b300_sxm": "b300_sxm",
    "gb200": "gb200_nvl72",
    "gb300": "gb300_nvl72",
}
"""System name of the file to hardware profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """One measured point of aggregated serving, layout columns as corrected by `corrected`."""

    id: str
    line: int
    engine: Engine
    version: str
    model: str
    system: str
    isl: int
    """Input tokens per request."""
    osl: int
    """Output tokens per request."""
    batch: float
    """Requests in flight per attention-DP rank."""
    tp: int
    attention_dp: int
    moe_tp: int
    ep: int
    gemm: str
    """Quantisation column of the linear layers, blank where the file has none."""
    experts: str
    """Quantisation column of the experts."""
    precision: str
    """Precision column."""
    family: str
    """`inferencemax` (public dumps with a range of lengths) or `sweep` (fixed lengths)."""
    tpot: float
    """Measured time per output token, s."""
    ttft: float
    """Measured time to first token, s."""
    notes: tuple[str, ...] = ()
    """What was corrected."""

    @property
    def fitted(self) -> bool:
        """Even hash of model and system: the row may be used to fit; odd ones are reported, and what is priced
        only since the fit (4 bit, `_LATER`)."""
        if self.later:
            return False
        key = f"{self.model}|{self.system}".encode()
        return int(hashlib.md5(key, usedforsecurity=False).hexdigest(), 16) % 2 == 0

    @property
    def later(self) -> bool:
        """Whether the format or the layers of the model were not priced when the coefficients were fitted."""
        return self.weights() in FOUR_BIT or self.model.lower().startswith(_LATER)

    @property
    def gpus(self) -> int:
        """GPUs of the replica."""
        return self.tp * self.attention_dp

    def weights(self) -> str | None:
        """Precision of the weights as `specs` names it; None where rlhfsim has no kernel for it.

        Rows without precision columns name BF16 checkpoints.
        """
        if self.model.lower().startswith(_MXFP4):
            return "mxfp4"
        return _WEIGHTS.get(self.gemm or self.precision or "bf16")

    def layout(self, *, kv_precision: str) -> RolloutLayout:
        """The layout of the replica."""
        weights = self.weights()
        assert weights in ("bf16", "fp8", *FOUR_BIT)
        return RolloutLayout(
            tp=self.tp,
            attention_dp=self.attention_dp,
            ep=self.ep,
            precision=weights,  # type: ignore[arg-type]
            kv_precision=kv_precision,  # type: ignore[arg-type]
            max_num_seqs=max(1, round(self.batch)),
        )


def installed() -> str | None:
    """Version of the development package, or None."""
    try:
        return version("aiconfigurator-core")
    except PackageNotFoundError:
        return None


def table() -> Path | None:
    """The CSV inside the installed package, found without importing it."""
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(next(iter(found.submodule_search_locations))) / "systems" / FILE
    return path if path.is_file() else None


@cache
def servings() -> tuple[Serving, ...]:
    """All rows of aggregated serving; () where the package is not installed."""
    path = table()
    if path is None:
        return ()
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return tuple(_serving(row, i + 2) for i, row in enumerate(rows) if row["mode"] == "agg")


def _whole(cell: str, default: int = 1) -> int:
    return max(1, int(float(cell))) if cell else default


def _serving(row: dict[str, str], line: int) -> Serving:
    engine = row["backend"]
    assert engine in ENGINES, engine
    tp, dp, moe_tp, ep, notes = corrected(
        _whole(row["tp_size"]),
        _whole(row["attention_dp_size"]),
        _whole(row["moe_tp_size"]),
        _whole(row["moe_ep_size"]),
    )
    batch = float(row["batch_size"])
    found = _CONCURRENCY.search(row["silicon_data_source"])
    if notes and found:
        batch = max(1.0, float(found[1]) / dp)
    sweep = "gap-analysis" in row["silicon_data_source"]
    return Serving(
        id=row["id"],
        line=line,
        engine=engine,
        version=row["backend_version"],
        model=row["model_path"],
        system=row["system"],
        isl=int(row["isl"]),
        osl=int(row["osl"]),
        batch=batch,
        tp=tp,
        attention_dp=dp,
        moe_tp=moe_tp,
        ep=ep,
        gemm=row["gemm_quant_mode"],
        experts=row["moe_quant_mode"],
        precision=row["precision"],
        family="sweep" if sweep else "inferencemax",
        tpot=float(row["silicon_tpot_ms"]) * MILLISECOND,
        ttft=float(row["silicon_ttft_ms"]) * MILLISECOND,
        notes=notes,
    )


def corrected(tp: int, dp: int, moe_tp: int, ep: int) -> tuple[int, int, int, int, tuple[str, ...]]:
    """Layout columns with the file's double counting undone.

    Two of its dumps multiply TP by EP: the same measurement (equal TTFT and TPOT) stands in the
    dump of 2026-03-25 as tp 8, ep 8 and in that of 2026-04-06 as tp 64, moe_tp 8, ep 8; DP
    attention likewise as dp 8 and dp 64. vLLM rows with tp t, dp t, ep t^2 agree within the noise
    of a rerun with rows tp t, dp 1, ep t.
    """
    if moe_tp == ep and tp * dp == moe_tp * ep > NODE_GPUS:
        n = ep
        return (
            (n, 1, 1, n, (f"tp {tp} read as {n}",))
            if dp == 1
            else (1, n, 1, n, (f"attention_dp {dp} read as {n}",))
        )
    if tp == dp and tp > 1 and ep == tp * dp:
        return tp, 1, 1, tp, (f"tp {tp} x attention_dp {dp} read as tp {tp}, ep {tp}",)
    return tp, dp, moe_tp, ep, ()


def skip_reason(row: Serving) -> str | None:
    """Why a row is not predicted, or None."""
    if row.weights() is None:
        return f"{row.gemm or row.precision} weights: no kernel curves for this format"
    if row.experts and row.experts not in _WEIGHTS:
        return f"{row.experts} experts: no kernel curves for this format"
    if row.gpus > 64:
        return f"tp {row.tp} divides no head count: not a layout of one replica"
    return None
