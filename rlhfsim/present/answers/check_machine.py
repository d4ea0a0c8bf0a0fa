"""What `rlhfsim check-machine` answers: a line a check of every node, and remedies for what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rlhfsim.present.answers.tree import Column, Listing, Page, TypedTable, section, table_of
from rlhfsim.present.tables import REST, each

SCHEMA = "rlhfsim.check_machine/1"
STYLES = {"ok": "", "missing": "red", "not checked": "dim"}


class MachineCheck(Protocol):
    """One thing that was looked at."""

    name: str
    outcome: Any
    found: str
    remedy: str


class CheckedNode(Protocol):
    """A node with its checks."""

    @property
    def node(self) -> str:
        """Its name."""

    @property
    def checks(self) -> Sequence[Any]:
        """Each a `MachineCheck`."""


def missing(nodes: Sequence[CheckedNode]) -> list[tuple[str, MachineCheck]]:
    """Node and check of all that is missing."""
    return [(node.node, check) for node in nodes for check in node.checks if check.outcome == "missing"]


def node_data(nodes: Sequence[CheckedNode]) -> list[dict[str, Any]]:
    """A node each, with all that was looked at."""
    names = ("name", "outcome", "found", "remedy")
    return [{"node": node.node, "checks": each(node.checks, *names)} for node in nodes]


def page(nodes: Sequence[CheckedNode], *, tables: bool = True) -> Page:
    """A table a node, then what is missing with its remedy."""
    lost = missing(nodes)
    told = (f"missing[{check.name}] on {node}: {check.found}\nhelp: {check.remedy}" for node, check in lost)
    return Page(
        schema=SCHEMA,
        verdict="" if lost else "nothing that was checked is missing",
        sections=(
            *(section(node.node, node.node, _table(node)) for node in nodes if tables),
            section("missing", "", Listing(tuple(told), "missing", mark="bad")),
        ),
        data={"complete": not lost, "nodes": node_data(nodes)},
    )


def _table(node: CheckedNode) -> TypedTable:
    columns = (Column("check", "name"), Column("outcome"), Column("found", fit=REST))
    return table_of("", node.checks, *columns, style=lambda check: STYLES[check.outcome])
