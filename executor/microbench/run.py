"""All probes, one after the other, each in its own process with a time limit; safe to interrupt.

Children lead process groups of their own: whatever ends this function, an interrupt too, kills the group
that runs and removes the scratch folder. Nothing is written elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Protocol

from executor.microbench.probes import Probe
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.hardware.measured import Machine, Measured, MissingProbe, Session, summarise

MACHINE_LIMIT_S = 120.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
}
"""Environment of the processes, where a CPU computes: one core is one device, as the executor runs."""


class ProbeListener(Protocol):
    """What happens, for a person who waits."""

    def started(self, probe: Probe, number: int, total: int) -> None:
        """A probe begins."""

    def ended(
        self, probe: Probe, found: Sequence[Measured], missing: MissingProbe | None, seconds: float
    ) -> None:
        """It ended, or has no result."""


def measure(probes: Sequence[Probe], listener: ProbeListener, *, quick: bool = False) -> Session:
    """Run the probes; what fails is named and the others go on.

    Raises:
        RlhfsimError: not even the machine could be described.
    """
    measured: list[Measured] = []
    missing: list[MissingProbe] = []
    with _scratch() as folder:
        machine = _machine(Path(folder))
        for number, probe in enumerate(probes, start=1):
            listener.started(probe, number, len(probes))
            begun = time.monotonic()
            new, reason = _probe(probe, Path(folder), quick)
            absent = MissingProbe(probe=probe.name, reason=reason) if reason else None
            measured += new
            missing += [absent] if absent else []
            listener.ended(probe, new, absent, time.monotonic() - begun)
    return Session(machine=machine, measured=tuple(measured), missing=tuple(missing))


def _scratch() -> TemporaryDirectory[str]:
    """A folder on the file system of the working directory: storage is measured where runs write."""
    where = "." if os.access(".", os.W_OK) else gettempdir()
    return TemporaryDirectory(prefix=".rlhfsim-measure-", dir=os.path.realpath(where))


def _machine(folder: Path) -> Machine:
    answer, reason = _child({"probe": "machine"}, folder / "machine", MACHINE_LIMIT_S)
    if answer is None:
        raise RlhfsimError(
            "not-measured",
            f"torch does not start here: {reason}",
            help="see docs/executor.md for the install",
        )
    facts = answer["machine"]
    return Machine(**facts | {"versions": tuple(tuple(pair) for pair in facts["versions"])})


def _probe(probe: Probe, folder: Path, quick: bool) -> tuple[list[Measured], str]:
    """What its processes measured; a reason where one has nothing, and then none of them counts."""
    measured: list[Measured] = []
    parts = probe.quick if quick and probe.quick is not None else probe.parts
    for part in parts:
        task = {"probe": probe.name, "module": f"{probe.package}.{probe.name}", "quick": quick, "part": part}
        answer, reason = _child(task, folder / f"{probe.name}{part}", probe.limit_s)
        if answer is None or "missing" in answer:
            return [], reason if answer is None else answer["missing"]
        measured += [Measured(**point | {"at": tuple(point["at"])}) for point in answer["measured"]]
    return _merged(measured), ""


def _merged(points: Sequence[Measured]) -> list[Measured]:
    """Points that several processes measured once each become one number."""
    by_point: dict[tuple[object, ...], list[Measured]] = {}
    for point in points:
        by_point.setdefault((point.name, point.at), []).append(point)
    return [
        same[0]
        if len(same) == 1
        else replace(
            summarise(same[0].name, [m.value for m in same], same[0].unit, same[0].how), at=same[0].at
        )
        for same in by_point.values()
    ]


def _child(task: dict[str, Any], folder: Path, limit_s: float) -> tuple[dict[str, Any] | None, str]:
    """The answer of one process, or None and why."""
    folder.mkdir()
    file, log = folder / "task.json", folder / "log"
    file.write_text(json.dumps(task | {"spawned": time.monotonic()}))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "executor.microbench.child", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**ENVIRONMENT, **os.environ},
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None, f"not done after {limit_s:g} s"
        finally:
            _kill(process)
    answer = folder / "answer.json"
    if process.returncode == 0 and answer.is_file():
        return json.loads(answer.read_text()), ""
    return None, _last_words(log, process.returncode)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the group, whatever of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path, code: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"its process ended with code {code}" + (f": {lines[-1][:200]}" if lines else "")
