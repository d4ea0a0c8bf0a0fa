"""The documents as a site that works offline: the pages, what they link to, and the Python API from its docstrings.

    pip install -e '.[docs]' && python -m lab.docs_site     # writes site/index.html

Pages link outside docs/, so build/docs gets a copy of them and of every file they link to, at the same relative places.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import rlhfsim

ROOT = Path(__file__).parents[1]
STAGED = Path("build") / "docs"
FIRST = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/index.md")
"""Pages from which all others are reached."""
STYLE = """.md-grid { max-width: 80rem; }
.md-typeset pre > code { font-size: .62rem; }
.md-typeset table:not([class]) { font-size: .68rem; }
.md-typeset table:not([class]) :is(th, td) { padding: .5em .8em; min-width: 0; }
"""
"""Lines of 100 columns, as the terminal prints them, and wide tables fit."""
LINK = re.compile(r"""(\]\(|(?:src|href)=")([^)\s"#:]+)(?=[)#"])""")
"""A link or picture inside the repository: how it begins, and its path without the anchor."""


def linked(first: tuple[str, ...] = FIRST, root: Path = ROOT) -> tuple[set[str], set[str]]:
    """Files and folders of the repository that the first pages, and the pages they lead to, link to."""
    files, folders, todo = set[str](), set[str](), list(first)
    while todo:
        path = todo.pop()
        if path in files | folders:
            continue
        if (root / path).is_dir():
            folders.add(path)
            todo += files_of(path, root)
            continue
        files.add(path)
        if path.endswith(".md"):
            text = (root / path).read_text()
            todo += [os.path.normpath(os.path.join(os.path.dirname(path), m[2])) for m in LINK.finditer(text)]
    return files, folders


def files_of(folder: str, root: Path = ROOT) -> list[str]:
    """Files of a folder and of those in it, by path from the root."""
    found = (file.relative_to(root) for file in (root / folder).rglob("*") if file.is_file())
    return sorted(str(file) for file in found if "__pycache__" not in file.parts)


def stage(out: Path, root: Path = ROOT, first: tuple[str, ...] = FIRST) -> None:
    """Copy what is linked; a folder that is linked gets a page that lists its files."""
    files, folders = linked(first, root)
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".md"):
            (out / name).write_text(
                with_pages_of_folders((root / name).read_text(), Path(name).parent, folders)
            )
        else:
            shutil.copyfile(root / name, out / name)
    for folder in folders:
        (out / folder / "index.md").write_text(list_of_files(folder, files_of(folder, root)))
    (out / "api.md").write_text(api_page())
    (out / "style.css").write_text(STYLE)


def with_pages_of_folders(text: str, place: Path, folders: set[str]) -> str:
    """A page whose links to folders go to the pages that list their files."""

    def to_page(link: re.Match[str]) -> str:
        return link[0] + "/index.md" * (os.path.normpath(place / link[2]) in folders)

    return LINK.sub(to_page, text)


def list_of_files(folder: str, files: list[str]) -> str:
    """A page with a link to each file of a folder."""
    names = [str(Path(file).relative_to(folder)) for file in files]
    return "\n".join([f"# {folder}", "", *(f"- [{name}]({name})" for name in names), ""])


def api_page() -> str:
    """A page on which mkdocstrings shows every public name of `rlhfsim`, from its source."""
    names = sorted(rlhfsim.__all__, key=lambda name: (name[0].isupper(), name.lower()))
    parts = [
        f"::: rlhfsim.{rlhfsim._HOMES[name]}.{name}\n    options:\n      heading: rlhfsim.{name}\n"
        for name in names
    ]
    intro = "`import rlhfsim` has these names ([examples](docs/cli.md#in-python)). It loads nothing until one is used."
    return "\n".join(["# Python API", "", f"{intro}\n", *parts])


def main() -> None:
    """Stage and build; a link that leads nowhere, or to no heading, fails."""
    shutil.rmtree(ROOT / STAGED, ignore_errors=True)
    stage(ROOT / STAGED)
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict"], cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    print("site/index.html")


if __name__ == "__main__":
    main()
