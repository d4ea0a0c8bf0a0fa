"""Writes what changes by itself into README.md: the first lines of the answer, and the table of errors.

python docs/picture.py && python docs/readme_answer.py
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES_SHOWN = 14
COMMAND = "rlhfsim design --gpus 64 --model 70b"
"""Title of the picture."""
ROWS = {
    "training": "seconds of a training step",
    "memory.training_peak": "peak memory of training",
    "inference": "tokens/s of an inference engine",
    "rlhf.step": "seconds of a whole RL step",
    "weight_sync": "seconds of a weight sync",
}
HEAD = "| what | rows | median error | P90 | bias | inside P10 to P90 |\n|---|---|---|---|---|---|\n"


def main() -> None:
    """Replace both in the page."""
    page = ROOT / "README.md"
    text = re.sub(
        r"(<!-- first lines of the answer -->\n```text\n).*?(```)",
        lambda found: f"{found[1]}{answer()}{found[2]}",
        page.read_text(),
        flags=re.DOTALL,
    )
    text = re.sub(rf"{re.escape(HEAD)}(\|.*\n)*", lambda _: HEAD + errors(), text)
    page.write_text(text)


def answer() -> str:
    """The first lines of the picture, from the words at each height."""
    picture = (ROOT / "docs" / "img" / "design.svg").read_text()
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', picture):
        rows.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    width = 12.2  # of a character in rich's pictures
    lines = []
    for _, words in sorted(rows.items()):
        line = ""
        for x, text in sorted(words):
            line = line.ljust(round(x / width)) + text
        lines.append(line.rstrip())
    shown = [line for line in lines if line and line.strip() != COMMAND][:LINES_SHOWN]
    return "\n".join(shown) + "\n"


def errors() -> str:
    """Rows of the table, publisher left out."""
    kinds = json.loads((ROOT / "reports" / "accuracy.json").read_text())["kinds"]
    return "".join(_row(title, kinds[kind]["left_out"]) for kind, title in ROWS.items())


def _row(title: str, of: dict[str, float]) -> str:
    cells = [str(of["rows"]), f"{of['median_abs_error']:.1%}", f"{of['p90_abs_error']:.1%}"]
    cells += [f"{of['bias']:+.1%}", f"{of['coverage']:.0%}"]
    return f"| {title} | " + " | ".join(cells).replace("%", " %") + " |\n"


if __name__ == "__main__":
    main()
