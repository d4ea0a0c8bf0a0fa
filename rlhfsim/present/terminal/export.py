"""What `rlhfsim export` prints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhfsim.frameworks.export import Exported
from rlhfsim.frameworks.runs import framework
from rlhfsim.present.terminal.console import Part, plain_grid, styled


def report(found: Exported, out: Path, rejected_by: str | None = None) -> Iterator[Part]:
    """Sections with their settings, what cannot be said, the next command."""
    title = framework(found.framework).title
    rows: list[tuple[Part, ...]] = []
    for section in found.written.sections:
        rows.append((styled(section.title, style="bold"),))
        rows += [(styled(f"  {setting.key}"), styled(str(setting.value))) for setting in section.settings]
    yield plain_grid(rows, gap=1)
    for unsaid in found.written.unsaid:
        yield styled(f"{title} cannot be told: {unsaid.sentence}")
    if found.warning is not None:
        yield styled(f"warning: {found.warning}", style="yellow")
    if rejected_by is not None:
        yield styled(f"does not fit: {rejected_by}", style="bold red")
    names = ", ".join(sorted([*found.files, "plan.json"]))
    yield styled(f"{title} {found.version}, in {out}: {names}")
    yield styled(f"next: cd {out} && {found.start}", style="bold", no_wrap=True)
