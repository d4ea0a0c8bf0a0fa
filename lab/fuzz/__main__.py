"""Run cases in a child process, so that a crash of the interpreter is a defect like others; group the defects."""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import psutil

from lab.fuzz.execute import CPU_LIMIT_S, DEEP_LIMIT_S, Defect, crashed, guarded, prepare, run
from lab.fuzz.seeds import Subject, subjects

MEMORY_BYTES = 6 * 2**30
"""A case may not take more, beside what this process has mapped already."""
STUCK_S = 120.0
"""A case that the alarm does not end is killed."""


def fuzz(numbers: Sequence[int], seed: int, only: str = "", *, deep: bool = False) -> list[Defect]:
    """The defects of these cases."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        scratch = Path(folder)
        valid = tuple(s for s in subjects(scratch) if only in s.name)
        defects: list[Defect] = []
        left = list(numbers)
        while left:
            done, found = _in_child(left, seed, valid, scratch, deep)
            defects += found
            left = left[done:]
        return defects


def _in_child(
    numbers: Sequence[int], seed: int, valid: Sequence[Subject], scratch: Path, deep: bool
) -> tuple[int, list[Defect]]:
    """How many cases a child got through, with a crash counted, and their defects."""
    log = scratch / "progress"
    log.write_bytes(b"")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            _cases(numbers, seed, valid, scratch, log, deep)
        except BaseException:
            traceback.print_exc()
        os._exit(0)  # what is missing in the log says where it ended
    _, status = os.waitpid(child, 0)
    done, found = _progress(log)
    if len(done) == len(numbers):
        return len(done), found
    number = numbers[len(done)]
    case, _ = prepare(valid, number, seed, scratch)
    name = f"{case.name}: {' '.join(case.command)[:160]!r}"
    return len(done) + 1, [*found, crashed(number, name, status)]


def _progress(log: Path) -> tuple[list[int], list[Defect]]:
    done, found = [], []
    with log.open("rb") as file:
        while True:
            try:
                number, defect = pickle.load(file)  # our own child's words
            except EOFError:
                return done, found
            done.append(number)
            if defect is not None:
                found.append(defect)


def _cases(
    numbers: Iterable[int], seed: int, valid: Sequence[Subject], scratch: Path, log: Path, deep: bool
) -> None:
    limit = MEMORY_BYTES + psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with log.open("ab") as file, guarded(scratch, deep=deep):
        for number in numbers:
            faulthandler.dump_traceback_later(
                STUCK_S * (DEEP_LIMIT_S / CPU_LIMIT_S if deep else 1), exit=True
            )
            case, _ = prepare(valid, number, seed, scratch)
            defect = run(case, number, DEEP_LIMIT_S if deep else CPU_LIMIT_S)
            pickle.dump((number, defect), file)
            file.flush()


def grouped(defects: Iterable[Defect]) -> str:
    """Defects by kind and place, the most frequent first."""
    places: defaultdict[tuple[str, str], list[Defect]] = defaultdict(list)
    for defect in defects:
        places[defect.kind, defect.place].append(defect)
    lines = []
    for (kind, place), several in sorted(places.items(), key=lambda item: -len(item[1])):
        first = several[0]
        lines.append(
            f"{len(several):5} {kind} {place}\n      case {first.case}: {first.message}\n      {first.name}"
        )
    return "\n".join(lines)


@click.command()
@click.option("--cases", default=2000)
@click.option("--first", default=0, help="The number of the first one.")
@click.option("--seed", default=0)
@click.option("--only", default="", help="Subjects whose name holds this.")
@click.option("--case", type=int, multiple=True, help="These cases alone, with their tracebacks.")
@click.option("--deep", is_flag=True, help="Searches run too: seconds a case that gets there.")
def main(cases: int, first: int, seed: int, only: str, case: tuple[int, ...], deep: bool) -> None:
    """Exit code 1 where a case has a defect."""
    started, cpu = time.perf_counter(), time.process_time()
    defects = fuzz(case or range(first, first + cases), seed, only, deep=deep)
    for defect in defects if case else ():
        print(defect.trace)
    print(grouped(defects))
    spent = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        f"{len(case) or cases} cases, seed {seed}: {len(defects)} defects, "
        f"{time.perf_counter() - started:.0f} s, {spent:.0f} s of CPU (start {cpu:.1f})"
    )
    sys.exit(1 if defects else 0)


if __name__ == "__main__":
    main()
