"""Checkpoints: folders that are whole or not there, of which the newest whole one starts the run again.

    <run>/checkpoints/step-000012/
        actor/..., critic/...    one file a rank of each trained role, written by the workers
        state.json               what the driver knows (`RunProgress`) and what it belongs to (`RunIdentity`)
        manifest.json            size and SHA-256 of every other file; written last

A checkpoint is made in a hidden folder next to its place, every file and folder is synced to disk, and one
rename puts it there. Deleting renames first as well, so a run that is killed leaves only hidden folders
behind; the next save removes them. On several nodes the folder must be on a file system that all share.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any

from executor.coordination.manifest import problems, sync, write_manifest, write_synced
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.specs.loading import Source, convert, read_text
from rlhfsim.specs.workload.roles import TRAINED

logger = logging.getLogger(__name__)
STATE = "state.json"
RESHARDED = ("ranks", "dp")
"""What may be others than those that saved, where nothing else is split: engines cut their states anew."""
DEGREES = ("tp", "pp", "dp", "cp", "ep", "zero")
LEFTOVER = ".unfinished-"
"""Prefix of folders that are being written or deleted."""
_NAME = re.compile(r"step-(\d{6,})")
_TORN = "a file could not be written whole"
_DISK_WORDS = {
    "no space left on device": "no space left on device",
    "disk quota exceeded": "disk quota exceeded",
    "file too large": "file too large",
    "unexpected pos": _TORN,  # torch.save on a full disk
    "file write failed": _TORN,
}
_SHOWN = 5
_UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)
MAX_STATE = 512 * 2**20
"""It holds the metrics of every iteration."""
_World = Mapping[str, Mapping[str, int]]
Write = Callable[[Path], Callable[[], None] | None]
"""Lets the workers write into a folder; what it returns waits until they are done."""


@frozen
class RunIdentity:
    """What a checkpoint belongs to; a run goes on only from one of its own."""

    plan_hash: str
    """`input_hash` of the plan."""
    settings_hash: str
    """`rlhfsim.provenance.content_hash` of the settings; another one is said, not refused."""
    world: Mapping[str, Mapping[str, int]]
    """Ranks and degrees of every trained role: {"actor": {"ranks": 2, "tp": 1, ...}}."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Workload and placement as plain data, to say what differs."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the rows, weights and code that the run used, see contents.py."""


@frozen
class RunProgress:
    """What the driver must know to go on."""

    iteration: int
    """Iterations done: the next one has this number."""
    weight_version: int
    data_position: Mapping[str, Any]
    """The position in the prompts; whatever the task needs, as JSON."""
    rng: Mapping[str, Any]
    """`bit_generator.state` of the driver's generators by name."""
    metrics: tuple[Mapping[str, float], ...] = ()
    """Rows so far."""
    score: float | None = None
    """Score of the evaluation after this iteration, more is better; None: there was none."""


@frozen
class Checkpoint:
    """A whole one."""

    folder: Path
    identity: RunIdentity
    progress: RunProgress


def identity(plan: Plan, settings_hash: str, contents: Mapping[str, str] | None = None) -> RunIdentity:
    """What checkpoints of this plan belong to."""
    plain = plan.to_dict()
    return RunIdentity(
        plan_hash=plan.input_hash,
        settings_hash=settings_hash,
        world={
            role: {"ranks": placed.layout.gpus} | {name: getattr(placed.layout, name) for name in DEGREES}
            for role, placed in plan.placement.trainers.items()
            if role in TRAINED
        },
        inputs={name: plain[name] for name in ("workload", "placement", "hardware")},
        contents=contents or {},
    )


# --- save -------------------------------------------------------------------------------------------


def begin(
    root: Path, progress: RunProgress, identity: RunIdentity, write: Write, keep: int, *, best: bool = False
) -> Callable[[], Checkpoint]:
    """Write a checkpoint into `root` and keep the newest `keep` whole ones; a whole one that is there stays.

    The run may go on when this returns; what is returned does the rest, before the next one begins.
    `write(folder)` lets the workers write `folder/<role>/`, at least one file a rank of every role in
    `identity.world`; what it returns, if anything, waits until all are done. `best`: the whole one with the
    highest score stays as well.

    Raises:
        RlhfsimError: it could not be written (disk full, ...), here or in the rest; older checkpoints remain.
    """
    assert keep >= 1, keep
    place = root / f"step-{progress.iteration:06d}"
    if place.exists() and (whole := _try_read(place)) and whole.identity == identity:
        return lambda: whole
    partial = root / f"{LEFTOVER}{place.name}-{secrets.token_hex(4)}"
    with _whole_or_absent(partial, progress.iteration):
        root.mkdir(parents=True, exist_ok=True)
        for path in root.glob(f"{LEFTOVER}*"):
            logger.info("removing %s, which an interrupted save left behind", path.name)
            shutil.rmtree(path, ignore_errors=True)
        partial.mkdir()
        for role in identity.world:
            (partial / role).mkdir()
        wait = write(partial)

    def finish() -> Checkpoint:
        with _whole_or_absent(partial, progress.iteration):
            if wait is not None:
                wait()
            _seal(partial, progress, identity)
            if place.exists():  # of an earlier attempt, broken or overtaken by a resume
                _remove(place)
            os.rename(partial, place)
            sync(root)
        _prune(root, keep, best)
        return Checkpoint(folder=place, identity=identity, progress=progress)

    return finish


@contextmanager
def _whole_or_absent(partial: Path, iteration: int) -> Iterator[None]:
    """Where it fails inside, the part that was written goes, and a disk at fault is said in words."""
    root = partial.parent
    try:
        yield
    except Exception as error:
        free = _free_bytes(root)  # before the part that was written goes
        shutil.rmtree(partial, ignore_errors=True)
        reason = _disk_trouble(error)
        if reason is None:
            raise
        raise RlhfsimError(
            "checkpoint-not-written",
            f"cannot write the checkpoint of iteration {iteration}: {reason} ({free})",
            place=Place(file=str(root)),
            help="free space on this disk or choose another folder; older checkpoints remain",
        ) from error


def _seal(folder: Path, progress: RunProgress, identity: RunIdentity) -> None:
    for role, shape in identity.world.items():
        files = sum(path.is_file() for path in (folder / role).rglob("*"))
        if files < shape["ranks"]:
            raise RlhfsimError(
                "checkpoint-incomplete",
                f"{role} wrote {files} files for {shape['ranks']} ranks",
                place=Place(file=str(folder)),
                help="the folder must be on a file system that all nodes share",
            )
    state = {"identity": asdict(identity), "progress": asdict(progress)}
    # numpy scalars and arrays become plain JSON
    write_synced(folder / STATE, json.dumps(state, indent=1, default=lambda value: value.tolist()) + "\n")
    write_manifest(folder)


def _remove(folder: Path) -> None:
    """Rename, then delete: a kill in between leaves no half folder under its name."""
    trash = folder.with_name(f"{LEFTOVER}{folder.name}-{secrets.token_hex(4)}")
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _prune(root: Path, keep: int, best: bool) -> None:
    """Remove what is older than the newest `keep` that look whole (by size: contents were just written)."""
    folders = _folders(root)
    whole = [path for path in folders if not problems(path, contents=False)]
    stays = top[0] if best and (top := best_of(root)) else None
    for path in folders[folders.index(whole[keep - 1]) + 1 :] if len(whole) > keep else ():
        if path != stays:
            _remove(path)


def best_of(root: Path) -> tuple[Path, float] | None:
    """Folder and score of the whole checkpoint that was evaluated best, of equal ones the newest."""
    scored = [
        (path, float(score))
        for path in _folders(root)
        if not problems(path, contents=False) and (score := _score(path)) is not None
    ]
    return max(scored, key=lambda pair: pair[1], default=None)


def _score(folder: Path) -> float | None:
    try:
        return _read(folder).progress.score
    except (RlhfsimError, *_UNREADABLE):
        return None


def _disk_trouble(error: BaseException) -> str | None:
    """The reason in words where the disk is at fault, here or (by its message) in a worker."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and not isinstance(cause, ConnectionError | TimeoutError):
            return (cause.strerror or os.strerror(cause.errno or errno.EIO)).lower()
        reason = next((why for words, why in _DISK_WORDS.items() if words in str(cause).lower()), None)
        if reason:
            return reason
        cause = cause.__cause__
    return None


def _free_bytes(root: Path) -> str:
    try:
        return f"{shutil.disk_usage(root).free:,} bytes free"
    except OSError:
        return "free space unknown"


# --- load -------------------------------------------------------------------------------------------


def newest(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint, every byte verified; broken ones are skipped with a warning."""
    return next((checkpoint for folder in _folders(root) if (checkpoint := _try_read(folder))), None)


def _try_read(folder: Path) -> Checkpoint | None:
    """The checkpoint, or None and a warning that names what is wrong."""
    faults = problems(folder)
    if not faults:
        try:
            return _read(folder)
        except RlhfsimError as error:
            faults = [f"{STATE}: {error.message}"]
        except _UNREADABLE as error:
            faults = [f"{STATE} cannot be read: {type(error).__name__} {str(error)[:200]}"]
    more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    logger.warning("checkpoint %s is broken and is skipped: %s%s", folder, "; ".join(faults[:_SHOWN]), more)
    return None


def _folders(root: Path) -> list[Path]:
    """Newest first."""
    folders = [p for p in root.glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(folders, key=_number, reverse=True)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _read(folder: Path) -> Checkpoint:
    data = json.loads(read_text(folder / STATE, MAX_STATE))  # NaN may be among the metrics
    progress = data["progress"] | {"metrics": tuple(data["progress"]["metrics"])}
    source = Source(str(folder / STATE), "", data)
    known = convert(RunProgress, source, progress)
    if not all(isinstance(value, int | float) for row in progress["metrics"] for value in row.values()):
        raise TypeError("a metric is not a number")
    return Checkpoint(
        folder=folder,
        identity=convert(RunIdentity, source, data["identity"]),
        progress=replace(known, metrics=progress["metrics"]),
    )


def check_resumable(checkpoint: Checkpoint, wanted: RunIdentity, *, other_plan: bool = False) -> None:
    """Refuse a checkpoint of ranks that do not fit or, without `other_plan`, of another plan.

    Other settings are said.

    Raises:
        RlhfsimError: names what differs.
    """
    saved = checkpoint.identity
    if not _fits(saved.world, wanted.world):
        code, what, differing = "checkpoint-of-other-ranks", "ranks", differences(saved.world, wanted.world)
    else:
        code, what = "checkpoint-of-other-plan", "inputs of the plan"
        differing = differences(saved.inputs, wanted.inputs)
        differing = differing or [f"its hash was {saved.plan_hash}, it is {wanted.plan_hash}"]
    if not _fits(saved.world, wanted.world) or (saved.plan_hash != wanted.plan_hash and not other_plan):
        raise RlhfsimError(
            code,
            f"the checkpoint was written with other {what}: {'; '.join(differing)}",
            place=Place(file=str(checkpoint.folder)),
            help="run with the plan of this folder (plan.json), or start afresh in another folder",
        )
    if saved.settings_hash != wanted.settings_hash:
        logger.warning("settings differ from those that wrote %s", checkpoint.folder)


def _fits(saved: _World, wanted: _World) -> bool:
    """Whether ranks and degrees are those that saved, or others by which the states can be cut anew."""
    if saved == wanted:
        return True
    split = any(shape.get(name, 1) > 1 for shape in saved.values() for name in ("tp", "pp", "cp", "ep"))
    return not split and _others(saved) == _others(wanted)


def _others(world: _World) -> dict[str, dict[str, int]]:
    return {role: {k: v for k, v in shape.items() if k not in RESHARDED} for role, shape in world.items()}


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """Leaves of plain data that differ, as `actor.dp was 2, is 4`; at most five and a count."""
    leaves = list(_leaves(before, now, path))
    more = [f"{len(leaves) - _SHOWN} more"] if len(leaves) > _SHOWN else []
    return leaves[:_SHOWN] + more


def _leaves(before: Any, now: Any, path: str) -> list[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = dict.fromkeys([*before, *now])
        return [
            text
            for name in names
            for text in _leaves(before.get(name), now.get(name), f"{path}.{name}".lstrip("."))
        ]
    # a plan gives tuples where its JSON gives lists
    same = json.dumps(before, default=str) == json.dumps(now, default=str)
    return [] if same or before == now else [f"{path} was {_short(before)}, is {_short(now)}"]


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
