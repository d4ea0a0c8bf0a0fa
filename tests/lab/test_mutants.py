"""Formulas that are broken on purpose: that they are, in what way, and that tests of the folder notice."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from lab.mutants import FOLDERS, ROOT, changes, equivalent, mutants

NOTICED = ("kernels", "memory", "training", "rollout", "weight_sync")
"""Folders whose own tests notice nine of ten mutants."""


def mutated(code: str) -> list[str]:
    node = ast.parse(code).body[0]
    expression = node.value if isinstance(node, ast.Expr) else node
    return [ast.unparse(ast.fix_missing_locations(other)) for _, other in changes(expression)]


@pytest.mark.parametrize(
    ("code", "others"),
    [
        ("2", ["3"]),
        ("0.5", ["0.75"]),
        ("0.0", ["1.0"]),
        ("True", []),
        ("'text'", []),
        ("a + b", ["a - b"]),
        ("a / b", ["a * b"]),
        ("a ** b", ["a * b"]),
        ("-a", ["a"]),
        ("max(a, b)", ["min(a, b)"]),
        ("np.minimum(a, b)", ["np.maximum(a, b)"]),
        ("a if b else c", ["a if True else c", "a if False else c"]),
        ("total += a", ["total -= a"]),
        ("f(a)", []),
    ],
)
def test_a_node_changes_into(code: str, others: list[str]) -> None:
    assert mutated(code) == others


def test_every_reason_for_an_equivalent_mutant_is_about_a_mutant() -> None:
    names = [mutant.name for folder in FOLDERS for mutant in mutants(folder)]
    assert not [start for start in equivalent() if not any(name.startswith(start) for name in names)]


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("sample", [8, pytest.param(12, marks=pytest.mark.long)])
def test_most_of_a_sample_of_broken_formulas_are_noticed(sample: int) -> None:
    command = [sys.executable, "-m", "lab.mutants", *NOTICED, "--sample", str(sample)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    counts = [(int(died), int(all_)) for died, all_ in re.findall(r"(\d+) of (\d+) died", shown)]
    assert len(counts) == len(NOTICED), shown
    assert sum(died for died, _ in counts) >= 0.85 * sum(all_ for _, all_ in counts), shown
