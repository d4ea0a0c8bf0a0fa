"""A replay buffer: groups that teach nothing give their place to others. `custom: {filter: "replay:Replay"}`.

A group whose rewards are all equal has no advantage. In its place goes one of the last `capacity` groups with
rewards that differ, each at most `times` times; it keeps the log-probs that it was sampled with, so that the
ratio weighs it as off-policy.
"""

from __future__ import annotations

import json
from pathlib import Path

from executor.sample_files import read_samples, write_samples
from executor.samples import Sample


class Replay:
    """Remembers groups; what it remembers is part of every checkpoint."""

    seconds_per_sample = 2e-6

    def __init__(self, capacity: int = 64, times: int = 2) -> None:
        self.capacity, self.times = capacity, times
        self.kept: dict[int, list[Sample]] = {}
        self.used: dict[int, int] = {}

    def __call__(self, samples: list[Sample]) -> list[Sample]:
        """As many samples, whole groups."""
        fresh: dict[int, list[Sample]] = {}
        for sample in samples:
            fresh.setdefault(sample.group, []).append(sample)
        chosen = []
        for group in fresh.values():
            old = next((g for g in reversed(self.kept) if self.used[g] < self.times and g not in fresh), None)
            if len({s.reward for s in group}) == 1 and old is not None:
                group, self.used[old] = self.kept.pop(old), self.used[old] + 1
                if self.used[old] < self.times:
                    self.kept = {old: group} | self.kept  # to the end of the line
            chosen += group
        for number, group in fresh.items():
            if len({s.reward for s in group}) > 1:
                self.kept[number], self.used[number] = group, 0
        self.kept = dict(list(self.kept.items())[-self.capacity :])
        return chosen

    def save(self, folder: Path) -> None:
        """Into a checkpoint."""
        write_samples(folder / "kept.npz", [s for group in self.kept.values() for s in group])
        (folder / "used.json").write_text(json.dumps([[g, self.used[g]] for g in self.kept]))

    def load(self, folder: Path) -> None:
        """Undo `save`."""
        self.used = dict(json.loads((folder / "used.json").read_text()))
        self.kept = {group: [] for group in self.used}
        for sample in read_samples(folder / "kept.npz"):
            self.kept[sample.group].append(sample)
