"""Reward functions that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def dies_once(prompt: str, response: str, answer: str, meta: Mapping[str, Any]) -> float:
    """1; the first call kills its process, every call does where there is no `mark`."""
    mark = meta["mark"]
    if not mark or not Path(mark).exists():
        if mark:
            Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def often_fails(prompt: str, response: str, answer: str, meta: Mapping[str, Any]) -> float:
    """Raises for half of the responses, but not for right answers."""
    if response != answer and sum(response.encode()) % 2:
        raise ConnectionError("the judge does not answer")
    return len(set(response)) / 8
