"""What nodes offer to a run, a line a check, with the remedy below what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from rlhfsim.present.tables import REST, each, grid
from rlhfsim.present.terminal.console import Part, drawn, styled

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


def is_whole(nodes: Sequence[CheckedNode]) -> bool:
    """Whether nothing is missing."""
    return not missing(nodes)


def as_data(nodes: Sequence[CheckedNode]) -> dict[str, Any]:
    """Nodes and checks as plain data."""
    return {"schema": SCHEMA, "complete": is_whole(nodes), "nodes": node_data(nodes)}


def node_data(nodes: Sequence[CheckedNode]) -> list[dict[str, Any]]:
    """A node each, with all that was looked at."""
    names = ("name", "outcome", "found", "remedy")
    return [{"node": node.node, "checks": each(node.checks, *names)} for node in nodes]


def report(nodes: Sequence[CheckedNode]) -> Iterator[Part]:
    """A table a node, then the remedies."""
    for node in nodes:
        rows = [(check.name, check.outcome, check.found) for check in node.checks]
        styles = [STYLES[check.outcome] for check in node.checks]
        yield styled(node.node, style="bold")
        yield drawn(grid(("check", "outcome", "found"), rows, fit={"found": REST}, styles=styles))
        yield ""
    yield from remedies(nodes)


def remedies(nodes: Sequence[CheckedNode]) -> Iterator[Part]:
    """What is missing with its remedy, or that nothing is."""
    for node, check in missing(nodes):
        yield styled(f"missing[{check.name}] on {node}: {check.found}", style="red")
        yield styled(f"help: {check.remedy}")
    if is_whole(nodes):
        yield styled("nothing that was checked is missing", style="bold")
