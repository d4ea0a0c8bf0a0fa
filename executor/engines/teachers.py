"""Several teachers in the place of one reference: each scores its own samples, one model after the other.

A row of the data says in its column `teacher` whose it is (0, 1, ...), as verl's `data_source` does (pull
request 6051 of verl); without the column prompts take turns, so that all have as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from executor.engines.protocols import ScoringEngine
from executor.samples import Floats, Sample
from rlhfsim.errors import RlhfsimError

COLUMN = "teacher"


def teacher_of(sample: Sample, count: int) -> int:
    """Number of the teacher that scores a sample.

    Raises:
        RlhfsimError: its row names none of them.
    """
    given = (sample.meta or {}).get(COLUMN)
    number = sample.group % count if given is None else int(given) if str(given).isdecimal() else -1
    if not 0 <= number < count:
        raise RlhfsimError(
            "unknown-teacher",
            f"the data's column {COLUMN!r} says {given!r} at prompt {sample.group}, "
            f"and there are {count} teachers",
            help=f"count from 0 to {count - 1} in the order of reference_model, or leave the column out",
        )
    return number


class Teachers:
    """The part of a `ScoringEngine` that a reference needs; every rank asks all, for they may be sharded."""

    def __init__(self, engines: Sequence[ScoringEngine]) -> None:
        self._engines = tuple(engines)

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Log-prob of every response token by the sample's own teacher, (R,) a sample."""
        owners = [teacher_of(sample, len(self._engines)) for sample in samples]
        found: dict[int, Floats] = {}
        for number, engine in enumerate(self._engines):
            mine = [i for i, owner in enumerate(owners) if owner == number]
            found |= zip(mine, engine.logprobs([samples[i] for i in mine]), strict=True)
        return [found[i] for i in range(len(samples))]

    def offload(self, folder: Path | None = None, *, weights: bool = True) -> None:
        """All of them, each to a folder of its own."""
        for number, engine in enumerate(self._engines):
            engine.offload(None if folder is None else folder / str(number), weights=weights)

    def reload(self, *, states: bool = True) -> None:
        """Undo `offload`."""
        for engine in self._engines:
            engine.reload(states=states)

    def close(self) -> None:
        """Free everything."""
        for engine in self._engines:
            engine.close()
