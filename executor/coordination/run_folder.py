"""The folder of a run: everything that was decided before it and measured in it, under fixed names."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from executor.coordination.manifest import write_synced
from executor.machine.facts import gpu_names, libraries
from executor.settings import Settings
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.outputs import sweep, write_atomically
from rlhfsim.plan import Plan, write_plan
from rlhfsim.provenance import content_hash
from rlhfsim.run_folder import AMENDMENTS

logger = logging.getLogger(__name__)


class RunFiles:
    """Names of all files of a run."""

    def __init__(self, root: Path) -> None:
        """`root` is the folder; on several nodes on a file system that all share."""
        self.root = root
        self.plan = root / "plan.json"
        """The plan with everything resolved."""
        self.settings = root / "settings.yaml"
        """All settings, defaults included."""
        self.contents = root / "contents.json"
        """Hashes of the rows, weights and code that the settings name, see contents.py."""
        self.amendments = root / AMENDMENTS
        """How the inputs were changed since, see amendments.py."""
        self.vllm = root / "vllm.json"
        """Arguments of the rollout engine."""
        self.trainers = {name: root / name for name in ("deepspeed", "fsdp2")}
        """Configuration of every role by training library, `<role>.json`."""
        self.trace = root / "trace.json"
        """Measured spans, schema rlhfsim.trace/1."""
        self.metrics = root / "metrics.jsonl"
        """One line an iteration."""
        self.samples = root / "samples.jsonl"
        """Some samples as text, see sample_log.py."""
        self.environment = root / "environment.json"
        """Versions and machine."""
        self.logs = root / "logs"
        """One file a process."""
        self.checkpoints = root / "checkpoints"
        """See checkpoints.py."""
        self.model = root / "model"
        """Link to the newest copy of what is trained, as other libraries read it, with its tokenizer."""
        self.best = root / "best"
        """The same, of the checkpoint that was evaluated best."""
        self.tensorboard = root / "tensorboard"
        """Event files."""
        self.scratch = root / "scratch"
        """Offloaded states and weights on their way; may go at any time between two runs."""
        self.lock = root / ".lock"
        """Held by the process that runs."""


@contextmanager
def occupy(root: Path, *, resume: bool = False) -> Iterator[RunFiles]:
    """The folder for the time of one run; it is made where it is missing.

    Raises:
        RlhfsimError: it holds something and `resume` is not asked, or something else than a run; another run
            is in it.
    """
    files = RunFiles(root)
    _check(files, resume)
    try:
        for folder in (files.root, files.logs, files.checkpoints, files.scratch):
            folder.mkdir(parents=True, exist_ok=True)
        lock = files.lock.open("w")
    except OSError as error:
        raise RlhfsimError(
            "unwritable-file",
            f"cannot make the run folder: {(error.strerror or 'error').lower()}",
            place=Place(file=str(root)),
            help="choose a folder that is writable",
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RlhfsimError(
                "run-folder-in-use",
                "another run is in this folder",
                place=Place(file=str(root)),
                help="wait for its end, or choose another folder",
            ) from error
        _check_renames(files.checkpoints)
        yield files


def _check_renames(folder: Path) -> None:
    """A checkpoint is written, synced and renamed: try it with a small one."""
    trial, renamed = folder / ".trial", folder / ".trial-renamed"
    try:
        for left in (trial, renamed):
            shutil.rmtree(left, ignore_errors=True)
        trial.mkdir()
        write_synced(trial / "file", "whole")
        trial.rename(renamed)
        shutil.rmtree(renamed)
    except OSError as error:
        raise RlhfsimError(
            "folder-cannot-rename",
            f"checkpoints cannot be written here: {(error.strerror or 'error').lower()}",
            place=Place(file=str(folder)),
            help="a mounted bucket cannot rename a folder: keep the run on a local or network file system, "
            "copy finished checkpoints to the bucket",
        ) from error


def _check(files: RunFiles, resume: bool) -> None:
    root = files.root
    reasons = (
        (
            root.exists() and not root.is_dir(),
            "not-a-folder",
            "the run folder is a file",
            "choose another path",
        ),
        (
            resume and holds_something(files) and not (files.plan.is_file() and files.settings.is_file()),
            "nothing-to-resume",
            "there is no run in this folder (no plan.json and settings.yaml), but something else",
            "choose another folder",
        ),
        (
            not resume and holds_something(files),
            "run-folder-not-empty",
            "the run folder holds something already",
            "choose another folder, or resume the run that is in it with --resume",
        ),
    )
    for refused, code, message, remedy in reasons:
        if refused:
            raise RlhfsimError(code, message, place=Place(file=str(root)), help=remedy)


def holds_something(files: RunFiles) -> bool:
    """Whether there is more than an attempt leaves that ended before its first step: it can start again."""
    if not files.root.is_dir():
        return False
    leftovers = {files.lock, files.logs, files.checkpoints, files.scratch}
    if files.lock.exists():  # an attempt of ours, not somebody's plan.json
        leftovers |= {files.plan, files.settings, files.contents, files.vllm, files.environment}
        leftovers |= set(files.trainers.values())
    sweep(files.root)
    return any(path not in leftovers for path in files.root.iterdir()) or any(
        files.checkpoints.glob("step-*")
    )


def write_inputs(
    files: RunFiles,
    *,
    plan: Plan,
    settings: Settings,
    contents: Mapping[str, str] | None = None,
    trainers: Mapping[str, Mapping[str, Mapping[str, Any]]],
    vllm: Mapping[str, Any],
) -> None:
    """Write what the run is about to do and what it is based on, each file in one step.

    `trainers`: library (the name of a folder) -> role -> its configuration.
    """
    files.root.mkdir(parents=True, exist_ok=True)
    write_json(files.contents, contents or {})
    write_plan(files.plan, plan)
    write_atomically(files.settings, settings_text(settings))
    for library, folder in files.trainers.items():
        shutil.rmtree(folder, ignore_errors=True)
        for role, config in trainers.get(library, {}).items():
            folder.mkdir(exist_ok=True)
            write_json(folder / f"{role}.json", config)
    write_json(files.vllm, vllm)
    write_json(files.environment, environment())


def link(path: Path, target: Path) -> None:
    """`path` becomes a relative link to `target`, in one step; on a disk without links it is left out."""
    fresh = path.with_name(f".{path.name}-link")
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(os.path.relpath(target, path.parent), target_is_directory=True)
        fresh.replace(path)
    except OSError as error:
        logger.warning("%s is not linked to %s: %s", path, target, error)


def settings_text(settings: Settings) -> str:
    """Settings as YAML that `rlhfsim.specs.loading.load(Settings, path)` reads back equal."""
    return yaml.safe_dump(plain(asdict(settings)), sort_keys=False, width=100)


def settings_hash(settings: Settings) -> str:
    """Hash of all that settings fix, except how long the run is and where its metrics go."""
    data = plain(asdict(settings))
    return content_hash(
        {k: v for k, v in data.items() if k not in ("iterations", "tracking", "checkpoints", "limits")}
    )


def plain(value: Any) -> Any:
    """Tuples as lists and mappings as dicts."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, data: Any) -> None:
    """Write plain data atomically; what JSON does not know becomes text."""
    write_atomically(path, json.dumps(plain(data), indent=1, default=str) + "\n")


def environment() -> dict[str, Any]:
    """Versions, cores, memory and GPUs of the driver's node; no host name and no path."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "libraries": libraries(
            "rlhfsim", "torch", "vllm", "ray", "deepspeed", "transformers", "tokenizers", "numpy"
        ),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": gpu_names(),
    }
