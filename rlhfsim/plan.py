"""The plan: what the planner chose and what it predicts; the first contract with the executor.

`plan.json` carries all that a launch needs, so a GPU node reads it without simulator or plots.
Schema `rlhfsim.plan/1` is documented in docs/plan.md; a change of meaning raises the number.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.specs.loading import checked, convert, parse_json, read_text
from rlhfsim.specs.placement import Architecture, Placement, RolePlacementLabel
from rlhfsim.specs.workload import Workload

SCHEMA: Literal["rlhfsim.plan/1"] = "rlhfsim.plan/1"


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """One model of the plan and where its shapes come from."""

    role: str
    name: str
    path: str
    """What the user gave: preset, alias or path; the executor loads weights from here."""
    params: float
    active_params: float
    shape_hash: str


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHardware:
    """One pool of equal nodes."""

    profile: str
    profile_hash: str
    """Hash of the profile's content: another hash is another prediction."""
    gpus: int
    gpus_per_node: int


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class RoleGpus:
    """Where the ranks of one seat run: `nodes[i]` holds ranks in order."""

    seat: str
    nodes: tuple[int, ...]
    """Node of each rank."""
    gpus: tuple[int, ...]
    """GPU index inside that node, of each rank."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPhase:
    """One phase of the predicted step."""

    name: str
    pool: str
    start_s: float
    seconds: float
    low_s: float
    high_s: float
    bound_by: str
    by_resource_s: dict[str, float]
    rests_on: tuple[str, ...]
    critical: bool
    """Whether the step would be shorter if this phase were."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Bytes of one component of one role on a GPU of `pool` during `phase`."""

    phase: str
    pool: str
    role: str
    component: str
    bytes: float
    low_bytes: float
    high_bytes: float


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says about the plan."""

    step_s: float
    low_s: float
    high_s: float
    tokens_per_s_per_gpu: float
    """Prompt and response tokens of the step / step time / all GPUs."""
    peak_memory_bytes: float
    peak_phase: str
    peak_role: str
    peak_component: str
    capacity_bytes: float
    probability_out_of_memory: float
    host_peak_bytes: float
    usd_per_step: float | None
    """None: no price known for this hardware."""
    kwh_per_step: float
    kg_co2e_per_step: float
    phases: tuple[PredictedPhase, ...]
    ledger: tuple[LedgerEntry, ...]


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A chosen placement with workload, hardware, prediction and provenance."""

    schema: Literal["rlhfsim.plan/1"] = SCHEMA
    rlhfsim_version: str
    architecture: Architecture
    role_placement: RolePlacementLabel
    hardware: tuple[PlannedHardware, ...]
    oversubscription: float
    models: tuple[PlannedModel, ...]
    workload: Workload
    placement: Placement
    gpu_map: tuple[RoleGpus, ...]
    prediction: Prediction
    input_hash: str
    """Hash of workload, placement and hardware: two plans with one hash price the same thing."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        plain: dict[str, Any] = TypeAdapter(Plan).dump_python(self, mode="json")
        return plain


def read_plan(path: str | Path) -> Plan:
    """A plan from `plan.json`.

    Raises:
        RlhfsimError: unreadable, malformed, or of another schema version.
    """
    source = parse_json(read_text(Path(path)), str(path))
    if not isinstance(source.data, dict) or source.data.get("schema") != SCHEMA:
        raise RlhfsimError("not-a-plan", f"this is not a plan of schema {SCHEMA}", place=Place(file=str(path)),
                           help="write one with: rlhfsim design --out plan.json")  # fmt: skip
    return convert(Plan, source)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` in one step; a reader sees the old file or the new one, never a part."""
    try:
        handle, name = tempfile.mkstemp(
            dir=path.parent or Path(), prefix=f".{path.name}.", text=True
        )
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise RlhfsimError("unwritable-file", f"cannot write: {(error.strerror or 'error').lower()}", place=Place(file=str(path)),
                           help="check that the folder exists and is writable") from error  # fmt: skip


def write_plan(path: str | Path, plan: Plan) -> None:
    """Write `plan.json` atomically."""
    write_atomically(Path(path), json.dumps(plan.to_dict(), indent=1) + "\n")


def content_hash(*parts: Any) -> str:
    """A short stable hash of plain data or dataclasses; 1 and 1.0 are the same number."""
    text = json.dumps(
        [_plain(asdict(p) if hasattr(p, "__dataclass_fields__") else p) for p in parts],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(data: Any) -> Any:
    """Whole floats as integers: a default 0 comes back from a file as 0.0."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data
