"""Programs on the rehearsal device, as the tests of this folder run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import device

HERE = Path(__file__).parent


def environment(*, start: bool = False, **variables: str) -> dict[str, str]:
    """Of a program: the repository and the tests of the executor; `start`: Python itself finds the device."""
    path = [os.environ.get("PYTHONPATH", ""), str(HERE.parents[1]), str(HERE.parent / "executor")]
    path = [str(HERE / "start"), *path] if start else path
    found = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"} | variables
    found.pop("DS_ACCELERATOR", None)
    return found


def run(folder: Path, *programs: list[str], **variables: str) -> None:
    """Programs on the device, at once; what a failed one printed."""
    running = []
    for words in programs:
        log = folder / f"{'-'.join(words[:3]).replace('/', '-')}.log"
        command = [sys.executable, str(HERE / "device.py"), *words]
        process = subprocess.Popen(
            command, env=environment(**variables), stdout=log.open("w"), stderr=subprocess.STDOUT
        )
        running.append((process, log))
    for process, log in running:
        assert process.wait(1200) == 0, log.read_text()[-3000:]


def run_launches(folder: Path, gpus: int, *cases: str) -> None:
    """launches.py, whose workers find the device by themselves."""
    device.build()  # once, not by every worker
    words = [str(HERE / "launches.py"), str(folder), str(gpus), *cases]
    own = environment()
    ran = subprocess.run(
        [sys.executable, *words], env=own, capture_output=True, text=True, timeout=9000, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def run_started(*words: str, **variables: str) -> None:
    """A program whose processes all find the device when Python starts."""
    ran = subprocess.run(
        [sys.executable, *words],
        env=environment(start=True, **variables),
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
