"""Ask random valid questions of every command: `python -m lab.questions --cases 1500 --seed 1`.

Exit code 1 where an answer is a traceback or holds no number, where two commands contradict each other, and where a
question takes more than 60 s of CPU. `--case N` shows one; `--quick` gives large searches 2 s; `--small` is what the tests ask.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from lab.questions.ask import Defect, ask, ask_here
from lab.questions.draw import draw
from lab.questions.draw import small as draw_small


@click.command()
@click.option("--cases", default=1500)
@click.option("--first", default=0, help="The number of the first one.")
@click.option("--seed", default=0)
@click.option("--case", type=int, multiple=True, help="These alone.")
@click.option("--quick", is_flag=True, help="Searches over 64 GPUs end after 2 s.")
@click.option("--small", is_flag=True, help="Up to 12 GPUs, searches of 0.1 s, all in this process.")
def main(cases: int, first: int, seed: int, case: tuple[int, ...], quick: bool, small: bool) -> None:
    """Ask them, and say what is wrong."""
    os.environ |= {"COLUMNS": "100", "TERM": "dumb", "PYTHONHASHSEED": "0"}
    numbers = case or tuple(range(first, first + cases))
    defects: list[Defect] = []
    ended: Counter[str] = Counter()
    slowest: list[tuple[float, int]] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="questions-") as folder:
        for number in numbers:
            question = draw_small(number, seed) if small else draw(number, seed, quick=quick)
            found, cpu_s, outcome = (ask_here if small else ask)(question, Path(folder) / str(number))
            defects += found
            ended[outcome] += 1
            slowest.append((cpu_s, number))
            for defect in found:
                print(
                    f"{defect.kind} in case {number} (exit {outcome}): rlhfsim design {' '.join(question.words)}"
                )
                print(f"    {defect.command}\n    " + defect.what.replace("\n", "\n    "), flush=True)
    total = sum(cpu_s for cpu_s, _ in slowest)
    print("designs ended with: " + ", ".join(f"{code} ({count})" for code, count in ended.most_common()))
    print("slowest: " + ", ".join(f"{cpu_s:.0f} s (case {n})" for cpu_s, n in sorted(slowest)[-5:][::-1]))
    print(
        f"{len(numbers)} questions, seed {seed}: {len(defects)} defects in {len({d.number for d in defects})}, "
        f"{time.perf_counter() - started:.0f} s, {total:.0f} s of CPU"
    )
    sys.exit(1 if defects else 0)


if __name__ == "__main__":
    main()
