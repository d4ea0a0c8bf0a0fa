"""A Python tool: the program in a fenced block of a turn is run in the sandbox, its output is the answer.

A turn without a program is the final one. The tool gives no reward: rules judge what the policy wrote.
"""

from __future__ import annotations

import atexit
import os
import threading
from functools import cache

from executor.environments.protocol import Observed, between
from executor.rewards.rules import FENCE
from executor.rewards.sandbox import CodeRun, Sandbox
from executor.samples import Task

_CPUS = len(os.sched_getaffinity(0))
_starting = threading.Lock()


@cache
def _started() -> Sandbox:
    sandbox = Sandbox(_CPUS)
    atexit.register(sandbox.close)
    return sandbox


def _sandbox() -> Sandbox:
    """Sandbox of this process, for all conversations; those that begin together wait for one."""
    with _starting:
        return _started()


class PythonTool:
    """Runs programs; each starts anew, nothing is kept between turns."""

    at_once = _CPUS
    """Programs that run: one a worker of the sandbox."""

    def __init__(
        self, wall_s: float = 5.0, memory_bytes: float = 256 * 2**20, characters: float = 2000
    ) -> None:
        """Limits of one program, and how much of its output is shown (the end)."""
        self._wall_s = between("wall_s", wall_s, 0.01, 86_400)
        self._memory_bytes = int(between("memory_bytes", memory_bytes, 2**20, 2**50))
        self._characters = int(between("characters", characters, 1, 1e6))

    def reset(self, task: Task) -> None:
        """The sandbox is up before the first program's time counts."""
        _sandbox()

    def step(self, response: str) -> Observed:
        """Output and error of the program in `response`."""
        programs = FENCE.findall(response)
        if not programs:
            return Observed(done=True)
        program = CodeRun(code=programs[-1], wall_s=self._wall_s, memory_bytes=self._memory_bytes)
        ran = _sandbox().run(program)
        said = ran.output if ran.status == "passed" else f"{ran.output}{ran.error or ran.status}\n"
        return Observed(text=f"\n```output\n{said[-self._characters :].rstrip()}\n```\n")

    def close(self) -> None:
        """Nothing is kept."""
