"""The logs of a run that is still written: what is new at every look, whichever framework it turns out to be.

Until the time of a step gives the framework away, its lines are read as those of all that are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.logs.files import LogFiles, as_today, find, folded, stripped
from rlhfsim.interchange.logs.framework import Framework
from rlhfsim.interchange.logs.history import FORMS, read_history
from rlhfsim.interchange.logs.mlflow import MlflowMetrics
from rlhfsim.interchange.logs.records import Log, Record, lines, read_trainer_state, record_of_json
from rlhfsim.interchange.logs.steps import Steps
from rlhfsim.interchange.logs.tail import LineTail, Tail
from rlhfsim.interchange.logs.tensorboard import scalars
from rlhfsim.specs.loading import read_text

HEAD = 4 * 2**20
"""Characters of the console that are kept: a job says at its start what it runs, and on what."""
METRICS, CONSOLE, CONSOLE_WITHOUT_STEP = range(3)
"""Forms of logs, the one that counts first: console lines say the same as metrics, rounded."""
Found = tuple[str, int, Record]
"""Framework and form of a log, and what is in it."""


class LogFile(Protocol):
    """One file of a run."""

    def new(self) -> Iterator[Found]:
        """What it has gained since the last look."""


class Console:
    """A console log, which is read as that of every framework that it may be of."""

    def __init__(self, path: Path, frameworks: Sequence[Framework], heard: Callable[[str], None]) -> None:
        """`heard` gets all text."""
        self._tail, self._heard = LineTail(path), heard
        forms = [(f.name, CONSOLE, f.console) for f in frameworks]
        forms += [
            (f.name, CONSOLE_WITHOUT_STEP, reader) for f in frameworks if (reader := f.console_without_step)
        ]
        self._readers = {(name, form): reader() for name, form, reader in forms}

    def only(self, framework: str) -> None:
        """Its framework is known."""
        self._readers = {key: reader for key, reader in self._readers.items() if key[0] == framework}

    def new(self) -> Iterator[Found]:
        """Parts of steps, as every framework reads them."""
        for text in self._tail.texts():
            self._heard(text)
            for line in lines(text):
                for (name, form), read in tuple(self._readers.items()):
                    if (part := read(line)) is not None:
                        yield name, form, part


class JsonLinesLog:
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        """The file need not be whole."""
        self._tail = LineTail(path)

    def new(self) -> Iterator[Found]:
        """Records of new lines."""
        for text in self._tail.texts():
            records = map(record_of_json, text.splitlines())
            yield from (("", METRICS, record) for record in records if record is not None)


class Events:
    """An event file of TensorBoard."""

    def __init__(self, path: Path) -> None:
        """The file need not be whole."""
        self._path, self._tail, self._half = path, Tail(path), b""

    def new(self) -> Iterator[Found]:
        """Scalars of new messages."""
        for piece, begun in self._tail.pieces():
            content = piece if begun else self._half + piece
            records, end = scalars(content, self._path)
            self._half = content[end:]
            yield from (("", METRICS, record) for record in records)


class Mlflow:
    """A run in a folder of MLflow."""

    def __init__(self, path: Path) -> None:
        """The folder of the run."""
        self._metrics = MlflowMetrics(path)

    def new(self) -> Iterator[Found]:
        """What its metrics have gained, by step."""
        yield from (("", METRICS, record) for record in self._metrics.new())


class WholeFile:
    """A file that is written anew every time: `trainer_state.json` of a checkpoint, an exported history."""

    def __init__(self, path: Path) -> None:
        """The file need not be whole."""
        self._path, self._written = path, (0, 0)
        self._known: Sequence[Record] = ()

    def new(self) -> Iterator[Found]:
        """Records behind those that it had before; none while it is being written."""
        try:
            state = self._path.stat()
            if self._written == (written := (state.st_mtime_ns, state.st_size)):
                return
            text = read_text(self._path, 2**29)
            history = self._path.suffix in FORMS and self._path.name != "trainer_state.json"
            log = read_history(text, self._path) if history else read_trainer_state(text, str(self._path))
        except (OSError, RlhfsimError):
            return
        pairs = zip(self._known, log.records, strict=False)
        first = next((i for i, (old, new) in enumerate(pairs) if old != new), len(self._known))
        self._written, self._known = written, log.records
        yield from (("", METRICS, record) for record in log.records[first:])


class LogFollower:
    """A run whose logs are read once, as they are written."""

    def __init__(self, path: Path, frameworks_of: Callable[[Path], Sequence[Framework]]) -> None:
        """`frameworks_of`: what a log that is there may be of."""
        self.path, self.head = path, ""
        """`head`: what the job printed first."""
        self._frameworks_of = frameworks_of
        self._frameworks: Mapping[str, Framework] = {}
        self._sources: dict[Path, LogFile] = {}
        self._left_out: set[Path] = set()
        self._steps: dict[tuple[str, int], Steps] = {}
        self.notes: list[str] = []

    @property
    def framework(self) -> Framework | None:
        """Whose log it is; None: no time of a step has come yet."""
        return next(iter(self._frameworks.values())) if len(self._frameworks) == 1 and self._steps else None

    @property
    def steps(self) -> Steps | None:
        """The steps of the best form of logs that has times."""
        timed = [key for key, steps in self._steps.items() if steps.has_times]
        return self._steps[min(timed, key=lambda key: key[1])] if timed else None

    def look(self) -> bool:
        """Read what is new; False: there is no log yet."""
        try:
            files = find(self.path)
        except RlhfsimError:
            return bool(self._sources)
        if not self._sources:
            self._frameworks = {f.name: f for f in self._frameworks_of(self.path)}
        self._open(files)
        for path, source in tuple(self._sources.items()):
            try:
                for name, form, record in source.new():
                    self._add([name] if name else [*self._frameworks], form, record)
            except RlhfsimError as error:
                if len(self._sources) == 1:
                    raise
                del self._sources[path]
                self._left_out.add(path)
                self.notes.append(f"{path.name} is left out: {error.message}")
        return True

    def log(self, *, all_of_them: bool) -> Log:
        """The newest steps under the names of today; one that may still grow counts with `all_of_them`."""
        steps, framework = self.steps, self.framework
        if steps is None or framework is None:
            return Log(records=())
        whole = steps.whole(all_of_them=steps.settled() or all_of_them)
        return folded(as_today(whole, framework), framework)

    def _open(self, files: LogFiles) -> None:
        kinds: tuple[tuple[Iterable[Path], Callable[[Path], LogFile]], ...] = (
            ((files.mlflow,) if files.mlflow else (), Mlflow),
            (files.events, Events),
            (files.json_lines, JsonLinesLog),
            ((*files.states, *files.histories), WholeFile),
            (files.texts, lambda path: Console(path, [*self._frameworks.values()], self._hear)),
        )
        for paths, kind in kinds:
            for path in paths:
                if path not in self._sources and path not in self._left_out:
                    self._sources[path] = kind(path)

    def _hear(self, text: str) -> None:
        self.head += text[: max(0, HEAD - len(self.head))]

    def _add(self, names: Sequence[str], form: int, record: Record) -> None:
        for name in (n for n in names if n in self._frameworks):
            framework = self._frameworks[name]
            if (name, form) not in self._steps:
                self._steps[name, form] = Steps(framework.has_step)
            steps = self._steps[name, form]
            steps.add(stripped(record, framework))
            if steps.has_times and len(self._frameworks) > 1:
                self._choose(framework)

    def _choose(self, framework: Framework) -> None:
        """Only this framework's lines are read from now on."""
        self._frameworks = {framework.name: framework}
        self._steps = {key: steps for key, steps in self._steps.items() if key[0] == framework.name}
        for source in self._sources.values():
            if isinstance(source, Console):
                source.only(framework.name)
