"""Folders of files that are kept for later, perhaps where others can write: no link in them is followed.

A file is opened, and replaced in one step, relative to the folder's descriptor. The folder must be ours,
root's or one that a group of ours may write to; nobody else may be able to put files into it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhfsim.errors import RlhfsimError
from rlhfsim.outputs import PREFIX, check_own_link, sweep

PRIVATE = 0o700
MAX_BYTES = 2**30
"""Most bytes of a file that is read."""


class Cache:
    """One folder of kept files."""

    def __init__(self, folder: Path, mode: int = 0o777) -> None:
        """Where they lie; the folder is made, with these rights, before the first file is written."""
        self.folder, self._mode = folder, mode

    def check(self) -> None:
        """Make the folder where it is absent, and clear away what killed processes left in it.

        Raises:
            RlhfsimError: it cannot be made, or others can put files into it.
        """
        with _told(self.folder), self._opened(make=True):
            sweep(self.folder)

    def read(self, name: str) -> bytes | None:
        """The file's content; None where it is absent, or no regular file.

        Raises:
            RlhfsimError: others can put files into the folder.
        """
        with suppress(OSError), self._opened() as folder:
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            with os.fdopen(file, "rb") as opened:
                return opened.read(MAX_BYTES) if stat.S_ISREG(os.fstat(file).st_mode) else None
        return None

    def write(self, name: str, content: bytes) -> None:
        """Put the file there, or in place of an earlier one, in one step.

        Raises:
            RlhfsimError: it cannot be written, or others can put files into the folder.
        """
        with _told(self.folder), self._opened(make=True) as folder, _temporary(folder, content) as temporary:
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)

    @contextmanager
    def _opened(self, *, make: bool = False) -> Iterator[int]:
        check_own_link(self.folder)
        if make:
            self.folder.mkdir(mode=self._mode, parents=True, exist_ok=True)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if reason := _strangers(os.fstat(folder)):
                raise _refused(self.folder, "shared-cache", reason)
            yield folder
        finally:
            os.close(folder)


def _strangers(found: os.stat_result) -> str:
    """Why others than us, root and our groups can put files into a folder; empty where they cannot."""
    if found.st_mode & stat.S_IWOTH:
        return "everybody may write to this folder"
    in_group = found.st_gid in {os.getegid(), *os.getgroups()}
    if found.st_mode & stat.S_IWGRP and not in_group:
        return f"group {found.st_gid}, which is none of yours, may write to this folder"
    if found.st_uid not in (0, os.geteuid()) and not found.st_mode & stat.S_IWGRP:
        return f"this folder belongs to user {found.st_uid}"
    return ""


@contextmanager
def _temporary(folder: int, content: bytes) -> Iterator[str]:
    """The content under a temporary name, locked until it is renamed or gone."""
    name = f"{PREFIX}{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o666, dir_fd=folder), "wb") as file:
        try:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content)
            file.flush()
            yield name
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _refused(folder, "unwritable-file", (error.strerror or "error").lower()) from error


def _refused(folder: Path, code: str, reason: str) -> RlhfsimError:
    return RlhfsimError(
        code,
        f"nothing can be kept here: {reason}",
        place=folder,
        help="give --cache FOLDER, one that only you or your group may write to, or --no-cache",
    )
