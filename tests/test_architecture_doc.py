"""docs/architecture.md names what is there: modules of the layers that it lists, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
    named = [name for row in rows for name in re.findall(r"`([a-z0-9_/]+/)`", row)]
    assert sorted(named) == sorted(folders())


def test_every_file_that_the_documents_link_to_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_name_of_the_package_resolves() -> None:
    for name in rlhfsim.__all__:
        assert getattr(rlhfsim, name).__name__ == name


TOP = {"rlhfsim", "executor", "lab"}
FOLDERS = {p.parent.name for p in (ROOT / "rlhfsim").glob("*/__init__.py")}


def stands(words: list[str]) -> bool:
    """Whether a folder, a module, a name in a module or of the API stands there; `words` begin at the top."""
    if len(words) == 2 and words[0] == "rlhfsim" and words[1] in rlhfsim.__all__:
        return True
    for length in range(len(words), 0, -1):
        path = ROOT.joinpath(*words[:length])
        if path.is_dir() or path.is_file():
            return length == len(words)
        if path.with_suffix(".py").is_file():
            names = words[length:]
            return not names or re.search(rf"\b{names[0]}\b", path.with_suffix(".py").read_text()) is not None
    return False


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.stem)
def test_every_module_that_a_document_names_exists(page: Path) -> None:
    for quoted in re.findall(r"`([^`\n]+)`", page.read_text()):
        if re.fullmatch(r"[a-z_]+(?:[./][A-Za-z_]\w*)+/?", quoted) is None or (ROOT / quoted).exists():
            continue
        words = re.split(r"[./]", quoted.removesuffix(".py").rstrip("/"))
        if words[0] in TOP:
            assert stands(words), f"{page.name} names {quoted}"
        elif words[0] in FOLDERS and (ROOT / "rlhfsim" / words[0]).is_dir() and "/" in quoted:
            assert stands(["rlhfsim", *words]), f"{page.name} names {quoted}"


READERS = re.compile(r"\b(read_text|read_bytes|parse_json|parse_yaml|load)\(")
OWN = {
    "rlhfsim/specs/loading.py": "the readers themselves",
    "rlhfsim/cli/report.py": "looks which of the formats a file is",
    "rlhfsim/cli/desk.py": "looks which of the formats a file is",
    "rlhfsim/cli/export.py": "copies the plan that was read",
    "rlhfsim/cli/planned.py": "the hash of a plan that was read",
    "rlhfsim/cli/params.py": "words of an option",
    "rlhfsim/cli/inputs.py": "words of options",
    "rlhfsim/cli/launch.py": "looks whether a plan was edited",
    "rlhfsim/cli/run_settings.py": "settings: executor/settings.py",
    "executor/trainers.py": "keywords of a call, by the same settings",
    "rlhfsim/cli/whatif.py": "words of an option",
    "rlhfsim/specs/hardware/clusters.py": "a part of a scenario",
    "rlhfsim/specs/model/presets.py": "a shipped file",
    "rlhfsim/validation/cases/training.py": "a shipped file",
    "rlhfsim/validation/assumptions.py": "a shipped file",
}
"""Modules that read no format of their own, and what instead."""


def test_every_door_of_a_format_stands_in_the_table() -> None:
    found = set()
    for path in [*(ROOT / "rlhfsim").rglob("*.py"), *(ROOT / "executor").rglob("*.py")]:
        text = path.read_text()
        if "from rlhfsim.specs.loading import" in text and READERS.search(text):
            found.add(path.relative_to(ROOT).as_posix())
    assert {name for name in found - OWN.keys() if f"`{name}`" not in TEXT} == set()
