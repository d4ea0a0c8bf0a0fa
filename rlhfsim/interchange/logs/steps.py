"""Steps of a run as they come in: parts put together, the newest kept, a run that begins again told apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlhfsim.interchange.logs.records import Log, Record, same

KEPT = 1000
"""Records that are kept: what a run did before them says little of how it goes on."""


class Steps:
    """The newest steps of a run."""

    def __init__(self, timed: Callable[[Mapping[str, float]], bool]) -> None:
        """`timed`: whether metrics have the time of a step."""
        self._timed = timed
        self._values: dict[int, dict[str, float]] = {}
        self._newest, self._grown = 0, False
        self.restarts: list[int] = []
        """Steps from which the run was run again."""
        self.has_times = False

    def add(self, record: Record) -> None:
        """A part of a step. One that says something else of a step than before belongs to another run."""
        known = self._values.get(record.step)
        changed = known is not None and any(
            not same(known[name], value) for name, value in record.values.items() if name in known
        )
        timed = self._timed(record.values)
        if changed or (known is None and timed and record.step < self._newest):
            self._values = {step: v for step, v in self._values.items() if step < record.step}
            self.restarts.append(record.step)
            self._newest = record.step
        self._newest = max(self._newest, record.step)
        self._values.setdefault(record.step, {}).update(record.values)
        self._grown, self.has_times = True, self.has_times or timed
        if len(self._values) > KEPT:
            del self._values[min(self._values)]

    def settled(self) -> bool:
        """Whether nothing came since this was asked last: then the newest step is whole as well."""
        grown, self._grown = self._grown, False
        return not grown

    def whole(self, *, all_of_them: bool) -> Log:
        """Whole steps in order; the newest one may still grow and counts with `all_of_them`."""
        steps = sorted(self._values)
        records = (Record(step=step, values=dict(self._values[step])) for step in steps)
        return Log(records=tuple(records)[: None if all_of_them else -1])
