"""Folders of kept files: no link out of them is followed, and none is used that others can put files into."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlhfsim.cache import PRIVATE, Cache
from rlhfsim.errors import RlhfsimError
from rlhfsim.outputs import check_file, write_atomically
from rlhfsim.what_if.scenarios.designs import DesignResult, Store

STRANGER = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
DESIGN = DesignResult(plan=None, shortage="no plan fits", gap=0.0, seconds=1.0)


def test_a_link_in_the_folder_is_replaced_and_never_followed(tmp_path: Path) -> None:
    foreign, folder = tmp_path / "foreign", tmp_path / "shared"
    foreign.write_text("precious")
    folder.mkdir()
    (folder / "key.json").symlink_to(foreign)
    store = Store(folder)
    assert store.recall("key") is None
    store.keep("key", DESIGN)
    assert (foreign.read_text(), (folder / "key.json").is_symlink()) == ("precious", False)
    assert store.recall("key") == DESIGN
    assert [p.name for p in folder.iterdir()] == ["key.json"]


@pytest.mark.parametrize("kind", ["fifo", "folder", "absent"])
def test_what_is_no_file_is_not_kept(tmp_path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / "x")
    elif kind == "folder":
        (tmp_path / "x").mkdir()
    assert Cache(tmp_path).read("x") is None
    assert Cache(tmp_path / "none").read("x") is None


def test_a_folder_that_everybody_may_write_to_keeps_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.write("x", b"1")
    tmp_path.chmod(0o1777)
    for use in (cache.check, lambda: cache.read("x"), lambda: cache.write("x", b"2")):
        with pytest.raises(RlhfsimError, match="everybody may write") as refused:
            use()
        assert refused.value.code == "shared-cache"
    tmp_path.chmod(0o755)
    assert cache.read("x") == b"1"


@as_root
@pytest.mark.parametrize(
    ("owner", "group", "mode", "said"),
    [
        (STRANGER, STRANGER, 0o755, f"belongs to user {STRANGER}"),
        (STRANGER, STRANGER, 0o775, f"group {STRANGER}"),
        (0, STRANGER, 0o775, f"group {STRANGER}"),
        (STRANGER, 0, 0o775, ""),
        (0, STRANGER, 0o755, ""),
    ],
)
def test_a_folder_is_ours_or_our_groups(tmp_path: Path, owner: int, group: int, mode: int, said: str) -> None:
    os.chown(tmp_path, owner, group)
    tmp_path.chmod(mode)
    if said:
        with pytest.raises(RlhfsimError, match=said):
            Cache(tmp_path).check()
    else:
        Cache(tmp_path).write("x", b"1")
        assert Cache(tmp_path).read("x") == b"1"


@as_root
def test_a_link_that_a_stranger_made_is_followed_by_no_output(tmp_path: Path) -> None:
    foreign, link = tmp_path / "foreign", tmp_path / "out.html"
    foreign.write_text("precious")
    link.symlink_to(foreign)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    for use in (lambda: write_atomically(link, "x"), lambda: check_file(link)):
        with pytest.raises(RlhfsimError, match="is not followed"):
            use()
    folder = tmp_path / "cache"
    (tmp_path / "other").mkdir()
    folder.symlink_to(tmp_path / "other")
    os.chown(folder, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(RlhfsimError, match="is not followed"):
        Cache(folder).write("x", b"1")
    assert foreign.read_text() == "precious"


def test_a_new_private_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    Cache(tmp_path / "judge" / "ab", PRIVATE).write("x", b"1")
    assert (tmp_path / "judge" / "ab").stat().st_mode & 0o777 == PRIVATE


def test_a_place_that_is_a_file_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RlhfsimError, match="nothing can be kept here"):
        Cache(tmp_path / "file").check()
