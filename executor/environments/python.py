"""A Python tool: the program in a fenced block of a turn is run in the sandbox, its output is the answer.

A turn without a program is the final one. The tool gives no reward: rules judge what the policy wrote.
"""

from __future__ import annotations

import os
from functools import cache

from executor.environments.protocol import Observed
from executor.rewards.rules import FENCE
from executor.rewards.sandbox import CodeRun, Sandbox
from executor.samples import Task


@cache
def _sandbox() -> Sandbox:
    """Of this process, for all conversations."""
    return Sandbox(len(os.sched_getaffinity(0)))


class PythonTool:
    """Runs programs; each starts anew, nothing is kept between turns."""

    def __init__(
        self, wall_s: float = 5.0, memory_bytes: float = 256 * 2**20, characters: float = 2000
    ) -> None:
        """Limits of one program, and how much of its output is shown (the end)."""
        self._wall_s, self._memory_bytes = wall_s, int(memory_bytes)
        self._characters = int(characters)

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
