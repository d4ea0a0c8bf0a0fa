"""Files of a checkpoint, written from copies in host memory while the next steps run.

A rank copies what is to be written and goes on; one thread of its own writes the copies in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
from torch import Tensor

from rlhfsim.specs.placement.engine_numbers import CHECKPOINT_COPIES


class Background:
    """One rank's writes of one checkpoint."""

    def __init__(self, ranks: int) -> None:
        """`ranks`: how many of this host may copy at once."""
        self._ranks = ranks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[None]] = []

    def fits(self, size: int) -> bool:
        """Whether a copy of so many bytes leaves the other ranks and the run their host memory."""
        available = float(psutil.virtual_memory().available)
        return size <= CHECKPOINT_COPIES * available / self._ranks

    def submit(self, job: Callable[[], None]) -> None:
        """Run it after those before it."""
        self._jobs.append(self._pool.submit(job))

    def written(self) -> bool:
        """Whether all is done; raises what the first job that failed raised."""
        if not all(job.done() for job in self._jobs):
            return False
        self._pool.shutdown(wait=False)
        for job in self._jobs:
            job.result()
        return True


def size_of(state: Any) -> int:
    """Bytes of all tensors of nested mappings and sequences."""
    match state:
        case Tensor():
            return state.nbytes
        case Mapping():
            return sum(size_of(value) for value in state.values())
        case list() | tuple():
            return sum(size_of(value) for value in state)
        case _:
            return 0


def copied(state: Any) -> Any:
    """The same with every tensor a copy on the host, of its own elements alone."""
    match state:
        case Tensor():
            return state.detach().to("cpu", copy=True)
        case Mapping():
            return {key: copied(value) for key, value in state.items()}
        case list():
            return [copied(value) for value in state]
        case tuple():
            return tuple(copied(value) for value in state)
        case _:
            return state
