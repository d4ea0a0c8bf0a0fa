"""A reward function whose process dies."""

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
