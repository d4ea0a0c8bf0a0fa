"""One case: its files, its command in this process, and what is wrong with how it ended."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from unittest.mock import DEFAULT, patch

import click
import ray

from lab.fuzz import options
from lab.fuzz.mutations import spoiled
from lab.fuzz.seeds import HERE, ROOT, Subject
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError

CPU_LIMIT_S, WALL_LIMIT_S = 6.0, 60.0
"""A case that takes longer hangs; the second is for one that waits."""
COSTLY = (
    *("cli.design.designed", "cli.size.search_size", "cli.size.fronts", "cli.choose.search_choose"),
    *("cli.planned.best_of", "calibration.fit.fitted", "what_if.scenarios.workers.local"),
)
"""Functions of rlhfsim behind the door, which take seconds; the case ends well where one is reached."""
TRIES = "what_if.doctor.diagnosis._tries"
"""The changes that doctor prices: none here; what it reads is judged and shown."""
JOIN = "executor.coordination.cluster.ray.init"
"""Joins a Ray cluster; one on this machine takes seconds to start."""
ASK = "executor.dry_run.ask"
"""What the libraries say to their configurations in processes of their own: nothing here."""
ODD = ("missing", "folder", "fifo", "loop", "endless", "huge", "full")
"""What may stand in place of a file."""


class Answered(BaseException):
    """The door let the case in; what costs time was reached."""


class Hang(BaseException):
    """The case takes too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is run."""

    name: str
    command: tuple[str, ...]
    """Words after `rlhfsim`."""
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """What a case did that it must not."""

    kind: str
    """The exception, hang, crash, half-written."""
    place: str
    """Innermost line of ours."""
    message: str
    case: int
    name: str
    trace: str = ""


def prepare(subjects: Sequence[Subject], number: int, seed: int, scratch: Path) -> tuple[Case, Random]:
    """The files of a case in a folder of its own below `scratch`, and its command."""
    rng = Random(f"{seed}:{number}")
    folder = scratch / f"c{number}"
    if rng.random() < 0.2:
        for subject in subjects:
            if subject.name in ("plan", "scenario", "whatif", "run", "log-openrlhf", "board"):
                _write(folder, subject.files)
        os.symlink("loop", folder / "loop")
        return Case(name="option", command=_filled(options.line(rng), folder), folder=folder), rng
    subject = rng.choice(subjects)
    file = rng.choice(subject.mutated)
    files = dict(subject.files)
    files[file] = spoiled(files[file], subject.kind(file), rng)
    _write(folder, files)
    name = f"{subject.name}:{file}"
    if rng.random() < 0.03:
        kind = rng.choice(ODD)
        _replace(folder / file, kind)
        name += f" {kind}"
    return Case(name=name, command=_filled(rng.choice(subject.commands), folder), folder=folder), rng


def _filled(words: Sequence[str], folder: Path) -> tuple[str, ...]:
    return tuple(word.replace(HERE, folder.name) for word in words)


def _write(folder: Path, files: dict[str, bytes] | object) -> None:
    assert isinstance(files, dict)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.replace(HERE.encode(), folder.name.encode()))


def _replace(path: Path, kind: str) -> None:
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path.name)
        case "endless":
            path.symlink_to("/dev/zero")
        case "full":
            path.symlink_to("/dev/full")
        case "huge":
            with path.open("wb") as file:
                file.truncate(2**40)


# --- running --------------------------------------------------------------------------------------


@contextlib.contextmanager
def guarded(scratch: Path) -> Iterator[None]:
    """In `scratch`, with costly functions replaced and an alarm for hangs."""

    def answered(*_: object, **__: object) -> None:
        raise Answered

    def hang(signum: int, frame: FrameType | None) -> None:
        raise Hang

    before = os.getcwd()
    handlers = {s: signal.signal(s, hang) for s in (signal.SIGALRM, signal.SIGPROF)}
    os.environ["HOME"] = str(scratch)
    os.chdir(scratch)
    with contextlib.ExitStack() as stack:
        for name in COSTLY:
            stack.enter_context(patch(f"rlhfsim.{name}", answered))
        stack.enter_context(patch(f"rlhfsim.{TRIES}", lambda *_: iter(())))
        stack.enter_context(patch(ASK, lambda *_: None))
        join = stack.enter_context(patch(JOIN, wraps=ray.init))
        join.side_effect = lambda address, **_: answered() if address == "local" else DEFAULT
        try:
            yield
        finally:
            os.chdir(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)


def run(case: Case, number: int) -> Defect | None:
    """The case, and what is wrong with how it ended; its folder is removed."""
    before = _listing(case.folder)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace")
    failed: BaseException | None = None
    code: object = 0
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = cli.main(list(case.command), prog_name="rlhfsim", standalone_mode=False)
    except RlhfsimError as error:
        failed, code = _unclear(error), 2
    except (click.ClickException, click.exceptions.Abort):
        code = 2
    except Answered:
        pass
    except (Exception, Hang, SystemExit) as error:
        failed = error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    left = _listing(case.folder) - before
    shutil.rmtree(case.folder, ignore_errors=True)
    if failed is not None:
        return _defect(failed, case, number)
    wrong = {name for name in left if code == 2 or Path(name).name.startswith(".")}
    if wrong:
        return _at("half-written", case.command[0], str(sorted(wrong)), case, number)
    return None


def _unclear(error: RlhfsimError) -> BaseException | None:
    """A message for people is short, of one kind of sentence, and cannot drive a terminal."""
    text = str(error)
    if len(text) > 4000 or any(ord(c) < 32 and c != "\n" for c in text):
        return ValueError(f"message of {len(text)} characters, {error.code}: {text[:80]!r}")
    return None


def _defect(error: BaseException, case: Case, number: int) -> Defect:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if f.filename.startswith((f"{ROOT}/rlhfsim", f"{ROOT}/executor"))]
    last = ours[-1] if ours else frames[-1] if frames else None
    place = (
        f"{Path(last.filename).relative_to(ROOT) if ours else last.filename}:{last.name}"
        if last
        else case.name
    )
    trace = "".join(traceback.format_exception(error))[-4000:]
    return _at(type(error).__name__, place, str(error)[:100], case, number, trace)


def _at(kind: str, place: str, message: str, case: Case, number: int, trace: str = "") -> Defect:
    command = " ".join(case.command)[:160]
    return Defect(
        kind=kind, place=place, message=message, case=number, name=f"{case.name}: {command!r}", trace=trace
    )


def _listing(folder: Path) -> set[str]:
    found = set()
    for path, folders, files in os.walk(folder):
        found |= {os.path.join(path, name) for name in (*folders, *files)}
    return found


def crashed(number: int, name: str, status: int) -> Defect:
    """A case that took the interpreter with it."""
    return Defect(kind="crash", place=name, message=f"signal {os.WTERMSIG(status)}", case=number, name=name)
