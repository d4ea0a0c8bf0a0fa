"""Plans of every framework's space, exported and read back through the doctor: python -m lab.read_back --plans 15

Of each framework: plans that are the same in all fields, those whose step is within 1 %, how far the others are off
for what the export names, and fields that nothing names (exit code 1, as for a plan that is the same and is not).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from rlhfsim.interchange.export import export, exporters
from rlhfsim.plan import Plan
from tests.frameworks.test_round_trip import differences
from tests.what_if.test_doctor_of_exports import doctored, plans

WITHIN = 0.01
"""Difference of the step, as a share."""
FIRST_SEED = 5000


@dataclass(slots=True)
class Tally:
    """Plans of one framework that were read back."""

    framework: str
    plans: int = 0
    same: int = 0
    """The same in all fields."""
    within: int = 0
    """Step within `WITHIN`, whatever differs."""
    apart: list[float] = field(default_factory=list)
    """(read / planned - 1) of the step, of the others."""
    named: Counter[str] = field(default_factory=Counter)
    """What their exports say that no key holds."""
    unnamed: Counter[str] = field(default_factory=Counter)
    """Fields that differ and that no export names, and steps that differ without any."""

    def add(self, plan: Plan, folder: Path) -> None:
        """Export a plan into a new folder and read it back."""
        _, found, _ = doctored(plan, self.framework, folder)
        off = found.step_s / plan.prediction.step_s - 1
        unsaid = export(plan, self.framework, frozenset()).written.unsaid
        of = {path for each in unsaid for path in each.of}
        specs = found.described.specs
        lines = [line.split(": ")[0] for line in differences(plan, specs.workload, specs.placement)]
        self.plans += 1
        self.within += abs(off) <= WITHIN
        self.unnamed.update(x for x in lines if x not in of)
        if lines:
            self.named.update(each.what for each in unsaid if each.of)
            self.apart += [off] if abs(off) > WITHIN else []
        else:
            self.same += 1
            self.unnamed.update(["the step"] if abs(off) > WITHIN else [])

    @property
    def line(self) -> str:
        """One line."""
        worst = max(map(abs, self.apart), default=0.0)
        line = f"{self.framework:9}{self.plans:4} plans, {self.same:4} the same, {self.within:4} within 1 %"
        return (
            f"{line}, {len(self.apart):3} named and off by up to {worst:.0%}, unnamed: {dict(self.unnamed)}"
        )


def tally(name: str, count: int) -> Tally:
    """`count` plans of a framework."""
    found = Tally(name)
    with TemporaryDirectory() as folder:
        for i, plan in enumerate(plans(name, count, first_seed=FIRST_SEED)):
            found.add(plan, Path(folder) / str(i))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tallies; 1 where something is unnamed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("frameworks", nargs="*", default=exporters())
    parser.add_argument("--plans", type=int, default=15, help="of each framework")
    asked = parser.parse_args(arguments)
    found = [tally(name, asked.plans) for name in asked.frameworks]
    for each in found:
        print(each.line)
        for what, count in each.named.most_common():
            print(f"    {count:3} x {what}")
    whole, same, within = (sum(getattr(x, name) for x in found) for name in ("plans", "same", "within"))
    print(f"{whole} plans: {same} the same in all fields, {within} with a step within 1 %")
    return int(any(each.unnamed for each in found))


if __name__ == "__main__":
    sys.exit(main())
