"""docs/architecture.md names what is there: modules of the layers that it lists, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import rlhfsim

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def folders() -> set[str]:
    """Folders of code, as the tables name them."""
    inits = [*(ROOT / "rlhfsim").rglob("__init__.py"), *(ROOT / "executor").rglob("__init__.py")]
    names = {f"{p.parent.relative_to(ROOT).as_posix()}/".removeprefix("rlhfsim/") for p in inits}
    return names - {""}


def test_every_folder_stands_in_a_table_and_nothing_else() -> None:
    rows = [row.split("|")[1] for row in TEXT.splitlines() if row.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([a-z_/]+/)`", row)]
    assert sorted(named) == sorted(folders())


def test_every_file_that_the_documents_link_to_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_name_of_the_package_resolves() -> None:
    for name in rlhfsim.__all__:
        assert getattr(rlhfsim, name).__name__ == name
