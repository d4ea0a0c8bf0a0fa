"""docs/architecture.md names what is there: modules of the layers that it lists, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlhfsim

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def listed(layer: str) -> set[str]:
    """Modules of a layer in the table of modules: `layer/first`, `second`, ..."""
    rows = (row.split("|")[1] for row in TEXT.splitlines() if row.startswith(f"| `{layer}/"))
    words = (re.findall(r"`([a-z_/]+)`", row) for row in rows)
    return {word.removeprefix(f"{layer}/") for row in words for word in row} - {""}


@pytest.mark.parametrize("layer", ["simulation", "search", "scenarios", "export", "report"])
def test_every_module_of_a_listed_layer_stands_in_the_table(layer: str) -> None:
    modules = {p.stem for p in (ROOT / "rlhfsim" / layer).glob("*.py")} - {"__init__"}
    assert listed(layer) == modules


def test_every_file_that_the_documents_link_to_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_name_of_the_package_resolves() -> None:
    for name in rlhfsim.__all__:
        assert getattr(rlhfsim, name).__name__ == name
