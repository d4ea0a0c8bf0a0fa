"""What `--json` prints of report, as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhfsim.present.answers.tree import Figure, Page
from rlhfsim.present.answers.written import tile_texts


def page(shown: Page, where: Path) -> dict[str, Any]:
    """The findings of `rlhfsim report`; schema in docs/report.md."""
    return {
        "schema": "rlhfsim.present.html/1",
        "out": str(where),
        "bytes": where.stat().st_size,
        "title": shown.title,
        "subtitle": shown.subtitle,
        "verdict": shown.verdict,
        "sure": list(shown.sure),
        "tiles": [
            dict(zip(("label", "value", "detail"), (t.label, *tile_texts(t)), strict=True))
            for t in shown.tiles
        ],
        "sections": [
            {
                "heading": s.heading,
                "figures": [
                    {"key": b.key, "finding": b.title, "alt": b.alt}
                    for b in s.blocks
                    if isinstance(b, Figure)
                ],
            }
            for s in shown.sections
        ],
    }
