"""Where a run stands in its data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Position:
    """Which prompts have been trained on: all before `prompts`, and those of `ahead`."""

    prompts: int = 0
    ahead: set[int] = field(default_factory=set)

    def __contains__(self, group: int) -> bool:
        return group < self.prompts or group in self.ahead

    def add(self, groups: Iterable[int]) -> None:
        """These have been trained on."""
        self.ahead |= {group for group in groups if group >= self.prompts}
        while self.prompts in self.ahead:
            self.ahead.remove(self.prompts)
            self.prompts += 1

    def copy(self) -> Position:
        """As it is now."""
        return Position(self.prompts, set(self.ahead))
