"""Writes the tables of what decides training into the pages of the frameworks: python -m lab.training_tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlhfsim.interchange.export import exporters
from rlhfsim.interchange.training_keys import shown, training_keys

DOCS = Path(__file__).parents[1] / "docs/frameworks"
HEAD = "## What decides training"
TEXT = (
    "No price depends on it, so every export writes it or ends at once where it is not set; the values written "
    "are yours to choose."
)


def training_table(framework: str) -> Iterator[str]:
    """The table of a framework's page."""
    yield "| decides | key | written | the framework's own default |"
    yield "|---|---|---|---|"
    for row in training_keys(framework):
        said = f"demanded, `{row.value}`" if row.demanded else f"`{shown(row.value)}`"
        key, written = (f"`{row.key}`", said) if row.key else ("-", "its default")
        yield f"| {row.decides} | {key} | {written} | {row.own} |"


def main() -> None:
    """Replace the section of each page, or append it."""
    for name in exporters():
        page = DOCS / f"{name}.md"
        before, _, after = page.read_text().partition(f"\n{HEAD}\n")
        rest = after[after.find("\n## ") :] if "\n## " in after else ""
        section = "\n".join([HEAD, "", TEXT, "", *training_table(name), ""])
        page.write_text(f"{before.rstrip()}\n\n{section}{rest}")


if __name__ == "__main__":
    main()
