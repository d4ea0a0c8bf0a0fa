"""The pictures of README and docs/architecture.md show what is there today."""

from __future__ import annotations

import html
import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def words(svg: str) -> list[str]:
    """Every text of a picture; colours and fonts belong to the library that draws."""
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


@pytest.mark.parametrize(("script", "most"), [("picture", 1000), ("architecture_picture", 100)])
def test_the_picture_is_current(script: str, most: int) -> None:
    spec = importlib.util.spec_from_file_location(script, DOCS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    painter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(painter)
    shown = words(painter.PICTURE.read_text())
    assert 40 < len(shown) < most
    assert words(painter.drawn()) == shown, f"run: python docs/{script}.py"
