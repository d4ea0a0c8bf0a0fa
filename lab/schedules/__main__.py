"""`python -m lab.schedules --seed 0 --count 1000`: schedules of faults, and which of them did not hold."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter

from lab.schedules.schedule import ASYNCHRONOUS, CASES, schedule


def main() -> int:
    """0: every schedule ended exact, its refusals with reasons; 1: one did not, by its seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others follow")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--asynchronous", action="store_true", help="plans whose rollout goes on meanwhile")
    given = parser.parse_args()
    cases = tuple(ASYNCHRONOUS) if given.asynchronous else CASES
    logging.disable(logging.CRITICAL)
    endings, faults, wrong = Counter[str](), Counter[str](), 0
    for seed in range(given.seed, given.seed + given.count):
        outcome = schedule(seed, cases)
        for ending in outcome.endings:
            endings[f"{ending.how} {ending.code}".strip()] += 1
            faults.update(ending.happened)
        if outcome.wrong:
            wrong += 1
            print(f"seed {seed} ({outcome.case}): {outcome.wrong}")
            for ending in outcome.endings:
                print(f"    {ending.how} {ending.code} {' '.join(ending.happened)}")
    print(
        f"{given.count - wrong} of {given.count} schedules ended exact, {sum(endings.values())} submissions"
    )
    print("submissions:", ", ".join(f"{n} {how}" for how, n in endings.most_common()))
    print("faults:", ", ".join(f"{n} {kind}" for kind, n in faults.most_common()))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
