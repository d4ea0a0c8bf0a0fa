"""One probe in a process of its own: `python -m executor.microbench.child TASK.json`.

The answer is a file next to the task. The process dies with its parent, so that nothing keeps measuring when
that is killed.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
MACHINE = "machine"
"""The task that describes the machine."""


def main(task_file: Path) -> None:
    """Run the task and write `answer.json`: what was measured, or why not."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    task: dict[str, Any] = json.loads(task_file.read_text())
    answer = _answer(task, task_file.parent)
    part = task_file.with_name("answer.part")
    part.write_text(json.dumps(answer))
    os.replace(part, task_file.with_name("answer.json"))


def _answer(task: dict[str, Any], folder: Path) -> dict[str, Any]:
    import torch

    from executor.microbench.setup import Device, ProbeSetup
    from rlhfsim.errors import RlhfsimError

    torch.set_num_threads(1)
    if task["probe"] == MACHINE:
        from executor.microbench.machine import describe

        return {"machine": asdict(describe())}
    scratch = folder / "scratch"
    scratch.mkdir()
    device: Device = "cuda" if torch.accelerator.is_available() else "cpu"
    setup = ProbeSetup(
        device=device, scratch=scratch, quick=task["quick"], part=task["part"], spawned=task["spawned"]
    )
    module = importlib.import_module(task["module"])
    try:
        return {"measured": [asdict(point) for point in module.measure(setup)]}
    except RlhfsimError as error:
        return {"missing": error.message}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
