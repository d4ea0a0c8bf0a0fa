"""Ray's token file is its owner's alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhfsim.ray_token import keep_private


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / ".ray" / "auth_token"


def test_a_token_that_others_can_read_is_taken_from_them(token: Path) -> None:
    token.parent.mkdir()
    token.write_text("a" * 64)
    token.chmod(0o644)
    keep_private(make=False)
    assert (token.read_text(), token.stat().st_mode & 0o777) == ("a" * 64, 0o600)


def test_a_token_is_made_private_and_once(token: Path) -> None:
    keep_private(make=True)
    first = token.read_text()
    keep_private(make=True)
    assert (token.read_text(), len(first), token.stat().st_mode & 0o777) == (first, 64, 0o600)


def test_none_is_made_where_it_is_not_wanted(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_private(make=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    keep_private(make=True)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 64)
    keep_private(make=True)
    assert not token.exists()
