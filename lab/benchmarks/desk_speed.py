"""How long the desk's answers take: the first plan and the proven one, as its page asks for them.

    python lab/benchmarks/desk_speed.py [--only TEXT]

A page asks one question after the other, as somebody who moves a field does; the process that searches has
answered one before. Limits: 1 s at 64 GPUs, 2 s for the first plan at 1,024.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from process import bind, pace

from rlhfsim.cli.desk import START, asked
from rlhfsim.desk.searches import Searches

PAGE = "benchmark"
QUESTIONS = (
    (START.replace("gpus=64", "gpus=56"), None),
    (START, 1.0),
    (START.replace("grpo", "ppo").replace("samples=8", "samples=1"), 1.0),
    (START.replace("gpus=64", "gpus=32"), 1.0),
    ("gpus=64&model=32b&algorithm=grpo&prompts=256&samples=8", 1.0),
    ("gpus=64&model=30b-a3b&algorithm=grpo&prompts=256&samples=8", 1.0),
    ("gpus=1024&model=405b&algorithm=grpo", 2.0),
    ("gpus=1024&model=671b&algorithm=grpo", 2.0),
    ("gpus=1024&model=qwen3-235b&algorithm=grpo", 2.0),
)
"""Queries as the page's address has them, and seconds within which an answer is wanted; the first warms up."""
MOST_S = 120.0


def main() -> None:
    """Print what each question took."""
    parser = argparse.ArgumentParser(description="Speed of the desk")
    parser.add_argument("--only", default="", help="questions with this text in their query")
    only, cores = parser.parse_args().only, bind()
    print(f"{cores} cores; {pace()}")
    print(f"{'first':>7}{'proven':>8}{'limit':>7}  question")
    searches = Searches(partial(asked, files=True))
    try:
        for question, limit in (each for each in QUESTIONS if only in each[0]):
            first, proven = times(searches, question)
            print(
                f"{first:>6.2f}s{proven:>7.2f}s{f'{limit:.0f} s' if limit else '':>7}  {question}", flush=True
            )
    finally:
        searches.close()


def times(searches: Searches, question: str) -> tuple[float, float]:
    """Seconds from the question to its first plan, and to the proven one."""
    begin = time.perf_counter()
    searches.ask(PAGE, (question,))
    first = 0.0
    while time.perf_counter() - begin < MOST_S:
        answer = searches.answer(question, wait_s=MOST_S)
        now = time.perf_counter() - begin
        if answer is None or answer.stage in ("failed", "died"):
            raise SystemExit(f"{question}: {answer and answer.missing}")
        first = first or now
        if answer.stage != "first":
            return first, now
        time.sleep(0.005)
    raise SystemExit(f"{question}: no proof within {MOST_S:.0f} s")


if __name__ == "__main__":
    main()
