"""One rank of test_loading.py: `loading_ranks.py RANK PORT FOLDER` writes FOLDER/RANK.json.

Bytes of host memory that building an engine takes at its peak, and keeps, over what the imports took.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import transformers.models.llama.modeling_llama  # noqa: F401  part of the baseline

from executor.engines import training
from executor.engines.deepspeed import engine as _deepspeed  # noqa: F401  likewise
from executor.engines.pipeline import engine as _pipeline  # noqa: F401  likewise
from executor.engines.protocols import EngineSpec
from executor.engines.transformers import engine as _transformers  # noqa: F401  likewise
from rlhfsim.specs.placement.layout import Layout

RANK, PORT, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
WORLD = 4
LAYOUTS = {
    "zero3": Layout(dp=4, zero=3),
    "tp": Layout(tp=4, zero=1),
    "pp": Layout(pp=4, zero=1),
    "whole": Layout(dp=4, zero=1),
}
"""Engines without optimizer: what they hold is weights alone."""


def peak() -> int:
    """Most resident bytes since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def check(layout: Layout) -> dict[str, Any]:
    precision = "bf16" if layout is LAYOUTS["whole"] else "fp32"
    spec = EngineSpec(role="reference", model=str(FOLDER / "model"), layout=layout, precision=precision)
    dist.barrier()
    forget_peak()
    before = psutil.Process().memory_info().rss
    engine: Any = training.build(spec)
    found = {"peak": peak() - before, "kept": psutil.Process().memory_info().rss - before}
    engine.close()
    return found


def main() -> None:
    torch.set_num_threads(1)
    training.start(RANK, WORLD, 0, "127.0.0.1", PORT, 120.0)
    found = {name: check(layout) for name, layout in LAYOUTS.items()}
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    dist.barrier()
    training.stop()


if __name__ == "__main__":
    main()
