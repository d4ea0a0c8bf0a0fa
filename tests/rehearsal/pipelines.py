"""One of four ranks of pipelines on the rehearsal device: `device.py pipelines.py RANK PORT FOLDER CASE,...`.

The cases are those of pipeline_ranks.py, whose reference is plain PyTorch on the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pipeline_ranks as shared
import torch

from executor.engines import training

if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[3])
    torch.set_num_threads(1)
    training.start(rank, shared.WORLD, 0, "127.0.0.1", int(sys.argv[2]), 120.0, gpu=True)
    found: dict[str, Any] = {name: shared.run_case(rank, folder, name) for name in sys.argv[4].split(",")}
    for seen in found.values():
        seen["weights"] = {key: value.cpu() for key, value in seen["weights"].items()}
    torch.save(found, folder / f"found-{rank}.pt")
    training.stop()
