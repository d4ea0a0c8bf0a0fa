"""Fields of a role that a question may fix or bound: one table for files, options, the desk and Python.

Ranges, choices and types are those of the field itself (`specs.placement`); a row says which roles take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.ranges import FieldValues, PoolGpus, taken, taken_by, whole
from rlhfsim.specs.workload.roles import PLACED

Relation = Literal["=", "!=", "<=", ">="]
FIXABLE_ROLES = PLACED
if TYPE_CHECKING:
    RoleName = str
else:
    RoleName = Literal[FIXABLE_ROLES]
Use = Literal["fixed", "bounded"]
"""A fixed field makes the layouts that compete, so its value need not be one that competes by itself; of a
field that is only bounded, even by `=`, those that compete are kept."""
OPTIMIZER_SHARES = (0.25, 0.5, 0.75)
"""Shares of the optimizer states on the host, where they need not all go."""
FLAGS = {"yes": True, "no": False, "true": True, "1": True, "false": False, "0": False}


@frozen
class RoleField:
    """A field of a role that a question may fix or bound."""

    name: str
    values: FieldValues
    roles: Use | None = "fixed"
    """What the actor and every role but the rollout may do with it; None: they have no such field."""
    rollout: Use | None = None
    exchange: bool = False
    """It says how tokens reach their experts: given, never chosen."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Words for its values; empty: whole numbers."""
        return ("no", "yes") if self.values.kind is bool else self.values.choices

    def use(self, role: str) -> Use | None:
        """What a role may do with it."""
        return self.rollout if role == "rollout" else self.roles

    def read(self, text: str, name: str) -> int | float | str:
        """The value that a text says; `name` is the field's in errors.

        Raises:
            RlhfsimError: the field has no such value.
        """
        if not self.choices:
            assert self.values.low is not None
            assert self.values.high is not None
            return whole(text, int(self.values.low), int(self.values.high), name)
        word = text.strip().lower()
        if self.values.kind is bool and word in FLAGS:
            return FLAGS[word]
        if word not in self.choices:
            raise unknown_name(self.name.replace("_", " "), text[:40], self.choices)
        return float(word) if self.values.kind is float else word


def _row(owner: type, name: str, **more: Any) -> RoleField:
    return RoleField(name=name, values=taken_by(owner, name), **more)


_SHARES = FieldValues(kind=float, choices=tuple(f"{share:g}" for share in (*OPTIMIZER_SHARES, 1)))
TABLE = (
    _row(Layout, "tp", rollout="fixed"),
    _row(Layout, "pp", rollout="fixed"),
    _row(Layout, "dp", rollout="bounded"),
    _row(Layout, "cp"),
    _row(Layout, "ep", rollout="fixed"),
    _row(Layout, "vp"),
    _row(Layout, "zero"),
    _row(Layout, "shards"),
    _row(Layout, "micro_batch"),
    _row(Layout, "score_micro_batch"),
    _row(Layout, "pack_tokens"),
    _row(Layout, "score_pack_tokens"),
    _row(Layout, "recompute"),
    _row(Layout, "dispatcher", rollout="fixed", exchange=True),
    _row(Layout, "ep_overlap", exchange=True),
    _row(RolloutLayout, "engine", roles=None, rollout="fixed"),
    _row(RolePlacement, "residency", roles="bounded"),
    _row(Layout, "offload_optimizer", roles="bounded"),
    _row(RolePlacement, "offload_between", roles="bounded"),
    RoleField(name="offload_fraction", values=_SHARES, roles="bounded"),
    _row(RolloutLayout, "prefill", roles=None, rollout="fixed"),
    _row(RolloutPlacement, "sleep", roles=None, rollout="bounded"),
    RoleField(name="gpus", values=taken(PoolGpus), roles="bounded", rollout="bounded"),
)
ROLE_FIELDS: Mapping[str, RoleField] = {row.name: row for row in TABLE}
EXCHANGE = tuple(row.name for row in TABLE if row.exchange)


def named(role: str, *uses: Use) -> tuple[str, ...]:
    """Names of the fields with which a role may do that; without `uses`: all that it has."""
    return tuple(row.name for row in TABLE if row.use(role) in (uses or get_args(Use)))


def bound(role: str, field: str, relation: str, text: str) -> tuple[Relation, int | float | str]:
    """Relation and value of a limit on a field; `<` and `>` of whole numbers become `<=` and `>=`.

    Raises:
        RlhfsimError: the role has no such field, or the field no such value.
    """
    row = field_of(role, field)
    if row.choices and relation not in ("=", "!="):
        raise RlhfsimError(
            "bad-value",
            f"{role}.{field}: {relation} needs a number",
            help=f"write = or != and one of {', '.join(row.choices)}",
        )
    value = row.read(text, f"{role}.{field}")
    if relation in ("<", ">"):
        assert isinstance(value, int)
        return ("<=", value - 1) if relation == "<" else (">=", value + 1)
    return cast(Relation, relation), value


def field_of(role: str, name: str, *uses: Use) -> RoleField:
    """The row of a field of a role.

    Raises:
        RlhfsimError: the role has no such field, or may not do that with it.
    """
    if name not in (names := named(role, *uses)):
        raise unknown_name("layout field", name[:40], names)
    return ROLE_FIELDS[name]


def check_fixed(fix: Mapping[str, Mapping[str, int | str]]) -> None:
    """Whether every fixed field can be fixed, to its value.

    Raises:
        RlhfsimError: the first that cannot.
    """
    for role, fields in fix.items():
        for name, value in fields.items():
            field_of(role, name, "fixed").read(str(value), f"{role}.{name}")
