"""What fixes a run, and how it was changed: the folder says both, and none of its inputs is overwritten.

<run>/plan.json, settings.yaml, contents.json, ...    as the run was started
<run>/amendments/0001.yaml                            what was changed, when, after which iteration
<run>/amendments/0001/plan.json, settings.yaml, ...   the same files, as they are from then on
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from executor.coordination.checkpoints import differences
from executor.coordination.run_folder import RunFiles, plain
from executor.settings import Settings
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.outputs import write_atomically
from rlhfsim.plan import Plan, read_plan
from rlhfsim.provenance import content_hash, installed_version
from rlhfsim.run_folder import AMENDMENTS, CHANGEABLE, inputs_folder
from rlhfsim.specs.loading import convert, load, parse_json, read_text

SCHEMA = "rlhfsim.amendment/1"
LENGTH = "iterations"
"""The one change that needs no leave: how long the run is."""
_PART = {
    "data": "data",
    "evaluation.data": "data",
    "model": "model",
    "critic_model": "model",
    "reward_model": "model",
    "reference_model": "model",
    "reward_head": "model",
    "rewards": "rewards",
    "evaluation.rewards": "rewards",
    "reward_model_weight": "rewards",
    "environment": "rewards",
    LENGTH: LENGTH,
}
"""Setting -> the part of the inputs that it belongs to; others are `settings`."""
_OTHERWISE = {"data": "the rows", "model": "the files of a model", "rewards": "the code of a function"}
_OTHERWISE |= {"settings": "the code of a part of the algorithm"}
"""Part -> what its content hash is of."""


@frozen
class Inputs:
    """What fixes a run."""

    plan: Plan
    settings: Settings
    contents: Mapping[str, str]
    """Part -> hash of the rows, weights or code that settings name; absent: not known."""


@frozen
class InputChange:
    """One part of the inputs that is another than before."""

    part: str
    before: str
    """Its hash."""
    after: str
    what: tuple[str, ...]
    """In words."""


def recorded(root: Path) -> Inputs | None:
    """The inputs that a run folder holds, with all amendments; None: no run was started in it.

    Raises:
        RlhfsimError: a file of them cannot be read.
    """
    files = RunFiles(inputs_folder(root))
    if not (files.plan.is_file() and files.settings.is_file()):
        return None
    contents: dict[str, str] = {}
    if files.contents.is_file():
        contents = convert(dict[str, str], parse_json(read_text(files.contents), str(files.contents)))
    return Inputs(plan=read_plan(files.plan), settings=load(Settings, files.settings), contents=contents)


def changes(before: Inputs, now: Inputs) -> list[InputChange]:
    """Parts that differ; contents that one side does not know are not compared."""
    old, new = _parts(before), _parts(now)
    return [change for part in old if (change := _change(part, old[part], new[part], before, now))]


def _change(part: str, old: Any, new: Any, before: Inputs, now: Inputs) -> InputChange | None:
    contents = before.contents.get(part), now.contents.get(part)
    what = differences(old, new)
    if None not in contents and contents[0] != contents[1]:
        what.append(f"{_OTHERWISE[part]} differ")
    hashes = [content_hash(fields, content) for fields, content in zip((old, new), contents, strict=True)]
    return InputChange(part=part, before=hashes[0], after=hashes[1], what=tuple(what)) if what else None


def _parts(inputs: Inputs) -> dict[str, dict[str, Any]]:
    """Part -> what plan and settings say of it."""
    whole = inputs.plan.to_dict()
    parts: dict[str, dict[str, Any]] = {part: {} for part in (*CHANGEABLE, LENGTH)}
    parts["plan"] = {name: whole[name] for name in ("workload", "placement", "hardware")}
    for name, value in _fields(inputs.settings):
        parts[_PART.get(name, "settings")][name] = value
    return parts


def _fields(settings: Settings) -> Iterator[tuple[str, Any]]:
    """Settings by name, those of the evaluation each for itself."""
    for name, value in plain(asdict(settings)).items():
        if name == "evaluation":
            yield from ((f"{name}.{inner}", item) for inner, item in value.items())
        else:
            yield name, value


def check_allowed(found: Sequence[InputChange], allowed: Collection[str], root: Path) -> None:
    """Refuse changes of a run that goes on, unless they were asked for by name.

    Raises:
        RlhfsimError: names what differs.
    """
    refused = [change for change in found if change.part != LENGTH and change.part not in allowed]
    if refused:
        words = "; ".join(f"{change.part}: {', '.join(change.what)}" for change in refused)
        raise RlhfsimError(
            "run-changed",
            f"the run in this folder would go on with other inputs: {words}",
            place=Place(file=str(root)),
            help="leave it out (rlhfsim launch --resume FOLDER is enough), take another folder for another "
            f"run, or record it: --change {','.join(change.part for change in refused)}",
        )


def next_folder(root: Path) -> Path:
    """Where the inputs of the next amendment are written."""
    numbers = [int(path.stem) for path in (root / AMENDMENTS).glob("*.yaml") if path.stem.isdigit()]
    return root / AMENDMENTS / f"{max(numbers, default=0) + 1:04d}"


def record(folder: Path, found: Sequence[InputChange], iteration: int) -> Path:
    """Write the amendment whose inputs are in `folder`: from now on it counts."""
    entry = {
        "schema": SCHEMA,
        "number": int(folder.name),
        "after_iteration": iteration,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "rlhfsim": installed_version("rlhfsim"),
        "changes": [{"part": c.part, "from": c.before, "to": c.after, "what": list(c.what)} for c in found],
    }
    path = folder.with_suffix(".yaml")
    write_atomically(path, yaml.safe_dump(entry, sort_keys=False, width=100))
    return path
