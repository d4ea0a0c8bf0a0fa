"""The places of `executor/` that run only where there is a GPU: statements, and arms of conditional expressions.

A place lies in the branch of a condition that asks for the device (`device.available()`, `job.gpu`, `== "cuda"`),
after an early return where there is none, or in a function or module that only a GPU calls (`ON_A_GPU`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"gpu", "_gpu", "on_gpu", "_on_gpu", "cuda"}
"""Variables and attributes that are true on a GPU."""
CALLS = {"available", "check_device", "is_available"}
VALUES = {"device", "_device", "type", "kind", "of_device"}
"""What is compared with "cuda" or "cpu"."""
ON_A_GPU: dict[str, tuple[str, ...]] = {
    "engines/vllm/transfer.py": ("*",),
    "engines/vllm/start.py": ("free_share",),
    "engines/device.py": ("use", "name", "total_bytes", "why_not", "_module"),
    "engines/memory.py": ("_used",),
    "coordination/others.py": ("_of_gpu", "_nvml"),
    "coordination/gpu_faults.py": ("*",),
    "machine/facts.py": ("parse_query", "_bytes", "fewest_links", "version"),
    "microbench/memory.py": ("_host_device",),
}
"""Module -> functions that nothing calls on a CPU; `*`: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A range of source text that one instruction in it shows to have run."""

    path: str
    """Below `executor/`."""
    start: tuple[int, int]
    end: tuple[int, int]
    text: str

    @property
    def name(self) -> str:
        """Path, line and column."""
        return f"{self.path}:{self.start[0]}:{self.start[1]}"


def all_places(root: Path = ROOT / "executor") -> list[Place]:
    """Every place of the executor, by path and line."""
    return [
        place
        for path in sorted(root.rglob("*.py"))
        for place in places(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    ]


def places(source: str, path: str) -> list[Place]:
    """The places of one module."""
    tree = ast.parse(source)
    nodes: dict[tuple[int, int, int, int], ast.AST] = {}
    for node in _device_nodes(tree, ON_A_GPU.get(path, ())):
        end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
        nodes[node.lineno, node.col_offset, *end] = node
    return [
        Place(path=path, start=key[:2], end=key[2:], text=ast.unparse(node).splitlines()[0][:80])
        for key, node in sorted(nodes.items())
    ]


def _device_nodes(tree: ast.Module, functions: tuple[str, ...]) -> Iterator[ast.stmt | ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ("*" in functions or node.name in functions):
            yield from _leaves(node.body)
        if isinstance(node, ast.If | ast.IfExp) and (side := asks(node.test)):
            branch = node.body if side > 0 else node.orelse
            yield from _leaves(branch) if isinstance(branch, list) else [branch]
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(block, list):
                yield from _after_return(block)


def _after_return(block: list[ast.stmt]) -> Iterator[ast.stmt | ast.expr]:
    """What follows `if <no device>: return`."""
    for number, statement in enumerate(block):
        leaves = isinstance(statement, ast.If) and isinstance(
            statement.body[-1], ast.Return | ast.Raise | ast.Continue
        )
        if leaves and isinstance(statement, ast.If) and asks(statement.test) < 0:
            yield from _leaves(block[number + 1 :])


def _leaves(block: list[ast.stmt]) -> Iterator[ast.stmt | ast.expr]:
    """Simple statements, and of compound ones what is evaluated first."""
    for statement in block:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Global() | ast.Nonlocal():
                continue
            case ast.If() | ast.While():
                yield statement.test
            case ast.For():
                yield statement.iter
            case ast.With():
                yield statement.items[0].context_expr
            case ast.Match():
                yield statement.subject
            case ast.Try() | ast.FunctionDef() | ast.ClassDef():
                pass
            case _:
                yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _leaves(getattr(statement, name, []))
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _leaves(part.body)


def asks(test: ast.expr) -> int:
    """1: true means a GPU; -1: false does; 0: it does not ask."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return -asks(inner)
        case ast.BoolOp(op=op, values=values):
            sides = {asks(value) for value in values}
            wanted = 1 if isinstance(op, ast.And) else -1
            return wanted if wanted in sides else 0
        case ast.NamedExpr(value=value):
            return asks(value)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return int(name in NAMES)
        case ast.Call(func=ast.Attribute(attr="startswith"), args=[ast.Constant(value="cuda")]):
            return 1
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return int(name in CALLS)
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=value)]):
            return _compared(left, op, value)
    return 0


def _compared(left: ast.expr, op: ast.cmpop, value: object) -> int:
    same = 1 if isinstance(op, ast.Eq | ast.Is) else -1
    if value is None and "_accelerator()" in ast.unparse(left):
        return -same
    name = ast.unparse(left).rpartition(".")[2]
    if value in ("cuda", "cpu") and (name in VALUES or "device()" in ast.unparse(left)):
        return same if value == "cuda" else -same
    return 0
