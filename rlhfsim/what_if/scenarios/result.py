"""What a what-if returns: every point with its plan, sensitivities, break-evens, and where it all comes from.

Schema `rlhfsim.whatif/1` (docs/whatif.md). Numbers are in base units. Time and money of a point are those
of its run where the scenario says how long a run is, else those of a step (`WhatIf.per`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.extras import need
from rlhfsim.frozen import frozen
from rlhfsim.outputs import csv_cell, write_atomically
from rlhfsim.plan import Plan
from rlhfsim.specs.loading import adapter, checked, convert, parse_json, read_text
from rlhfsim.specs.quantities import AboveZero, Amount, Finite, Share
from rlhfsim.units import MIB, Dimension
from rlhfsim.what_if.dotted_paths import keys, value_at
from rlhfsim.what_if.work import StepWork, work_of

if TYPE_CHECKING:
    import pandas as pd

SCHEMA: Literal["rlhfsim.whatif/1"] = "rlhfsim.whatif/1"
PARQUET = ".parquet"
SUFFIXES = (".csv", PARQUET)
"""Suffixes of the table of points as a file."""
MAX_BYTES = int(256 * MIB)
"""Largest result that is read."""


@checked
@frozen
class PointTarget:
    """A target against a point."""

    text: str
    """As the user wrote it: `step_time<90s`."""
    quantity: str
    actual: Finite | None
    """What the plan reaches, in base units; None where a price is unknown."""
    met: bool
    probability: Share | None
    """That the point meets it, by the joint draw of steps, failures and prices; None where none is drawn."""


@checked
@frozen
class PointResult:
    """One point of the scenario with the best plan that was found for it."""

    name: str
    changes: dict[str, Any]
    """What it sets, by dotted path of the base; empty for the base itself."""
    before: dict[str, Any] = field(default_factory=dict)
    """What the base has there; null where it leaves the choice to a default."""
    plan: Plan | None
    """None: nothing fits."""
    shortage: str | None = None
    """Where nothing fits: what the nearest plan lacks."""
    gap: Amount = 0.0
    """Share of the step by which a plan could still be shorter, where a time limit ended the search."""
    length: AboveZero | None = None
    """Steps of the run without those for staleness; None: the scenario does not say."""
    target: Finite | None = None
    """Value of a measured curve at which the run ends."""
    steps: AboveZero | None = None
    """Steps of the run, those for staleness included; None: the scenario does not say."""
    run_s: AboveZero | None = None
    """Seconds of the whole run, failures and checkpoints included."""
    run_low_s: AboveZero | None = None
    """P10, from the interval of the step; steps and goodput are taken as given."""
    run_high_s: AboveZero | None = None
    """P90, likewise."""
    run_usd: Amount | None = None
    """None: no length of the run, or a price that is not known."""
    goodput: Share | None = None
    """Share of the time that makes progress; None: the scenario has no failures."""
    on_front: bool = False
    """Whether no other point does the same work as fast and as cheaply."""
    other_work: tuple[str, ...] = ()
    """What of its work is not as in the base (fields of `work`): then both are compared by the sample."""
    targets: tuple[PointTarget, ...] = ()
    """What was asked of every point; empty where nothing fits."""
    notes: tuple[str, ...] = ()
    """What a reader must know to believe it."""
    input_hash: str = ""
    """Hash of everything that enters the result: equal hashes give equal results."""

    @property
    def gpus(self) -> int | None:
        """GPUs of the whole cluster; None where nothing fits."""
        return sum(h.gpus for h in self.plan.hardware) if self.plan else None

    @property
    def work(self) -> StepWork | None:
        """What its step, or its run, has to do; None where nothing fits."""
        return work_of(self.plan, steps=self.length, target=self.target) if self.plan else None

    @property
    def seconds(self) -> float | None:
        """Seconds of the run, or of a step where the scenario gives no run."""
        if self.plan is None:
            return None
        return self.plan.prediction.step_s if self.run_s is None else self.run_s

    @property
    def usd(self) -> float | None:
        """Price of the run, or of a step; None where nothing fits or a price is not known."""
        if self.plan is None:
            return None
        return self.run_usd if self.run_s is not None else self.plan.prediction.usd_per_step


@checked
@frozen
class TornadoBar:
    """What one input moves, all others as in the base; None: nothing fits there, or no price is known."""

    path: str
    low_label: str
    """The low value as people read it."""
    high_label: str
    base_label: str
    low_s: AboveZero | None
    base_s: AboveZero | None
    high_s: AboveZero | None
    low_usd: Amount | None
    base_usd: Amount | None
    high_usd: Amount | None
    other_work: tuple[str, ...] = ()
    """What of the work the input changes."""

    @property
    def swing(self) -> float:
        """The largest relative change of time or money that it makes: what bars are ordered by."""
        return max(
            _swing(self.base_s, self.low_s, self.high_s), _swing(self.base_usd, self.low_usd, self.high_usd)
        )


def _swing(base: float | None, *ends: float | None) -> float:
    return max((abs(e / base - 1) for e in ends if e is not None), default=0.0) if base else 0.0


@checked
@frozen
class Tried:
    """One value at which both sides of a break-even were designed anew; None: nothing fits."""

    x: Finite
    a: Finite | None
    """The point."""
    b: Finite | None
    """What it is held against."""


@checked
@frozen
class PointBreakEven:
    """Where one point becomes as good as another one, or meets a target."""

    question: str
    path: str
    """What is varied."""
    unit: Dimension
    """Unit of `value`, `low`, `high` and `x`."""
    of: str
    """The quantity that is compared: step_time, time_of_run, cost_per_step, cost_of_run."""
    of_unit: Dimension
    """Unit of `a` and `b`."""
    value: Finite | None
    """The crossing; the first of several; None: there is none."""
    crossings: tuple[Finite, ...]
    """All of them, ascending."""
    other_work: tuple[str, ...] = ()
    """What of the work of both sides differs: amounts are compared as they are, since that was asked."""
    low: Finite
    """Lower end of the range that was searched."""
    high: Finite
    outcome: str
    """The answer in words."""
    curve: tuple[Tried, ...]
    """Every value that was tried, ascending."""


@checked
@frozen
class WhatIfProvenance:
    """Where a result comes from."""

    rlhfsim_version: str
    model_hash: str
    """Hash of the code and the tables that predict: another one may give other numbers."""
    scenario: str
    """Path or name."""
    scenario_hash: str
    text: str
    """The scenario as its file has it."""
    command: str
    """How it was asked; empty from Python."""
    started: str
    """UTC, ISO 8601."""
    seconds: Amount
    searched: int
    """Designs that were searched in this run."""
    from_cache: int
    """Designs that an earlier run had left."""


@checked
@frozen
class WhatIf:
    """A scenario and its answers."""

    schema: Literal["rlhfsim.whatif/1"] = SCHEMA
    title: str
    question: str
    per: Literal["run", "step"]
    """What `PointResult.seconds`, its `usd` and the bars are for."""
    base: PointResult
    points: tuple[PointResult, ...]
    tornado: tuple[TornadoBar, ...] = ()
    """The largest swing first."""
    break_evens: tuple[PointBreakEven, ...] = ()
    assumptions: tuple[str, ...] = ()
    """What the scenario takes for granted, in the words of its author."""
    notes: tuple[str, ...] = ()
    written: int | None = None
    """Number of points that were written to a table, where there are many; `points` has the best of them."""
    provenance: WhatIfProvenance

    @property
    def everything(self) -> tuple[PointResult, ...]:
        """The base, then the points."""
        return (self.base, *self.points)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        plain: dict[str, Any] = adapter(WhatIf).dump_python(self, mode="json")
        return plain

    def to_frame(self) -> pd.DataFrame:
        """One row a point, the base first; columns in docs/whatif.md."""
        import pandas as pd

        paths = tuple(dict.fromkeys(path for p in self.points for path in p.changes))
        return pd.DataFrame([row(p, paths) for p in self.everything])

    def write(self, path: str | Path) -> None:
        """The result as a file: .csv or .parquet (the table of points), any other name JSON (everything)."""
        where = Path(path)
        if where.suffix in SUFFIXES:
            write_table(self.to_frame(), where)
        else:
            write_atomically(where, json.dumps(self.to_dict()) + "\n")


def read_whatif(path: str | Path) -> WhatIf:
    """A result that `WhatIf.write` has written as JSON.

    Raises:
        RlhfsimError: unreadable, malformed, or of another schema version.
    """
    source = parse_json(read_text(Path(path), MAX_BYTES), str(path))
    if not isinstance(source.data, dict) or source.data.get("schema") != SCHEMA:
        raise RlhfsimError(
            "not-a-whatif",
            f"this is not a result of schema {SCHEMA}",
            place=Place(file=str(path)),
            help="write one with: rlhfsim whatif SCENARIO --out whatif.json",
        )
    return convert(WhatIf, source)


# --- the table of points -----------------------------------------------------------------------------

COLUMNS = {
    "gpus": "gpus",
    "architecture": "plan.architecture",
    "role_placement": "plan.role_placement",
    "actor": "plan.placement.actor.layout.label",
    "rollout": "plan.placement.rollout.layout.label",
    "staleness": "plan.placement.schedule.staleness",
    "step_s": "plan.prediction.step_s",
    "step_low_s": "plan.prediction.low_s",
    "step_high_s": "plan.prediction.high_s",
    "usd_per_step": "plan.prediction.usd_per_step",
    "kwh_per_step": "plan.prediction.kwh_per_step",
    "tokens_per_s_per_gpu": "plan.prediction.tokens_per_s_per_gpu",
    "peak_memory_bytes": "plan.prediction.peak_memory_bytes",
    "probability_out_of_memory": "plan.prediction.probability_out_of_memory",
    **{name: name for name in ("steps", "goodput", "run_s", "run_low_s", "run_high_s", "run_usd")},
    **{name: name for name in ("gap", "on_front", "other_work", "shortage", "notes", "input_hash")},
}
"""Column -> its path in a point."""


def row(point: PointResult, paths: tuple[str, ...]) -> dict[str, Any]:
    """A point flat: name, what it sets, plan, run; empty cells where nothing fits."""
    set_here = {path: _cell(point.changes.get(path)) for path in paths}
    columns = {name: value_at(point, keys(path)) for name, path in COLUMNS.items()}
    texts = {"notes": "; ".join(point.notes), "other_work": ", ".join(point.other_work)}
    targets = {f"P({target.text})": target.probability for target in point.targets}
    return {"name": point.name, **set_here, **columns, **texts, **targets}


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def write_table(table: pd.DataFrame, path: Path) -> None:
    """The table as .csv or .parquet.

    Raises:
        RlhfsimError: the file cannot be written, or Parquet is not installed.
    """
    if path.suffix == ".csv":
        write_atomically(path, table.map(csv_cell).to_csv(index=False))
        return
    need("pyarrow", purpose="Parquet", otherwise="or write .csv")
    write_atomically(path, _even(table).to_parquet(index=False))


def parquet(table: Path, kinds: Mapping[str, set[type]]) -> bytes:
    """A CSV table of points as Parquet, read in blocks; `kinds`: what the cells of each column were.

    Raises:
        RlhfsimError: Parquet is not installed.
    """
    need("pyarrow", purpose="Parquet", otherwise="or write .csv")
    import pyarrow as pa
    from pyarrow import csv, parquet

    types = {name: _arrow(found - {type(None)}) for name, found in kinds.items()}
    options = csv.ConvertOptions(
        column_types={name: pa.type_for_alias(kind) for name, kind in types.items()}, strings_can_be_null=True
    )
    out = pa.BufferOutputStream()
    with (
        csv.open_csv(
            table, convert_options=options, parse_options=csv.ParseOptions(newlines_in_values=True)
        ) as blocks,
        parquet.ParquetWriter(out, blocks.schema) as writer,
    ):
        for block in blocks:
            writer.write_batch(block)
    return out.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _arrow(kinds: set[type]) -> str:
    if kinds and kinds <= {int, float}:
        return "int64" if kinds == {int} else "float64"
    return "bool" if kinds == {bool} else "string"


def _even(table: pd.DataFrame) -> pd.DataFrame:
    """Columns of mixed kinds (a number here, a text there) as text, which Parquet can hold."""
    mixed: dict[str, Any] = {}
    for name in [c for c in table if table[c].dtype.kind == "O"]:
        kinds = {type(v) for v in table[name] if v is not None and v == v}
        if len(kinds) > 1:
            mixed[str(name)] = table[name].map(lambda v: None if v is None else str(v))
    return table.assign(**mixed)
