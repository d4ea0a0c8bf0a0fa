"""The files of a run: which form each has, and their records as one log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.interchange.logs.framework import Framework
from rlhfsim.interchange.logs.history import FORMS, read_history
from rlhfsim.interchange.logs.mlflow import MlflowMetrics, run_in
from rlhfsim.interchange.logs.records import Log, Record, lines, merged, read_jsonl, read_trainer_state
from rlhfsim.interchange.logs.tensorboard import MARK, read_events
from rlhfsim.specs.loading import read_text

MAX_TEXT = 512 * 2**20
"""Larger logs are refused."""
MAX_FILES = 2000
"""Files of a folder that are looked at."""
TEXTS = (".log", ".txt", ".out", ".err")
CONFIGS = ("config.yaml", "config.json", "training_args.json", "args.json", "config.yml")
"""Names of configurations that lie in a run's folder (`.hydra/config.yaml` of verl among them)."""
STATE = "trainer_state.json"


@frozen
class LogFiles:
    """The files of a run by form."""

    events: tuple[Path, ...] = ()
    json_lines: tuple[Path, ...] = ()
    states: tuple[Path, ...] = ()
    histories: tuple[Path, ...] = ()
    texts: tuple[Path, ...] = ()
    configs: tuple[Path, ...] = ()
    mlflow: Path | None = None
    """The folder of a run of MLflow, which holds both."""

    @property
    def logs(self) -> int:
        """Files with metrics."""
        metrics = (*self.events, *self.json_lines, *self.states, *self.histories)
        return len(metrics) + len(self.texts) + (self.mlflow is not None)


def find(path: Path) -> LogFiles:
    """Logs and configurations in a folder, or the one file that was given.

    Raises:
        RlhfsimError: there is none.
    """
    place = Place(file=str(path))
    if not path.exists():
        raise RlhfsimError(
            "unreadable-file", "there is no such file or folder", place=place, help="check the path"
        )
    if path.is_dir() and (run := run_in(path)) is not None:
        return LogFiles(mlflow=run)
    files = (
        sorted(p for p, _ in zip(path.rglob("*"), range(MAX_FILES), strict=False) if p.is_file())
        if path.is_dir()
        else [path]
    )
    states = tuple(p for p in files if p.name == STATE)
    run_files = LogFiles(
        events=tuple(p for p in files if MARK in p.name),
        json_lines=tuple(p for p in files if p.suffix == ".jsonl"),
        states=tuple(sorted(states, key=lambda p: p.stat().st_mtime)[-1:]),
        histories=tuple(p for p in files if _is_history(p, alone=path.is_file())),
        texts=tuple(p for p in files if p.suffix in TEXTS and MARK not in p.name) if path.is_dir() else (),
        configs=tuple(p for p in files if p.name in CONFIGS) or _beside(files[0]) if files else (),
    )
    if not run_files.logs and path.is_file():
        return LogFiles(texts=(path,), configs=_beside(path))
    if not run_files.logs:
        raise RlhfsimError(
            "no-logs",
            "no event file, JSON lines or console log is in this folder",
            place=place,
            help=f"logs are files with {MARK} in their name, *.jsonl, *history*.csv, {STATE}, or "
            f"{', '.join(f'*{t}' for t in TEXTS)}; or name the file itself",
        )
    return run_files


def _is_history(path: Path, *, alone: bool) -> bool:
    """Whether a file may be an exported history: one that is given, or that is called so in a folder."""
    own = path.suffix in FORMS and path.name not in (STATE, *CONFIGS)
    return own and (alone or "history" in path.name)


def _beside(path: Path) -> tuple[Path, ...]:
    """The configuration next to a log: a file of `CONFIGS`, else the one script of the folder."""
    known = tuple(path.parent / name for name in CONFIGS if (path.parent / name).is_file())
    scripts = tuple(sorted(path.parent.glob("*.sh")))
    return known[:1] or (scripts if len(scripts) == 1 else ())


def console_text(run_files: LogFiles) -> str:
    """What the job printed, all files one after the other."""
    return "\n".join(read_text(path, MAX_TEXT) for path in run_files.texts)


def read_log(path: Path, run_files: LogFiles, framework: Framework) -> Log:
    """The records of all files as one log, names without the prefix of the logger.

    Console lines count only where no file has metrics: they say the same, rounded.

    Raises:
        RlhfsimError: no file holds times of this framework.
    """
    parts = [*_read_files(run_files, framework)]
    if not any(_has_times(part, framework) for part in parts):
        parts += [_console(p, framework) for p in run_files.texts]
    log = folded(as_today(merged([_stripped(part, framework) for part in parts]), framework), framework)
    if not _has_times(log, framework):
        some = ", ".join(log.names[:4])
        raise RlhfsimError(
            "no-step-times",
            f"no time that {framework.title} logs ({framework.step}, ...) is here",
            place=Place(file=str(path)),
            help=f"give a log of {framework.title} in which a training step has ended"
            + (f"; this one has only {some}" if some else ""),
        )
    return log


def _read_files(run_files: LogFiles, framework: Framework) -> Iterator[Log]:
    """Files with metrics; of many one that is not of this kind is passed over by name."""
    if run_files.mlflow is not None:
        yield Log(records=tuple(MlflowMetrics(run_files.mlflow).new()))
    for path in run_files.events:
        yield read_events(path)
    for path in (*run_files.json_lines, *run_files.histories):
        try:
            text = read_text(path, MAX_TEXT)
            yield read_history(text, path) if path.suffix in FORMS else read_jsonl(text, str(path))
        except RlhfsimError as error:
            if run_files.logs == 1:
                raise
            yield Log(records=(), notes=(f"{path.name} was passed over: {error.message}",))
    for path in run_files.states:
        yield read_trainer_state(read_text(path, MAX_TEXT), str(path))


def _console(path: Path, framework: Framework) -> Log:
    text = read_text(path, MAX_TEXT)
    if "\0" in text:
        raise RlhfsimError(
            "not-a-log",
            "the file holds binary data",
            place=Place(file=str(path)),
            help="give the console log as text",
        )
    notes: tuple[str, ...] = ()
    if not text.endswith(("\n", "\r")) and text.rstrip().count("\n"):
        text, _, _ = text.rpartition("\n")
        notes = (f"{path.name}: the last line is cut off and was left out",)
    records = tuple(framework.records(tuple(lines(text))))
    return Log(records=records, notes=notes if records else ())


def _stripped(log: Log, framework: Framework) -> Log:
    """Names without what the framework's logger puts before them."""
    return replace(log, records=tuple(stripped(record, framework) for record in log.records))


def stripped(record: Record, framework: Framework) -> Record:
    """The record with names as the framework's code says them."""
    return replace(record, values={k.removeprefix(framework.strip): v for k, v in record.values.items()})


def as_today(log: Log, framework: Framework) -> Log:
    """Whole records under the names of today."""
    return replace(log, records=tuple(replace(r, values=framework.as_today(r.values)) for r in log.records))


def folded(log: Log, framework: Framework) -> Log:
    """Records without the time of a step, added up into the next one that has it."""
    if not framework.folds:
        return log
    whole: list[Record] = []
    waiting: dict[str, float] = {}
    for record in log.records:
        values = {**waiting, **record.values}
        for name in framework_times(waiting, framework):
            values[name] = waiting[name] + record.values.get(name, 0.0)
        if framework.step in values:
            whole.append(Record(step=record.step, values=values))
            waiting = {}
        else:
            waiting = values
    return Log(records=tuple(whole), notes=log.notes)


def framework_times(names: Iterable[str], framework: Framework) -> list[str]:
    """Names among these that are times of the framework."""
    return [name for name in names if name.startswith(framework.times) or name == framework.step]


def _has_times(log: Log, framework: Framework) -> bool:
    names = framework.as_today({name.removeprefix(framework.strip): 0.0 for name in log.names})
    return bool(framework_times(names, framework))
