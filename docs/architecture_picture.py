"""Draws docs/img/architecture.svg from the tables of docs/architecture.md: python
docs/architecture_picture.py."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
PAGE, PICTURE = HERE / "architecture.md", HERE / "img" / "architecture.svg"
WIDTH, ROW, PAD = 1000, 30, 16
TOP_LEVEL = re.compile(r"^\| ((?:`[a-z_]+/?`(?:, )?)+) \| (.*?) \|$", re.MULTILINE)
BANDS = (  # colour of the layers from the first one named on
    ("errors", "#e8edf2", "contracts"),
    ("kernels/", "#dcebdd", "prices"),
    ("simulation/", "#fbe9c8", "time and choice"),
    ("interchange/", "#e5def2", "the loop with real runs"),
    ("what_if/", "#fbdfd3", "questions"),
    ("present/", "#d8e8f5", "people and machines"),
)


def layers(page: str) -> list[tuple[str, str]]:
    """Folders and modules of the first table, lowest first, with what they hold up to the first stop."""
    table = page[page.index("| folder |") :].split("\n\n")[0]
    rows = [(names.replace("`", ""), text) for names, text in TOP_LEVEL.findall(table)]
    return [(names, re.split(r"[;:(]", re.sub(r"[`\[\]]", "", text))[0].strip()) for names, text in rows]


def drawn() -> str:
    """The picture: what stands higher imports only what stands below."""
    rows = layers(PAGE.read_text(encoding="utf-8"))
    height = ROW * (len(rows) + 1) + 2 * PAD
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'role="img" aria-label="the layers of rlhfsim: what stands higher imports only what stands below">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    band, first = 0, len(rows) - 1
    for index, (names, text) in enumerate(rows):
        y = PAD + ROW * (len(rows) - 1 - index)
        if band + 1 < len(BANDS) and names.split(", ")[0] == BANDS[band + 1][0]:
            band += 1
        colour = BANDS[band][1]
        parts.append(f'<rect x="190" y="{y}" width="794" height="{ROW - 4}" rx="4" fill="{colour}"/>')
        parts.append(f'<text x="202" y="{y + 18}" font-size="14" font-weight="bold">{escape(names)}</text>')
        parts.append(f'<text x="370" y="{y + 18}" font-size="13" fill="#333">{escape(text)}</text>')
        if names.split(", ")[0] == BANDS[band][0]:
            parts.append(
                f'<text x="{PAD}" y="{y + 18}" font-size="13" fill="#555">{escape(BANDS[band][2])}</text>'
            )
    y = PAD + ROW * (first + 1) + 14
    parts.append(
        f'<text x="202" y="{y}" font-size="13" fill="#555">imports point down; '
        "executor/ imports only contracts, it runs the plan and writes the trace</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
