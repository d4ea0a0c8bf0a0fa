"""A what-if scenario as its file has it: `scenarios/NAME.yaml` (docs/whatif.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rlhfsim import resources
from rlhfsim.errors import Place, RlhfsimError, unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.search.request import Objective, known_switch
from rlhfsim.search.role_fields import ROLE_FIELDS, RoleName
from rlhfsim.specs.hardware.clusters import ClusterText
from rlhfsim.specs.loading import Source, checked, convert, parse_yaml, read_text
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.placement import Architecture
from rlhfsim.specs.placement.weight_paths import WeightPath
from rlhfsim.specs.quantities import Bytes, Positive, Ratio, Seconds, Text
from rlhfsim.specs.ranges import Lag, PoolGpus, Risk, SearchTime, Steps
from rlhfsim.specs.workload.workload import Workload, with_usual_kl
from rlhfsim.what_if.dotted_paths import Names

Switch = Annotated[str, AfterValidator(known_switch)]
"""What may be allowed, refused with its place in a file where it is unknown."""

FieldName = Annotated[str, Names(tuple(ROLE_FIELDS))]
Of = Literal["step_time", "time_of_run", "cost_per_step", "cost_of_run"]
Above = Annotated[Seconds, Field(gt=0)]
RunSteps = Annotated[int, Field(ge=1, le=1_000_000)]
"""Steps of a run whose time is drawn."""
AskedWork = Annotated[Workload, BeforeValidator(with_usual_kl)]
"""What a step of a job has to do."""
MAX_SCENARIO = 100
"""Named points, break-evens and inputs of a tornado that one scenario may have of each."""


@checked
@frozen
class RequestText:
    """What may compete: the fields of `rlhfsim.Request`."""

    backend: Backend | None = None
    framework: str | None = None
    objective: Objective = "time"
    allow: frozenset[Switch] = frozenset()
    forbid: frozenset[str] = frozenset()
    fix: dict[RoleName, dict[FieldName, int | str]] = field(default_factory=dict)
    """Role -> field -> value; a text `<=4`, `>=4` or `!=4` bounds it."""
    architecture: Architecture | None = None
    weight_path: WeightPath | None = None
    max_gpus_per_role: PoolGpus | None = None
    max_staleness: Lag = 1
    max_oom: Risk = 0.1
    max_memory: Annotated[Bytes, Positive] | None = None
    time_limit: SearchTime | None = None
    """Longest search of one point; its gap is shown."""
    second_pool: Literal["rollout", "any"] = "rollout"
    """Whether the second of two pools serves the rollout alone, or every role may sit on either."""


@checked
@frozen
class PenaltyText:
    """How many more steps stale samples cost."""

    per_version: Annotated[Ratio, Field(le=10)]
    """Share of the steps that each version of lag adds."""
    source: Text


@checked
@frozen
class FaultsText:
    """Failures or preemptions of nodes, and what the run does about them."""

    restart: Seconds
    """From a failure until the run goes on."""
    checkpoint: Above
    """Time that one checkpoint blocks the run."""
    checkpoint_interval: Above | None = None
    """Useful time between checkpoints; default: the best one (Daly 2006)."""
    source: Text
    mtbf: Above | None = None
    """Mean time between failures of one node; default: the published rate (`mtbf_per_gpu` of the profile)."""


@checked
@frozen
class RunText:
    """How long the run is: its steps, or a curve and a target."""

    steps: Steps | None = None
    curve: Text | None = None
    """A CSV of step and value, measured by the user; relative to the scenario's folder."""
    target: float | None = None
    """The value of the curve at which the run ends."""
    staleness_penalty: PenaltyText | None = None
    faults: FaultsText | None = None

    def __post_init__(self) -> None:
        """Steps or a curve, not both; a curve has its target."""
        if self.steps is not None and self.curve is not None:
            raise RlhfsimError(
                "two-lengths",
                "the run has both steps and a curve",
                help="give one of them; a patch removes the other with null",
            )
        if (self.curve is None) != (self.target is None):
            raise RlhfsimError(
                "curve-and-target",
                "a curve needs a target, and a target a curve",
                help="as in run: {curve: reward.csv, target: 0.7}",
            )


@checked
@frozen
class Base:
    """The question that every point changes."""

    cluster: ClusterText
    workload: Workload
    request: RequestText = field(default_factory=RequestText)
    run: RunText = field(default_factory=RunText)


@checked
@frozen
class PointText:
    """One named patch."""

    name: Annotated[str, Field(min_length=1, max_length=60)]
    set: Annotated[dict[str, Any], Field(min_length=1)]
    """Dotted path -> value; `4x` is four times the base's, null removes."""


@checked
@frozen
class BreakEvenText:
    """A question of the form: from which value on does one point win, or meet a target?"""

    question: str = ""
    vary: Text
    between: tuple[Any, Any] | None = None
    """The ends of a range."""
    among: Annotated[tuple[Any, ...], Field(min_length=2, max_length=200)] | None = None
    """Or values that are tried one by one."""
    of: Of
    point: str = "base"
    against: str | None = None
    """Another point, or `base`."""
    target: float | str | None = None
    """Or a value that is met at or below."""
    vary_in: Literal["both", "point"] = "both"
    """Whether what is held against the point varies too."""
    tolerance: Annotated[Ratio, Field(ge=1e-6, le=0.2)] = 0.01
    """Relative width to which a crossing is narrowed."""

    def __post_init__(self) -> None:
        """One kind of range, one thing to be held against."""
        if (self.between is None) == (self.among is None):
            raise RlhfsimError(
                "between-or-among",
                "a break-even has one of between and among",
                help="as in between: [1 USD/h, 8 USD/h]",
            )
        if (self.against is None) == (self.target is None):
            raise RlhfsimError(
                "against-or-target",
                "a break-even has one of against and target",
                help="as in against: base, or target: 7 d",
            )


@checked
@frozen
class TornadoText:
    """Inputs that are moved one at a time."""

    vary: Annotated[dict[str, tuple[Any, Any]], Field(min_length=1, max_length=MAX_SCENARIO)]
    """Dotted path -> low and high."""


@checked
@frozen
class Document:
    """The whole file."""

    title: Text
    question: str = ""
    assumptions: tuple[Text, ...] = ()
    """What the author takes for granted; shown with the answer."""
    base: Base
    points: Annotated[tuple[PointText, ...], Field(max_length=MAX_SCENARIO)] = ()
    grid: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = field(default_factory=dict)
    """Dotted path -> values; every combination is a point."""
    break_even: Annotated[tuple[BreakEvenText, ...], Field(max_length=MAX_SCENARIO)] = ()
    tornado: TornadoText | None = None


def scenario_names() -> tuple[str, ...]:
    """Shipped scenarios."""
    return tuple(sorted(path.stem for path in resources.shipped("scenarios").glob("*.yaml")))


def read_scenario(given: str | Path | Mapping[str, Any]) -> Source:
    """A scenario by path, by the name of a shipped one, or as a mapping.

    Raises:
        RlhfsimError: no such file or name, or not YAML.
    """
    if isinstance(given, Mapping):
        import json

        return Source("mapping", json.dumps(given, indent=1), dict(given))
    path = Path(given)
    if path.suffix not in (".yaml", ".yml", ".json"):
        if path.is_file():
            raise RlhfsimError(
                "not-a-scenario",
                f"{path.name} is no scenario by its name",
                place=Place(file=str(path)),
                help="scenarios are .yaml, .yml or .json files",
            )
        shipped = resources.shipped("scenarios") / f"{path.name}.yaml"
        if not shipped.is_file():
            raise unknown_name(
                "scenario", str(given)[:60], scenario_names(), place=Place(file="command line")
            )
        path = shipped
    return parse_yaml(read_text(path), str(path))


def document_of(source: Source) -> Document:
    """The scenario in a parsed file.

    Raises:
        RlhfsimError: the first thing wrong, with its place.
    """
    if not isinstance(source.data, Mapping):
        raise RlhfsimError(
            "not-a-mapping",
            "a scenario is a mapping",
            place=source.place(),
            help="keys: title, question, assumptions, base, points, grid, break_even, tornado",
        )
    return convert(Document, source)
