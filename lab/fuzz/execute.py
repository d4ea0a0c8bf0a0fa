"""One case: its files, its command in this process, and what is wrong with how it ended."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any
from unittest.mock import patch

import click

from executor.coordination.manifest import write_manifest
from lab.fuzz import options
from lab.fuzz.mutations import spoiled
from lab.fuzz.seeds import HERE, ROOT, Subject
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError

CPU_LIMIT_S, WALL_LIMIT_S = 20.0, 60.0
"""A case that takes longer hangs (a log of 256 GPUs takes 8); the second is for one that waits."""
DEEP_LIMIT_S = 100.0
"""CPU seconds of commands that search too; choose and what-if design many times."""
COSTLY = (
    *("cli.design.designed", "cli.size.search_size", "cli.size.fronts", "cli.choose.search_choose"),
    *("cli.planned.best_of", "calibration.fit.fitted", "what_if.scenarios.workers.local"),
)
"""Functions of rlhfsim behind the door, which take seconds; the case ends well where one is reached, but not in a deep run."""
STARTS = (
    *(
        "executor.launch.RestartLoop",
        "executor.coordination.cluster.ray.init",
        "rlhfsim.cli.launch.make_tiny",
    ),
    *(
        "rlhfsim.cli.demo.make_tiny",
        "executor.microbench.run.measure",
        "rlhfsim.what_if.scenarios.workers._join",
    ),
)
"""What starts or joins a cluster, builds a model or measures this machine; likewise."""
TRIES = "what_if.doctor.diagnosis._tries"
"""The changes that doctor prices: none here; what it reads is judged and shown."""
ASK = "executor.dry_run.ask"
"""What the libraries say to their configurations in processes of their own: nothing here."""
DESK = "rlhfsim.desk.server.Server"
"""Serves the page; here its first question is read, as the page reads it."""
BESIDE = ("plan", "scenario", "whatif", "run", "log-openrlhf", "settings", "model", "prices")
"""Subjects whose files lie there where options are spoiled."""
OURS = ("plan.json", "trace.json")
"""Files that a command wrote, and another may write again."""
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


class Page:
    """The page of the desk without a server: its question is read, and so are its candidates."""

    address = "nowhere"

    def __init__(self, host: str, port: int, **question: Any) -> None:
        """As `rlhfsim.desk.server.Server`."""
        self.question = question

    def __enter__(self) -> Page:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def run(self) -> None:
        """One question."""
        self.question["read"](self.question["start"])
        self.question["candidates"](self.question["start"])


def prepare(subjects: Sequence[Subject], number: int, seed: int, scratch: Path) -> tuple[Case, Random]:
    """The files of a case in a folder of its own below `scratch`, and its command."""
    rng = Random(f"{seed}:{number}")
    folder = scratch / f"c{number}"
    if rng.random() < 0.2:
        for subject in subjects:
            if subject.name in BESIDE:
                _write(folder, subject.files)
        folder.mkdir(exist_ok=True)
        os.symlink("loop", folder / "loop")
        return Case(name="option", command=_filled(options.line(rng), folder), folder=folder), rng
    family = rng.choice(sorted({s.family for s in subjects}))
    subject = rng.choice([s for s in subjects if s.family == family])
    file = rng.choice(subject.mutated)
    files = dict(subject.files)
    if rng.random() < 0.03:
        files[file] = rng.choice(list(rng.choice(subjects).files.values()))
    else:
        files[file] = spoiled(files[file], subject.kind(file), rng)
    _write(folder, files)
    if subject.sealed:
        write_manifest(folder / subject.sealed)
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
def guarded(scratch: Path, *, deep: bool = False) -> Iterator[None]:
    """In `scratch`, with costly functions replaced (but not where `deep`) and an alarm for hangs."""

    def answered(*_: object, **__: object) -> None:
        raise Answered

    def hang(signum: int, frame: FrameType | None) -> None:
        raise Hang

    before = os.getcwd()
    handlers = {s: signal.signal(s, hang) for s in (signal.SIGALRM, signal.SIGPROF)}
    os.environ["HOME"] = tempfile.tempdir = str(scratch)
    os.chdir(scratch)
    with contextlib.ExitStack() as stack:
        for name in () if deep else COSTLY:
            stack.enter_context(patch(f"rlhfsim.{name}", answered))
        stack.enter_context(patch(f"rlhfsim.{TRIES}", lambda *_: iter(())))
        stack.enter_context(patch(ASK, lambda *_: None))
        for name in STARTS:
            stack.enter_context(patch(name, answered))
        stack.enter_context(patch(DESK, Page))
        try:
            yield
        finally:
            os.chdir(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)


def run(case: Case, number: int, cpu_s: float = CPU_LIMIT_S) -> Defect | None:
    """The case, and what is wrong with how it ended; its folder is removed."""
    before = _listing(case.folder)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace")
    failed: BaseException | None = None
    code: object = 0
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_S / CPU_LIMIT_S * cpu_s)
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
    after = _listing(case.folder)
    shutil.rmtree(case.folder, ignore_errors=True)
    if failed is not None:
        return _defect(failed, case, number)
    new = after.keys() - before.keys()
    wrong = {name for name in new if code == 2 or _hidden(Path(name).name)}
    if wrong:
        return _at("half-written", case.command[0], str(sorted(wrong)), case, number)
    harmed = {
        name for name, state in before.items() if after.get(name) != state and not _may_change(case, name)
    }
    return _at("harmed", case.command[0], str(sorted(harmed)), case, number) if harmed else None


def _hidden(name: str) -> bool:
    """A file that no command leaves; the lock of a run folder stays."""
    return name.startswith(".") and name != ".lock"


def _may_change(case: Case, name: str) -> bool:
    """A file of ours that this command does not read; the files of a run that goes on."""
    if "--resume" in case.command or "/kept/" in name:
        return True
    read = {name, str(Path(name).parent)} & {*case.command[1:2]}
    return case.name == "option" and Path(name).name in OURS and not read


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


def _listing(folder: Path) -> dict[str, tuple[int, ...]]:
    """Every file and folder, and what changes when somebody writes: of a file its number, size and time."""
    found: dict[str, tuple[int, ...]] = {}
    for path, folders, files in os.walk(folder):
        found |= {os.path.join(path, name): () for name in folders}
        for name in files:
            state = os.lstat(os.path.join(path, name))
            found[os.path.join(path, name)] = (state.st_ino, state.st_size, state.st_mtime_ns)
    return {os.path.relpath(name, folder.parent): state for name, state in found.items()}


def crashed(number: int, name: str, status: int) -> Defect:
    """A case that took the interpreter with it."""
    return Defect(kind="crash", place=name, message=f"signal {os.WTERMSIG(status)}", case=number, name=name)
