"""What `rlhfsim export` prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table
from rich.text import Text

from rlhfsim.frameworks.export import Exported
from rlhfsim.frameworks.runs import framework


def report(found: Exported, out: Path, rejected_by: str | None = None) -> Iterator[Table | Text]:
    """Sections with their settings, what cannot be said, the next command."""
    title = framework(found.framework).title
    table = Table(box=None, pad_edge=False, title_justify="left", show_header=False)
    for section in found.written.sections:
        table.add_row(Text(section.title, style="bold"))
        for setting in section.settings:
            table.add_row(Text(f"  {setting.key}"), Text(str(setting.value)))
    yield table
    for unsaid in found.written.unsaid:
        yield Text(f"{title} cannot be told: {unsaid.sentence}")
    if found.warning is not None:
        yield Text(f"warning: {found.warning}", style="yellow")
    if rejected_by is not None:
        yield Text(f"does not fit: {rejected_by}", style="bold red")
    names = ", ".join(sorted([*found.files, "plan.json"]))
    yield Text(f"{title} {found.version}, in {out}: {names}")
    yield Text(f"next: cd {out} && {found.start}", style="bold", no_wrap=True)
