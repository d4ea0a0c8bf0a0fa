"""Records, in whatever process it is imported, each place that runs and the test that it runs for.

Only code that holds a place is followed, instruction by instruction: which arm of a conditional expression ran
cannot be told by lines. A place is written the first time that a process runs it, so that an ended one loses nothing.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from lab.device_branches.places import ROOT, Place, all_places

FOLDER = "RLHFSIM_DEVICE_BRANCHES"
"""Environment variable: the folder of the records."""


class Recorder:
    """The tracing function of one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, list[Place]] = defaultdict(list)
        for place in all_places():
            self._places[str(ROOT / "executor" / place.path)].append(place)
        self._codes: dict[CodeType, dict[int, list[str]]] = {}
        self._written: set[tuple[str, str]] = set()

    def call(self, frame: FrameType, event: str, _: Any) -> Any:
        """Follow a call whose code holds places."""
        code = frame.f_code
        if code.co_filename not in self._places:
            return None
        if code not in self._codes:
            self._codes[code] = _by_offset(code, self._places[code.co_filename])
        if not self._codes[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            for name in self._codes[frame.f_code].get(frame.f_lasti, ()):
                self._write(name, os.environ.get("PYTEST_CURRENT_TEST", "?").partition(" (")[0])
        return self._step

    def _write(self, name: str, test: str) -> None:
        if (name, test) not in self._written:
            self._written.add((name, test))
            with (self._folder / str(os.getpid())).open("a", encoding="utf-8") as file:
                file.write(f"{name}\t{test}\n")


def _by_offset(code: CodeType, places: list[Place]) -> dict[int, list[str]]:
    """Offset of an instruction -> the places that it lies in."""
    found: dict[int, list[str]] = {}
    for instruction in dis.get_instructions(code):
        at = instruction.positions
        if (
            at is None
            or at.lineno is None
            or at.col_offset is None
            or instruction.opname in ("RESUME", "CACHE")
        ):
            continue
        start, end = (at.lineno, at.col_offset), (at.end_lineno or at.lineno, at.end_col_offset or 0)
        if names := [place.name for place in places if place.start <= start and end <= place.end]:
            found[instruction.offset] = names
    return found


def begin() -> None:
    """Record from now on, if the environment says where."""
    if folder := os.environ.get(FOLDER):
        recorder = Recorder(Path(folder))
        threading.settrace(recorder.call)
        sys.settrace(recorder.call)
