"""The README's commands leave nothing out that the program needs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_project_is_installed_with_its_dependencies() -> None:
    """The lock pins the real stack; what only the planner needs, such as SimPy, comes with the project."""
    for name in ("README.md", "docs/executor.md"):
        commands = re.findall(r"pip install ([^&\n`]*)", (ROOT / name).read_text())
        of_the_project = [c for c in commands if re.search(r"(^| )(-e )?'?\.(\[|'| |$)", c)]
        assert of_the_project, name
        assert not [c for c in of_the_project if "--no-deps" in c], name
