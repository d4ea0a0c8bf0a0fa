"""What the site is built from: every page that a page links to, at its place, and every public name."""

from __future__ import annotations

from pathlib import Path

import rlhfsim
from lab.docs_site import api_page, linked, stage

ROOT = Path(__file__).parents[2]


def _small(root: Path) -> Path:
    (root / "docs").mkdir()
    (root / "examples").mkdir()
    (root / "README.md").write_text('[a](docs/a.md#top) <img src="docs/p.svg"> [web](https://example.org)')
    (root / "docs" / "a.md").write_text("[up](../README.md) [files](../examples) [here](#top)")
    (root / "docs" / "p.svg").write_text("<svg/>")
    (root / "docs" / "unlinked.md").write_text("")
    (root / "examples" / "one.yaml").write_text("x: 1")
    return root


def test_links_are_followed_from_page_to_page_and_into_folders(tmp_path: Path) -> None:
    files, folders = linked(("README.md",), _small(tmp_path))
    assert files == {"README.md", "docs/a.md", "docs/p.svg", "examples/one.yaml"}
    assert folders == {"examples"}


def test_a_linked_folder_is_a_page_that_lists_its_files(tmp_path: Path) -> None:
    stage(tmp_path / "out", _small(tmp_path), ("README.md",))
    assert "[files](../examples/index.md)" in (tmp_path / "out/docs/a.md").read_text()
    assert "- [one.yaml](one.yaml)" in (tmp_path / "out/examples/index.md").read_text()


def test_every_page_of_the_documents_is_reached() -> None:
    files, _ = linked()
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= files


def test_the_api_page_has_every_public_name_from_its_home() -> None:
    page = api_page()
    assert {f"heading: rlhfsim.{name}\n" in page for name in rlhfsim.__all__} == {True}
    assert "::: rlhfsim.plan.Plan\n" in page
