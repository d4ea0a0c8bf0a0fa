"""What a file has gained since the last look; it may be rotated, cut, replaced, or come only later."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

PIECE_BYTES = 4 * 2**20
"""Read at once, so that a long log does not lie in memory."""
LONGEST_LINE = 8 * 2**20
"""Bytes without a line end that are kept: more are no line of a log."""
REMEMBERED = 64
"""Bytes before the place that was read to: where they have changed, the file is another one."""


class Tail:
    """The bytes of a file, each once; no handle stays open between two looks."""

    def __init__(self, path: Path) -> None:
        """The file need not be there yet."""
        self.path = path
        self._file_id: int | None = None
        self._at, self._before = 0, b""

    def pieces(self) -> Iterator[tuple[bytes, bool]]:
        """New bytes; True with those that begin the file again.

        A file that was renamed is read to its end under its new name first.
        """
        file_id = _file_id(self.path)
        if file_id is None:
            return
        begun = False
        if self._file_id not in (None, file_id):
            if (former := _renamed(self.path, self._file_id)) is not None:
                yield from ((piece, False) for piece in self._rest(former))
            begun = True
        elif self._at and self._is_another():
            begun = True
        if begun:
            self._at, self._before = 0, b""
        self._file_id = file_id
        for piece in self._rest(self.path):
            yield piece, begun
            begun = False

    def _is_another(self) -> bool:
        """Whether the file is shorter than what was read of it, or holds something else there."""
        with self.path.open("rb") as file:
            file.seek(self._at - len(self._before))
            return file.read(len(self._before)) != self._before

    def _rest(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(self._at)
            while piece := file.read(PIECE_BYTES):
                self._at += len(piece)
                self._before = (self._before + piece)[-REMEMBERED:]
                yield piece


def _file_id(path: Path) -> int | None:
    """The inode of a regular file; None where there is none."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_ino if stat.S_ISREG(state.st_mode) else None


def _renamed(path: Path, file_id: int | None) -> Path | None:
    """Where a rotated file is now: in the folder where it was, with its old name in the new one."""
    beside = (p for p in path.parent.iterdir() if p.name.startswith(path.name))
    return next((p for p in beside if _file_id(p) == file_id), None)


class LineTail:
    """The whole lines of a file, each once; a half line waits for its end."""

    def __init__(self, path: Path) -> None:
        """The file need not be there yet."""
        self._tail, self._half = Tail(path), b""

    def texts(self) -> Iterator[str]:
        """New text that ends with a line; bytes that are no text are replaced, holes left out."""
        for piece, begun in self._tail.pieces():
            text = piece if begun else self._half + piece
            end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
            self._half = text[end:] if len(text) - end <= LONGEST_LINE else b""
            if end:
                yield text[:end].replace(b"\0", b"").decode(errors="replace")
