"""What AIConfigurator predicts for offline throughput that neither of us was fitted to: run once, committed as facts.

    python -m lab.fits.throughput_peer

Asks the SDK inside the pinned development package for the most tokens per second that it finds
(`find_best_agg_result_under_constraints`, no limit of latency, at most as many sequences as the engine runs) of every
row of TensorRT-LLM in `inference.csv`, with the layout that `rlhfsim.validation.kinds.inference` reads.
"""

from __future__ import annotations

import csv
import logging
import warnings
from importlib import import_module

from lab.decode.throughput_peer import OUTPUT
from lab.fits.decode_peer import SDK, parts_of
from lab.scoreboard.rows import rows_of
from rlhfsim.validation import assumptions
from rlhfsim.validation.kinds.inference import MOST, ServingJob, job_of, skip_reason

NAMES = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Meta-Llama-3.1-405B",
    "llama-4-scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
}
SYSTEMS = {"gb200_nvl72": "gb200"}
FORMATS = {"bf16": "bfloat16", "fp8": "fp8", "nvfp4": "nvfp4"}
PUBLISHER, WITHOUT_LIMIT_MS = "NVIDIA/TensorRT-LLM", 1e9


def main() -> None:
    """Write the predictions of all rows of the publication."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    with OUTPUT.open("w", newline="", encoding="ascii") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["file", "line", "output_tok_s_total"])
        for row in (assumptions.apply("inference", row)[0] for row in rows_of("inference")):
            if row.source.startswith(PUBLISHER) and skip_reason(row) is None:
                value = asked(row.text("model_config_key") or "", job_of(row))
                writer.writerow([row.file, row.line, "" if value is None else f"{value:.1f}"])


def asked(name: str, job: ServingJob) -> float | None:
    """The SDK's tokens per second of the replica, None where it has no tables or no room for the row."""
    layout = job.layout
    moe = job.model.moe is not None
    cut = (layout.tp, 1, layout.attention_dp, layout.gpus // layout.ep if moe else 1, layout.ep if moe else 1)
    product, cache = FORMATS[layout.precision], FORMATS[layout.kv_precision]
    formats = (product, cache, cache, product if moe else None, None)
    system = SYSTEMS.get(job.device.profile.name, job.device.profile.name)
    try:
        model, tables, backend = parts_of(NAMES[name], "trtllm", system, cut, formats)
        request = import_module(f"{SDK}.config").RuntimeConfig(
            isl=int(job.isl), osl=int(job.osl), ttft=WITHOUT_LIMIT_MS, tpot=WITHOUT_LIMIT_MS
        )
        found = backend.find_best_agg_result_under_constraints(
            model=model, database=tables, runtime_config=request, top_k=1, max_batch_size=MOST
        ).get_summary_df()
    except Exception as error:  # the SDK raises many kinds
        logging.debug("%s: %s", name, error)
        return None
    return float(found["seq/s"].iloc[0]) * job.osl if len(found) else None


if __name__ == "__main__":
    main()
