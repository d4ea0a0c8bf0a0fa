"""Draws docs/img/design.svg: what `rlhfsim design --gpus 64 --model 70b` prints.

python docs/picture.py
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

import rlhfsim
from rlhfsim.present.answers.design import page
from rlhfsim.present.answers.design_details import Extras
from rlhfsim.present.terminal.page import show
from rlhfsim.what_if.risk.choice import chances

PICTURE = Path(__file__).parent / "img" / "design.svg"
COMMAND = "rlhfsim design --gpus 64 --model 70b"


def main() -> None:
    """Write the picture beside this file."""
    PICTURE.write_text(drawn())


def drawn() -> str:
    """The picture, from an answer of now."""
    cluster = rlhfsim.parse_cluster(64, "h100-sxm")
    workload = rlhfsim.Workload(model="70b")
    answer = rlhfsim.design(rlhfsim.Request(cluster=cluster, workload=workload))
    console = Console(record=True, width=100, file=io.StringIO(), highlight=False, markup=False)
    show(console, page(answer, Extras(side=chances(answer, (), None))))
    return console.export_svg(title=COMMAND, unique_id="design")


if __name__ == "__main__":
    main()
