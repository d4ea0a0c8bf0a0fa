"""What AIConfigurator predicts for the reported decode rows: run once, committed as facts.

    python -m lab.fits.decode_peer

Asks the SDK inside the pinned development package (`run_agg` with one prompt of context tokens a
step, the default of its command line) for the time per output token of every row of
`silicon_sample.csv` that no fit has read, with the layout columns as rlhfsim reads them. Where its tables lack the
format a row names, block-scaled FP8 and then a BF16 cache are tried, as its own fall-backs do.
"""

from __future__ import annotations

import csv
import logging
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lab.decode.points import Serving, installed, servings, skip_reason

SDK = "aiconfigurator_core.sdk"
TABLES = {"trtllm": "1.3.0rc20", "sglang": "0.5.14", "vllm": "0.24.0"}
"""Current table version of each engine in 0.12.0 (`systems/query_versions.yaml`)."""
NAMES = {
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
}
"""Checkpoints whose shape the SDK ships under another name."""
OUTPUT = Path(__file__).parents[1] / "decode" / "decode_peer.csv"
ATTEMPTS = ((None, False), ("bfloat16", False), (None, True), ("bfloat16", True))
"""KV-cache format, and whether to ask for block-scaled FP8."""


def main() -> None:
    """Write the predictions of all odd rows."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = [p for p in servings() if skip_reason(p) is None and not p.fitted]
    with OUTPUT.open("w", newline="", encoding="ascii") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "package", "tables", "tpot_ms"])
        for point in rows:
            value = asked(point)
            shown = "" if value is None else f"{value:.4f}"
            writer.writerow([point.id, installed(), TABLES[point.engine], shown])


def asked(point: Serving) -> float | None:
    """The SDK's TPOT in milliseconds, or None where it has no tables for the row."""
    for cache_format, block in ATTEMPTS:
        try:
            return _run(point, cache_format, block)
        except Exception as error:  # the SDK raises many kinds
            logging.debug("%s: %s", point.id, error)
    return None


def _run(point: Serving, cache_format: str | None, block: bool) -> float:
    gemm, experts = ("fp8_block", "fp8_block") if block else (point.gemm, point.experts)
    moe = any(part in point.model for part in ("DeepSeek", "MiniMax", "A22B"))
    layout = (point.tp, 1, point.attention_dp, point.moe_tp if moe else 1, point.ep if moe else 1)
    formats = (gemm or None, cache_format, cache_format, experts or None if moe else None, None)
    name = NAMES.get(point.model, point.model)
    model, tables, backend = parts_of(name, point.engine, point.system, layout, formats)
    runtime = import_module(f"{SDK}.config").RuntimeConfig
    request = runtime(batch_size=int(point.batch), isl=point.isl, osl=point.osl)
    summary = backend.run_agg(model, tables, request, ctx_tokens=point.isl)
    return float(summary.get_result_dict()["tpot"])


@cache
def parts_of(
    name: str, engine: str, system: str, layout: tuple[int, ...], formats: tuple[str | None, ...]
) -> tuple[Any, Any, Any]:
    """The SDK's model, tables and backend."""
    config = import_module(f"{SDK}.config_builders").build_model_config(*layout, *formats)
    model = import_module(f"{SDK}.models").get_model(name, config, engine)
    tables = import_module(f"{SDK}.perf_database").get_database(system, engine, TABLES[engine])
    return model, tables, import_module(f"{SDK}.backends.factory").get_backend(engine)


if __name__ == "__main__":
    main()
