"""A framework's keys, one row each: written from the fields of a plan, and read back into them.

    Key("rollout.pp", "--sglang-pp-size", 1, also=("sglang_pipeline_parallel_size",))

Law: what is written of a field that a row names reads back as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.export import Section, Setting, Value
from rlhfsim.interchange.fields import Fields, PlanFields, described
from rlhfsim.interchange.predictions import call, held
from rlhfsim.interchange.releases import Release
from rlhfsim.plan import Plan
from rlhfsim.specs.workload.workload import CLIP_RANGES

Why = str | Callable[[Plan], str]
OPEN = (
    "actor.recompute",
    "rollout.memory_utilization",
    "actor.offload_optimizer",
    "rollout.ep",
    "rollout.max_num_seqs",
    "rollout.cuda_graphs",
)
"""Fields that a question may leave open; where their defaults do not fit, the first are chosen first."""
ALONG = {"rollout.max_num_seqs": ("rollout.max_batched_tokens",)}
"""Field -> others that are left open with it."""
ABOVE_ZERO = "above 0, so that the reference is read; how large is yours to choose"
FROM_ROLLOUT = "old log-probs are those of the rollout: one forward pass less"


# --- what a key holds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Codec:
    """How the value of a field is written, and read from the first of several keys that is set."""

    write: Callable[[Any], Value]
    """None: not written."""
    read: Callable[[FrameworkSettings, tuple[str, ...], Any], Any]
    values: tuple[Any, ...] | None = None
    """The values that it can say; None: all."""


def whole(least: int = 0, floor: int | None = None) -> Codec:
    """A whole number of at least `least`; what is below `floor` counts as it."""

    def read(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> int:
        number = s.whole(*keys, default=default, least=least)
        return number if floor is None else max(floor, number)

    return Codec(lambda value: value, read)


WHOLE = whole()


def number() -> Codec:
    """A number."""
    return Codec(lambda value: value, lambda s, keys, default: s.share(*keys, default=default))


def limit() -> Codec:
    """A whole number; 0 is none."""
    return Codec(lambda value: value, lambda s, keys, default: s.whole(*keys, default=default) or None)


def count() -> Codec:
    """A whole number; what is not said, or 0, is the default, of which nobody is told."""
    return Codec(lambda value: value, lambda s, keys, default: s.count(*keys) or default)


def word(*words: str, other: str) -> Codec:
    """One of the words; every other one, and none, means `other`, which is not written."""

    def read(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> str:
        said = str(s.find(*keys))
        return said if said in words else other

    return Codec(lambda value: value if value in words else None, read, (*words, other))


def unwritten(codec: Codec) -> Codec:
    """What is read, and never written: what it could say is not run."""
    return replace(codec, write=lambda value: None)


def lag() -> Codec:
    """Policy versions: a whole number, 1 at least where it is written."""
    return Codec(
        lambda value: max(1, math.ceil(value)), lambda s, keys, usual: float(s.whole(*keys, default=usual))
    )


def flag(on: Any = True, off: Any = False, *alike: Any, both: bool = False) -> Codec:
    """True for the value `on` and those that are written alike; false is written only with `both`."""

    def write(value: Any) -> Value:
        true = value == on or value in alike
        return true if both or true else None

    def read(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> Any:
        return on if s.flag(*keys, default=default == on) else off

    return Codec(write, read, (on, off))


def choice(names: Mapping[Any, str], other: Any = None) -> Codec:
    """A word for each value; `other` is what every other word means, and is not written."""
    meant = {word: value for value, word in reversed(tuple(names.items()))}

    def read(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> Any:
        return meant.get(s.text(*keys, default=names.get(default, default)), other)

    return Codec(names.get, read, (*names, other))


def marked(value: str, word: Value, other: str = "bf16", mark: str | None = None) -> Codec:
    """`word` for a value, which every word with `mark` in it means; another value is not written."""
    sign = value if mark is None else mark

    def read(s: FrameworkSettings, keys: tuple[str, ...], default: Any) -> str:
        found = s.find(*keys)
        return value if found and sign in str(found) else other

    return Codec(lambda said: word if said == value else None, read, (value, other))


def like(name: str) -> Callable[[Fields], Any]:
    """The default of a key that is another field."""
    return lambda read: read[name]


# --- rows ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Key:
    """A key that says a field."""

    field: str
    key: str
    """As it is written: with dashes or signs of the command line."""
    default: Any = None
    """The framework's own, or a function of the fields; None: a configuration must say it, or the codec's."""
    codec: Codec = WHOLE
    also: tuple[str, ...] = ()
    """Names of other releases, as they are read."""
    when: str = ""
    """See `holds`; otherwise neither written nor read."""
    why: Why = ""
    quiet: bool = False
    """Not written where it says the default."""
    read: bool = True
    """Whether this row reads the field; otherwise `Table.rest` does, or nothing."""

    def settings(self, plan: Plan, given: Fields) -> Iterator[Setting]:
        """The key of a plan, where it is written."""
        if holds(self.when, given) and not (self.quiet and given[self.field] == self.default):
            value = self.codec.write(given[self.field])
            if value is not None:
                yield Setting(self.key, value, _said(self.why, plan))


@dataclass(frozen=True, slots=True)
class FixedKey:
    """A key that is written and says no field."""

    key: str
    value: Value | Callable[[Plan], Value]
    """None of a function: not written."""
    when: str = ""
    why: Why = ""

    def settings(self, plan: Plan, given: Fields) -> Iterator[Setting]:
        """The key, where it is written."""
        if holds(self.when, given):
            value = self.value(plan) if callable(self.value) else self.value
            if value is not None or not callable(self.value):
                yield Setting(self.key, value, _said(self.why, plan))


Rule = Callable[[Plan], Iterable[Setting]]
"""Keys that no row can write; `Table.rest` reads what they say."""
Row = Key | FixedKey | Rule


def given_that(condition: str, *rows: Key | FixedKey) -> tuple[Key | FixedKey, ...]:
    """Rows that are written and read only where a condition holds as well; see `holds`."""
    return tuple(replace(row, when=f"{condition} {row.when}".strip()) for row in rows)


def _said(why: Why, plan: Plan) -> str:
    return why if isinstance(why, str) else why(plan)


def bare(key: str) -> str:
    """A key as settings hold it, without the marks of Hydra (`+`) and of a command line (`--`)."""
    return key.lstrip("+-").replace("-", "_")


def holds(when: str, given: Fields) -> bool:
    """Whether all conditions hold: `a` is true, `!a` is not, `a=x` is the word x, `a>1` is above 1."""
    return all(_holds(condition, given) for condition in when.split())


def _holds(condition: str, given: Fields) -> bool:
    name, equals, word = condition.lstrip("!").partition("=")
    name, above, least = name.partition(">")
    value = given[name]
    found = str(value) == word if equals else (value or 0) > int(least) if above else bool(value)
    return found != condition.startswith("!")


def kept(plan: Plan) -> str:
    """The share of groups that dynamic sampling keeps, as a reason."""
    sampling = plan.workload.dynamic_sampling
    return f"{sampling.kept:.0%} of the groups are expected to be kept" if sampling else ""


def drafting(plan: Plan) -> str:
    """What a rollout gains by drafting tokens, as a reason."""
    drafted = plan.placement.rollout.layout.speculation if plan.placement.rollout else None
    if drafted is None:
        return ""
    return f"{drafted.tokens_per_step:.2f} tokens a step at an acceptance of {drafted.acceptance:g}"


def clip_range(end: int) -> Callable[[Plan], float | None]:
    """One end, 0 or 1, of the clip range of an algorithm that has its own."""
    return lambda plan: CLIP_RANGES.get(plan.workload.algorithm, (None, None))[end]


def drafts(prefix: str) -> Rule:
    """vLLM's `speculative_config` under `prefix`, where the rollout drafts tokens."""

    def settings(plan: Plan) -> Iterator[Setting]:
        drafted = plan.placement.rollout.layout.speculation if plan.placement.rollout else None
        if drafted is None:
            return
        method = {"draft": "draft_model", "eagle": "eagle3"}.get(drafted.method, drafted.method)
        yield Setting(f"{prefix}.method", method, drafting(plan))
        yield Setting(f"{prefix}.num_speculative_tokens", drafted.draft_tokens)
        if drafted.method in ("draft", "eagle"):
            yield Setting(f"{prefix}.model", "${DRAFT_MODEL}")

    return settings


def of_call(name: str) -> Callable[[Plan], str]:
    """What is predicted of a call, as a reason."""
    return lambda plan: call(plan, name)


def of_held(phase: str, role: str) -> Callable[[Plan], str]:
    """What a GPU of a role's pool holds during a phase, as a reason."""
    return lambda plan: held(plan, phase, plan.placement.roles[role].pool)


# --- a table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """All keys of a framework that a plan or a step's price has to do with."""

    rows: Callable[[], Mapping[str, tuple[Row, ...]]]
    """Reads `sections`, when they are first asked for."""
    rest: Callable[[FrameworkSettings, Fields], Mapping[str, Any]]
    """Fields that no row reads, out of a configuration and the fields of rows."""
    planned: Mapping[str, Callable[[Plan], Any]] = field(default_factory=dict)
    """Fields of its own, as those of `PLANNED`."""
    follows: Mapping[str, Callable[[FrameworkSettings, Fields], Any]] = field(default_factory=dict)
    """Fields that conditions and defaults of rows need, and how a configuration says them."""
    releases: Mapping[str, Release] = field(default_factory=dict)
    """Older releases: rows are read under their names as well."""

    @cached_property
    def sections(self) -> Mapping[str, tuple[Row, ...]]:
        """Title -> rows, in the order in which they are written."""
        return self.rows()

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """Rows that say a field."""
        return tuple(row for rows in self.sections.values() for row in rows if isinstance(row, Key))

    def names(self, name: str) -> tuple[str, ...]:
        """Keys under which a field is read, the newest first."""
        return next(self.named(key.key, *key.also) for key in self.keys if key.field == name)

    def named(self, *keys: str) -> tuple[str, ...]:
        """Names under which keys of the newest release are read, those of older releases among them."""
        older = (release.key(key) for key in keys for release in self.releases.values())
        return tuple(dict.fromkeys(bare(key) for key in (*keys, *older)))

    def key(self, name: str) -> str:
        """The newest key under which a field is read."""
        return self.names(name)[0]

    def keys_of(self, *fields: str) -> tuple[str, ...]:
        """Keys of the newest release that say these fields, as settings hold them."""
        return tuple(dict.fromkeys(bare(key.key) for key in self.keys if key.field in fields))

    @property
    def left_open(self) -> dict[str, tuple[str, ...]]:
        """Field that a question may leave open -> its keys, whose defaults then hold."""
        fields = {field: self.keys_of(field, *ALONG.get(field, ())) for field in OPEN}
        return {field: keys for field, keys in fields.items() if keys}

    @property
    def batch(self) -> dict[str, str]:
        """Keys of prompts and of samples, as readers of logs look for them."""
        fields = {key.field for key in self.keys}
        prompts = "workload.prompts" if "workload.prompts" in fields else "batch"
        return {"prompts": self.key(prompts), "samples": self.key("workload.samples")}

    def write(self, plan: Plan) -> tuple[Section, ...]:
        """A plan in keys, without sections that have none."""
        given = PlanFields(plan, self.planned)
        said = {
            title: tuple(
                setting
                for row in rows
                for setting in (row.settings(plan, given) if isinstance(row, Key | FixedKey) else row(plan))
            )
            for title, rows in self.sections.items()
        }
        return tuple(Section(title=title, settings=settings) for title, settings in said.items() if settings)

    def read(self, s: FrameworkSettings) -> Reading:
        """The fields that a configuration says."""
        return Reading(self, s)

    def describe(self, s: FrameworkSettings) -> RunDescription:
        """The run of a configuration."""
        return described(Reading(self, s).all())


class Reading:
    """Fields of a configuration, each read when it is first asked for: what decides nothing is not."""

    def __init__(self, table: Table, settings: FrameworkSettings) -> None:
        """Nothing is read yet."""
        self._table, self._settings = table, settings
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """The value of a field; None where no row says it under these conditions."""
        if name not in self._values:
            rows = (k for k in self._table.keys if k.field == name and k.read and holds(k.when, self))
            row = next(rows, None)
            self._values[name] = self._follows(name) if row is None else self._row(row)
        return self._values[name]

    def _row(self, row: Key) -> Any:
        default = row.default(self) if callable(row.default) else row.default
        return row.codec.read(self._settings, self._table.named(row.key, *row.also), default)

    def _follows(self, name: str) -> Any:
        """A field that follows from those of rows."""
        if name in self._table.follows:
            return self._table.follows[name](self._settings, self)
        role, _, last = name.rpartition(".")
        nodes = self[f"{role}.nodes"] if role and last == "gpus" else None
        return None if nodes is None else nodes * self[f"{role}.each"]

    def all(self) -> dict[str, Any]:
        """Every field that is said."""
        names = (*(key.field for key in self._table.keys), "shared", "actor.gpus")
        said = {name: self[name] for name in names}
        said |= self._table.rest(self._settings, self)
        return {name: value for name, value in said.items() if value is not None}
