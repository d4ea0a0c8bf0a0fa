"""What `rlhfsim export` answers: sections with their settings, what cannot be said, the next command."""

from __future__ import annotations

from pathlib import Path

from rlhfsim.interchange.export import Exported
from rlhfsim.present.answers.tree import Code, Column, Listing, Page, section, table_of
from rlhfsim.present.tables import each, fields
from rlhfsim.specs.frameworks.runs import framework


def page(found: Exported, out: Path, rejected_by: str | None = None) -> Page:
    """Settings by section; `rejected_by`: why the plan does not fit."""
    written, title = found.written, framework(found.framework).title
    names = ", ".join(sorted([*found.files, "plan.json"]))
    notes = [f"{title} cannot be told: {unsaid.sentence}" for unsaid in written.unsaid]
    notes += [f"warning: {found.warning}"] if found.warning else []
    settings = [
        section(
            part.title,
            part.title,
            table_of("", part.settings, Column("", "key"), Column("", lambda one: str(one.value))),
        )
        for part in written.sections
    ]
    return Page(
        schema="rlhfsim.export/1",
        subtitle=f"{title} {found.version}, in {out}: {names}",
        verdict=f"does not fit: {rejected_by}" if rejected_by else "",
        mark="bad",
        sections=(
            *settings,
            section("notes", "", Listing(tuple(notes), mark="warn")),
            section("next", "", Code("next", f"cd {out} && {found.start}")),
        ),
        data={
            **fields(found, "framework", "version"),
            "folder": str(out),
            "files": sorted(found.files),
            **fields(found, "start", "warning"),
            "settings": [
                {"section": part.title, **one}
                for part in written.sections
                for one in each(part.settings, "key", "value", "why")
            ],
            "cannot_say": each(written.unsaid, "what", "instead", "cost"),
            "fits": rejected_by is None,
            "rejected_by": rejected_by,
        },
    )
