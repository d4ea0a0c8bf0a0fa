"""The README's picture shows what the command prints today."""

from __future__ import annotations

import html
import importlib.util
import re
from pathlib import Path

PAINTER = Path(__file__).parents[1] / "docs" / "picture.py"


def words(svg: str) -> list[str]:
    """Every text of a picture; colours and fonts belong to the library that draws."""
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


def test_the_picture_is_current() -> None:
    spec = importlib.util.spec_from_file_location("picture", PAINTER)
    assert spec is not None
    assert spec.loader is not None
    painter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(painter)
    shown = words(painter.PICTURE.read_text())
    assert len(shown) > 50
    assert words(painter.drawn()) == shown, "run: python docs/picture.py"
