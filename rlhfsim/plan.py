"""The plan: what the planner chose and what it predicts; the first contract with the executor.

`plan.json` carries all that a launch needs, so a GPU node reads it without simulator or plots.
Schema `rlhfsim.plan/1` is documented in docs/plan.md; a change of meaning raises the number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, TypeAdapter

from rlhfsim.choice import Choice
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.outputs import write_atomically
from rlhfsim.provenance import content_hash
from rlhfsim.specs.hardware.hardware import MAX_OVERSUBSCRIPTION, Count, Fabric, Price
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.loading import Source, checked, convert, parse_json, read_text
from rlhfsim.specs.placement.placement import Architecture, Placement, RolePlacementLabel
from rlhfsim.specs.placement.weight_paths import Topology, topology
from rlhfsim.specs.quantities import MAX_MAGNITUDE, AboveZero, Amount, Positive, Share
from rlhfsim.specs.workload.workload import Workload

SCHEMA: Literal["rlhfsim.plan/2"] = "rlhfsim.plan/2"
PREDICTED = "prediction_hash"
"""Key of a file: what was predicted is as it was written; not in older ones."""
OLDER = "rlhfsim.plan/1"
"""Still read: it said `seat` for role, and `flips` for break-evens."""


Whole = Annotated[int, Field(ge=0, le=10**15)]


@checked
@frozen
class PlannedModel:
    """One model of the plan and where its shapes come from."""

    role: str
    name: str
    path: str
    """What the user gave: preset, alias or path; the executor loads weights from here."""
    params: Amount
    active_params: Amount
    shape_hash: str


@checked
@frozen
class PlannedHardware:
    """One pool of equal nodes."""

    profile: str
    profile_hash: str
    """Hash of the profile's content: another hash is another prediction."""
    gpus: Count
    gpus_per_node: Count
    fabric: Fabric | None = None
    """What joins the nodes, where it was given."""
    wan: WanLink | None = None
    """The link to the nodes that train, where these are in another region."""
    price: Price | None = None
    """Rent of one GPU that the plan was priced with; None: not known, or not said."""
    market: str | None = None
    """Whose listed price that is (on-demand, reserved, spot); None: given, not known, and in older files."""


@checked
@frozen
class RoleGpus:
    """Where the ranks of one role run: `nodes[i]` holds ranks in order."""

    role: Annotated[str, Field(validation_alias=AliasChoices("role", "seat"))]
    nodes: tuple[Whole, ...]
    """Node of each rank."""
    gpus: tuple[Whole, ...]
    """GPU index inside that node, of each rank."""

    def __post_init__(self) -> None:
        """Every rank has both."""
        if len(self.nodes) != len(self.gpus):
            raise RlhfsimError(
                "uneven-gpu-map",
                f"{self.role}: {len(self.nodes)} nodes and {len(self.gpus)} GPUs",
                help="one of each a rank",
            )


@checked
@frozen
class PredictedPhase:
    """One phase of the predicted step."""

    name: str
    pool: str
    start_s: Amount
    seconds: Amount
    low_s: Amount
    high_s: Amount
    bound_by: str
    by_resource_s: dict[str, Amount]
    rests_on: tuple[str, ...]
    critical: bool
    """Whether the step would be shorter if this phase were."""
    work_s: Amount | None = None
    """All the work of a call on samples as they arrive, of which `seconds` is what is left after
    the last sample and what it waits for; else None."""
    limit_s: Amount | None = None
    """What it would take at the peak rates of its GPUs (`rlhfsim.step.speed_of_light`); None where no such
    limit is known, and in older files."""


@checked
@frozen
class LedgerEntry:
    """Bytes of one component of one role on a GPU of `pool` during `phase`."""

    phase: str
    pool: str
    role: str
    component: str
    bytes: Amount
    low_bytes: Amount
    high_bytes: Amount


@checked
@frozen
class Prediction:
    """What the cost model says about the plan."""

    step_s: AboveZero
    low_s: Amount
    high_s: Amount
    centre: AboveZero = 1.0
    """P50 of a step over `step_s`: the bias of published runs like it (`step.groups`); 1 in older files."""
    tokens_per_s_per_gpu: Amount
    """Prompt and response tokens of the step / step time / all GPUs."""
    peak_memory_bytes: Amount
    peak_phase: str
    peak_role: str
    peak_component: str
    capacity_bytes: Annotated[float, Positive]
    probability_out_of_memory: Share
    rejected_by: str = ""
    """What does not fit, in words; empty: all does, or the file is older."""
    host_peak_bytes: Amount
    usd_per_step: Amount | None
    """None: no price known for this hardware."""
    kwh_per_step: Amount
    kg_co2e_per_step: Amount
    generated_tokens: Amount = 0.0
    """Response tokens that a step generates."""
    discarded_tokens: Amount = 0.0
    """Response tokens of a step that are generated and not trained on."""
    phases: tuple[PredictedPhase, ...]
    ledger: tuple[LedgerEntry, ...]


@checked
@frozen
class NearestRun:
    """The published run that is most like the plan, our error there with its publisher in no fit."""

    framework: str
    """With its release where that is known."""
    model: str
    gpu: str
    """Name of its profile."""
    gpus: Count
    algorithm: str
    error: Annotated[float, Field(ge=-1, le=MAX_MAGNITUDE)]
    """(predicted - measured) / measured."""
    distance: Amount
    near: bool
    """Whether it says something about the plan."""
    differs: tuple[str, ...]
    """In what it differs, the heaviest first."""
    source: str
    """Publication."""


@checked
@frozen
class RunTarget:
    """One target of the run, and how likely the plan meets it."""

    name: str
    """`deadline`, `budget`, or quantity and relation: `step_time<`; tells targets apart."""
    quantity: str
    relation: Literal["<", "<=", ">", ">="]
    value: Amount
    """In base units; a share of the capacity where `share`."""
    text: str
    """As it was asked for."""
    share: bool = False
    probability: Share | None = None
    """That the plan meets it; None where nothing is drawn."""


Quantiles = tuple[Amount, Amount, Amount]
"""P10, median and P90."""


@checked
@frozen
class RunOdds:
    """The run in draws: failures, restarts, checkpoints and prices with their ranges."""

    fits: Share
    together: Share
    """Probability that the plan fits and meets every target that is drawn."""
    step_s: Quantiles
    """Seconds of the mean step."""
    run_s: Quantiles | None = None
    """Seconds of the whole run; None without its length."""
    usd: Quantiles | None = None
    """Price of the run, or of a step without its length; None where a price is unknown."""


@checked
@frozen
class AskedRun:
    """The run that the plan was asked for: its length, its targets, and what is predicted of them."""

    steps: Count | None = None
    """None: the targets are those of a step."""
    targets: tuple[RunTarget, ...] = ()
    confidence: Share | None = None
    """Probability with which it had to fit and meet all targets in one; None: there are no targets."""
    odds: RunOdds | None = None
    """None where nothing was drawn yet."""

    @property
    def question(self) -> AskedRun:
        """The run as it was asked for, without what was predicted of it."""
        targets = tuple(replace(target, probability=None) for target in self.targets)
        return replace(self, targets=targets, odds=None)


@checked
@frozen
class Plan:
    """A chosen placement with workload, hardware, prediction and provenance."""

    schema: Literal["rlhfsim.plan/2"] = SCHEMA
    rlhfsim_version: str
    architecture: Architecture
    role_placement: RolePlacementLabel
    hardware: tuple[PlannedHardware, ...]
    oversubscription: Annotated[float, Field(ge=1, le=MAX_OVERSUBSCRIPTION)]
    framework: str | None = None
    """Whose software costs it was priced with; None: pooled over all frameworks, and in older files."""
    models: tuple[PlannedModel, ...]
    workload: Workload
    placement: Placement
    gpu_map: tuple[RoleGpus, ...]
    prediction: Prediction
    input_hash: str
    """Hash of workload, placement and hardware: two plans with one hash price the same thing."""
    nearest: NearestRun | None = None
    """None in older files, and where its profile was calibrated on runs of one's own."""
    assumed: tuple[str, ...] = ()
    """What was left open and is as its framework has it. No launch reads it."""
    choice: Choice | None = None
    """How a search came to it; None: the plan was given. No launch reads it."""
    run: AskedRun | None = None
    """None where neither steps nor a target were given, and in older files. No launch reads it."""

    @property
    def run_s(self) -> float | None:
        """Seconds of the run that was asked for, without failures; None where its length was not given."""
        steps = self.run.steps if self.run else None
        return None if steps is None else steps * self.prediction.step_s

    @property
    def run_usd(self) -> float | None:
        """Rent of that run; None where its length or a price is not known."""
        steps, usd = self.run.steps if self.run else None, self.prediction.usd_per_step
        return None if steps is None or usd is None else steps * usd

    def gpus_of(self, role: str) -> tuple[tuple[int, int], ...]:
        """(node, GPU inside it) of every rank of a role."""
        return next(tuple(zip(m.nodes, m.gpus, strict=True)) for m in self.gpu_map if m.role == role)

    @property
    def idle_gpus(self) -> int:
        """GPUs of the cluster on which nothing runs; they are paid for like the others."""
        return sum(h.gpus for h in self.hardware) - sum(pool.gpus for pool in self.placement.pools)

    @property
    def topology(self) -> Topology:
        """How the rollout is placed relative to the policy's training."""
        return topology(self.gpus_of("actor"), self.gpus_of("rollout" if self.placement.rollout else "actor"))

    @property
    def replicas_in_one_node(self) -> bool:
        """Whether no rollout replica spans nodes."""
        if self.placement.rollout is None:
            return True
        each, places = self.placement.rollout.layout.replica_gpus, self.gpus_of("rollout")
        replicas = (places[i : i + each] for i in range(0, len(places), each))
        return all(len({node for node, _ in replica}) == 1 for replica in replicas)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; without `choice`, `framework`, `nearest` and `run` where there is none."""
        plain: dict[str, Any] = _adapter().dump_python(self, mode="json")
        for key in ("choice", "framework", "nearest", "run"):
            if plain[key] is None:
                del plain[key]
        return plain


@cache
def _adapter() -> TypeAdapter[Plan]:
    """What writes plans, built once: that takes longer than to write one."""
    return TypeAdapter(Plan)


def _check_pools(plan: Plan, source: Source) -> None:
    """Refuse a pool that does not lie on hardware of the plan."""
    try:
        plan.placement.check_pools([hardware.gpus for hardware in plan.hardware])
    except RlhfsimError as error:
        raise error.at(source.place(("placement", "pools"))) from error


def _check_roles(plan: Plan, source: Source) -> None:
    """Every placed role has its ranks on the map, once, and a model.

    Raises:
        RlhfsimError: it has not.
    """
    mapped = sorted((at.role, len(at.gpus)) for at in plan.gpu_map)
    placed = sorted((name, role.layout.gpus) for name, role in plan.placement.roles.items())
    if mapped != placed:
        here, there = (", ".join(f"{name} on {ranks}" for name, ranks in x) for x in (mapped, placed))
        raise RlhfsimError(
            "other-gpu-map",
            f"gpu_map has {here or 'nothing'}, the placement {there}",
            place=source.place(("gpu_map",)),
            help="price it anew: rlhfsim estimate plan.json --out new.json",
        )
    lacking = plan.placement.roles.keys() - {"rollout"} - {model.role for model in plan.models}
    if lacking:
        raise RlhfsimError(
            "role-without-model",
            f"the placement has {', '.join(sorted(lacking))}, of which models says nothing",
            place=source.place(("models",)),
            help="price it anew: rlhfsim estimate plan.json --out new.json",
        )


def read_plan(path: str | Path, *, as_priced: bool = False) -> Plan:
    """A plan from `plan.json`; `as_priced`: its prediction is to be shown, so it must be of this very plan.

    Raises:
        RlhfsimError: unreadable, malformed, of another schema version, or edited after it was priced.
    """
    source = parse_json(read_text(Path(path)), str(path))
    schema = source.data.get("schema") if isinstance(source.data, dict) else None
    if schema not in (SCHEMA, OLDER):
        raise RlhfsimError(
            "not-a-plan",
            f"this is not a plan of schema {SCHEMA}",
            place=path,
            help="write one with: rlhfsim design --out plan.json",
        )
    known = {key: value for key, value in source.data.items() if key != PREDICTED}
    plan = convert(Plan, source, _as_now(known) | {"schema": SCHEMA})
    _check_pools(plan, source)
    _check_roles(plan, source)
    if as_priced and not is_as_priced(source.data):
        raise RlhfsimError(
            "edited-plan",
            "this plan was edited after it was priced: a hash in it no longer fits, nor does its prediction",
            place=path,
            help="price it anew: rlhfsim estimate plan.json --out new.json",
        )
    return plan


def _as_now(data: dict[str, Any]) -> dict[str, Any]:
    """A plan's data without what older files say of dispatch in `software`, which no search set."""
    placement = data.get("placement")
    if not isinstance(placement, dict) or not isinstance(placement.get("software"), dict):
        return data
    software = {k: v for k, v in placement["software"].items() if k not in ("token_once", "scheduled_ep")}
    return data | {"placement": placement | {"software": software}}


def is_edited(data: Mapping[str, Any]) -> bool:
    """Whether workload, placement or hardware in a plan's data are not those that it was priced with."""
    names = ("profile_hash", "gpus", "gpus_per_node", "fabric", "wan")
    hardware = [[pool[key] for key in names if pool.get(key) is not None] for pool in data["hardware"]]
    return content_hash(data["workload"], data["placement"], hardware) != str(data["input_hash"])


def is_as_priced(data: Mapping[str, Any]) -> bool:
    """Whether a plan's data are those that it was priced with, and its figures those that came of it."""
    return not is_edited(data) and data.get(PREDICTED, _hash(data)) == _hash(data)


def _hash(data: Mapping[str, Any]) -> str:
    """Hash of what was predicted, and of the run that it was predicted for where there is one."""
    keys = ("prediction", "choice", "nearest", *(["run"] if "run" in data else []))
    return content_hash(*map(data.get, keys))


def write_plan(path: str | Path, plan: Plan) -> None:
    """Write `plan.json` atomically."""
    write_atomically(Path(path), plan_text(plan))


def plan_text(plan: Plan) -> str:
    """What is written in `plan.json`."""
    data = plan.to_dict()
    return json.dumps(data | {PREDICTED: _hash(data)}, indent=1) + "\n"
