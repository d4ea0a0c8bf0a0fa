"""An environment that answers with what it heard, and fails on request."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from executor.environments.protocol import Observed
from executor.samples import Task


class Echo:
    """Answers with the turn; faults on request."""

    def __init__(self, slow: str = "") -> None:
        self._slow = slow

    async def reset(self, task: Task) -> Any:
        return "another prompt" if task.prompt == "other" else None

    def step(self, response: str) -> Any:
        if response.startswith("sleep"):
            time.sleep(0.3)
        if response.startswith("hang"):
            time.sleep(60)
        if response.startswith("raise"):
            raise KeyError("no such tool")
        if response.startswith("nonsense"):
            return {"text": 1}
        if response.startswith("nan"):
            return Observed(reward=float("nan"))
        if response.startswith("exit"):
            os._exit(3)
        return Observed(text=f"[{response}]", reward=0.25, done=response.startswith("end"))

    async def close(self) -> None: ...


class Counter(Echo):
    """Serves one conversation at a time."""

    at_once = 1
    _serving = threading.Lock()

    def step(self, response: str) -> Any:
        with self._serving:
            time.sleep(0.3)
        return Observed(done=True)
