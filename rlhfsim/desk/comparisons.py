"""Tables of candidates, searched while the page is open: what `rlhfsim choose` is asked, and what is known
about its answer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection
from typing import NamedTuple

from rlhfsim.desk.state import Question
from rlhfsim.desk.tasks import PageTask
from rlhfsim.frozen import frozen
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import Requirement
from rlhfsim.what_if.choose import ClusterOption, choose
from rlhfsim.what_if.risk.odds import Targets
from rlhfsim.what_if.scenarios.workers import local


class Candidates(NamedTuple):
    """What `rlhfsim choose` is asked."""

    asked: tuple[Request, ...]
    targets: tuple[Requirement, ...]
    steps: int | None
    confidence: float


ReadCandidates = Callable[[str], Candidates]
"""From a query to the candidates; importable, since another process calls it."""


@frozen
class DeskComparison(PageTask):
    """A table, as far as it is known."""

    question: Question
    """Options of `rlhfsim choose`."""
    done: int = 0
    total: int = 0
    """Candidates that are designed, and all."""
    targets: tuple[Requirement, ...] = ()
    steps: int | None = None
    options: tuple[ClusterOption, ...] = ()
    """Once all are designed."""

    @property
    def complete(self) -> bool:
        """Whether all candidates are designed."""
        return bool(self.options)


def compare(read: ReadCandidates, question: str, pipe: Connection) -> None:
    """Send the fields of a `DeskComparison` as they become known."""
    asked, done = read(question), count(1)
    pipe.send({"total": len(asked.asked), "targets": asked.targets, "steps": asked.steps})
    targets = Targets(requirements=asked.targets, steps=asked.steps, confidence=asked.confidence)
    options = choose(asked.asked, targets, local(), progress=lambda: pipe.send({"done": next(done)}))
    pipe.send({"options": options})
