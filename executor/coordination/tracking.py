"""Where metrics go: metrics.jsonl always; TensorBoard, Weights & Biases and MLflow where settings ask.

Each line of metrics.jsonl is one iteration: {"step": 3, "iteration": 4, "reward/mean": 0.5, ...}: the trace's
step, which counts from 0, and the iterations done, as screen and trackers count. JSON has no nan and no
infinity: such a value is null there and its name is listed in "non_finite" with the word.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

from executor.coordination.sample_log import Line
from executor.settings import Tracking
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.extras import need
from rlhfsim.outputs import write_atomically

logger = logging.getLogger(__name__)
STEP, ITERATION = "step", "iteration"
NON_FINITE = "non_finite"
_REFUSED_BY_MLFLOW = re.compile(r"[^\w\-. :/]")
"""In names of metrics, such as pass@4 and format#2."""
_OFF = {
    "tensorboardX": "tracking.tensorboard: false",
    "wandb": "tracking.wandb_project: null",
    "mlflow": "tracking.mlflow_experiment: null",
}
"""Library -> the setting that does without."""
IDS = "tracking.json"
"""Service -> the id of the run there: one of its own, and the same when it is resumed."""


class Sink(NamedTuple):
    """One place other than metrics.jsonl where metrics go."""

    name: str
    log: Callable[[int, Mapping[str, float]], None]
    """Takes how many iterations are done, and the metrics of the last."""
    show: Callable[[int, Sequence[Line]], None]
    """Takes how many iterations are done, and samples, see sample_log.py."""
    close: Callable[[], None]
    """Everything is out when it returns."""


class MetricsFile:
    """metrics.jsonl, a line an iteration, flushed at once."""

    def __init__(self, path: Path, first_step: int = 0, rows: Sequence[Mapping[str, float]] = ()) -> None:
        """Lines of `first_step` and later are removed: a resumed run writes them again. `rows`: the first
        ones as a checkpoint has them, for a power failure may have taken their lines.
        """
        self._path = path
        earlier = {int(row[STEP]): row for row in read_metrics(path)} if path.exists() else {}
        earlier |= {step: {STEP: step, ITERATION: step + 1, **row} for step, row in enumerate(rows)}
        write_atomically(path, "".join(_line(earlier[s]) for s in sorted(earlier) if s < first_step))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Append a line.

        Raises:
            RlhfsimError: the disk is full.
        """
        try:
            self._file.write(_line({STEP: step, ITERATION: step + 1, **row}))
            self._file.flush()
        except OSError as error:
            raise RlhfsimError(
                "unwritable-file",
                f"cannot write: {(error.strerror or 'error').lower()}",
                place=Place(file=str(self._path)),
                help="free space on this disk; resume with --resume",
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(row: Mapping[str, float]) -> str:
    odd = {name: str(float(value)) for name, value in row.items() if not math.isfinite(value)}
    plain = {name: None if name in odd else value for name, value in row.items()}
    return json.dumps(plain | ({NON_FINITE: odd} if odd else {}), allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a metrics.jsonl; lines that a kill cut off are left out."""
    rows = [_row(line) for line in path.read_text(encoding="utf-8").splitlines()]
    broken = rows.count(None)
    if broken:
        logger.warning("%d lines of %s are not whole and are left out", broken, path)
    return [row for row in rows if row is not None]


def _row(line: str) -> dict[str, float] | None:
    try:
        row: dict[str, Any] = json.loads(line)
        odd = {name: float(word) for name, word in row.pop(NON_FINITE, {}).items()}
        return row | {STEP: int(row[STEP])} | odd
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, OverflowError):
        return None


def _library(module: str) -> Any:
    need(module, purpose=f"tracking by {module}", otherwise=f"or set {_OFF[module]}")
    return import_module(module)


def _tensorboard(folder: Path, first_step: int) -> Sink:
    """Event files; what is there after `first_step` iterations is hidden: a resumed run writes it again."""
    module = _library("tensorboardX")
    writer = module.SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)

    def log(step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def show(step: int, lines: Sequence[Line]) -> None:
        for part, text in _markdown(lines).items():
            writer.add_text(f"samples/{part}", text, step)
        writer.flush()

    return Sink("TensorBoard", log, show, writer.close)


def _markdown(lines: Sequence[Line]) -> dict[str, str]:
    """Part -> its samples as text."""
    parts: dict[str, str] = {}
    for line in lines:
        text = f"reward {line['reward']}, {line['response_tokens']} tokens\n\n"
        text += "".join(f"    {row}\n" for name in ("prompt", "response") for row in line[name].splitlines())
        parts[line["part"]] = parts.get(line["part"], "") + text + "\n"
    return parts


def _weights_and_biases(project: str, folder: Path, config: Mapping[str, Any], ids: dict[str, str]) -> Sink:
    """Where it goes (or WANDB_MODE=offline) is that library's matter; a resumed run goes on under its id."""
    module = _library("wandb")
    run_id = ids.setdefault("wandb", secrets.token_hex(4))
    run = module.init(project=project, dir=str(folder), config=dict(config), id=run_id, resume="allow")

    def show(step: int, lines: Sequence[Line]) -> None:
        rows = [[json.dumps(v) if isinstance(v, dict) else v for v in line.values()] for line in lines]
        if lines:
            run.log(
                {f"samples/{lines[0]['part']}": module.Table(columns=list(lines[0]), data=rows)}, step=step
            )

    return Sink("WeightsAndBiases", lambda step, row: run.log(dict(row), step=step), show, run.finish)


def _mlflow(experiment: str, config: Mapping[str, Any], ids: dict[str, str], name: str) -> Sink:
    """MLFLOW_TRACKING_URI says where; a resumed run goes on under its id."""
    module = _library("mlflow")
    module.set_experiment(experiment)
    if module.active_run() is not None:  # of an attempt that did not end
        module.end_run()
    if "mlflow" in ids:
        module.start_run(run_id=ids["mlflow"])
    else:
        ids["mlflow"] = str(module.start_run(run_name=name).info.run_id)
        module.log_dict(dict(config), "config.json")
        settings = _flat(config.get("settings", config))
        module.log_params({key: str(value)[:500] for key, value in settings})

    def show(step: int, lines: Sequence[Line]) -> None:
        if lines:
            text = "".join(json.dumps(line) + "\n" for line in lines)
            module.log_text(text, f"samples/{lines[0]['part']}-{step:06d}.jsonl")

    def log(step: int, row: Mapping[str, float]) -> None:
        module.log_metrics({_REFUSED_BY_MLFLOW.sub("_", name): v for name, v in row.items()}, step=step)

    return Sink("MlFlow", log, show, module.end_run)


def _flat(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted name."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def check_libraries(tracking: Tracking) -> None:
    """What the settings ask for is installed.

    Raises:
        RlhfsimError: a library is not.
    """
    asked = tracking.tensorboard, tracking.wandb_project is not None, tracking.mlflow_experiment is not None
    for module in compress(_OFF, asked):
        _library(module)


@dataclass
class Trackers:
    """metrics.jsonl and what settings ask for in addition; a service that fails is said once and left out."""

    file: MetricsFile
    """It must work."""
    others: list[Sink]
    """They may fail."""

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Write the row of a step (from 0) everywhere; others than the file count iterations done."""
        self.file.log(step, row)
        self._each(lambda sink: sink.log(step + 1, row))

    def show(self, done: int, lines: Sequence[Line]) -> None:
        """Show samples everywhere but in the file of the metrics."""
        self._each(lambda sink: sink.show(done, lines))

    def close(self) -> None:
        """Close all."""
        self.file.close()
        self._each(lambda sink: sink.close())

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in tuple(self.others):
            try:
                act(sink)
            except Exception as error:  # network, quota, login: none of it is worth a training run
                logger.warning("%s failed and gets no more metrics: %s", sink.name, error)
                self.others.remove(sink)
                with contextlib.suppress(Exception):
                    sink.close()


def open_trackers(
    tracking: Tracking,
    metrics: Path,
    tensorboard: Path,
    *,
    first_step: int = 0,
    rows: Sequence[Mapping[str, float]] = (),
    config: Mapping[str, Any] | None = None,
    custom: Callable[[int, Mapping[str, float]], None] | None = None,
) -> Trackers:
    """Everything that settings ask for, ready to log; `rows`: those of a checkpoint; `custom`: the user's
    logger, see algorithms/custom.py.

    Raises:
        RlhfsimError: a library that was asked for is not installed.
    """
    config, kept = config or {}, metrics.parent / IDS
    ids: dict[str, str] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    others: list[Sink] = []
    if tracking.tensorboard:
        others.append(_tensorboard(tensorboard, first_step))
    if (project := tracking.wandb_project) is not None:
        others += _opened(
            "W&B", ids.get("wandb"), lambda: _weights_and_biases(project, metrics.parent, config, ids)
        )
    if (experiment := tracking.mlflow_experiment) is not None:
        others += _opened(
            "MLflow", ids.get("mlflow"), lambda: _mlflow(experiment, config, ids, metrics.parent.name)
        )
    if custom is not None:
        show = getattr(custom, "show", lambda step, lines: None)
        others.append(Sink("custom.logger", custom, show, getattr(custom, "close", lambda: None)))
    if ids:
        write_atomically(kept, json.dumps(ids, indent=1) + "\n")
    return Trackers(MetricsFile(metrics, first_step, rows), others)


def _opened(service: str, before: str | None, open_it: Callable[[], Sink]) -> list[Sink]:
    """The service's sink; none where it fails and the run has begun with it (its id `before`)."""
    try:
        return [open_it()]
    except RlhfsimError:
        raise
    except Exception as error:  # network, login, a server's refusal
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if before is not None:
            logger.warning("%s cannot be opened again and gets no more metrics: %s", service, reason)
            return []
        raise RlhfsimError(
            "tracking-service",
            f"{service} cannot be opened: {reason}",
            help="log in or name a server that can be reached (WANDB_MODE=offline, MLFLOW_TRACKING_URI), or "
            "leave it out of tracking",
        ) from error
