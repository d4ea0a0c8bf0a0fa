"""A folder whose disk fills up, tears writes, and after a power failure lacks what was not synced."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from lab.schedules.world import World

FULL_OPERATIONS = 400
"""Most writes for which a disk stays full."""
CHANGES = ("rename", "replace", "mkdir", "rmdir", "unlink", "symlink", "link")


class _TornFile(io.FileIO):
    """A file whose writes are operations: a killed process writes nothing more, a full disk half."""

    disk: Disk
    path: str

    def write(self, data: Any) -> int:
        """As `FileIO.write`."""
        self.disk.dirty[self.path] = None
        if self.disk.world.dead:
            return len(data)
        self.disk.world.operation()
        if self.disk.full > 0:
            self.disk.full -= 1
            super().write(bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


class Disk:
    """What happens below `root` while `attached`."""

    def __init__(self, root: Path, world: World) -> None:
        self.root, self.world, self.full = os.path.realpath(root), world, 0
        self.dirty: dict[str, None] = {}
        """Files with bytes that were not synced, in the order of their writes."""
        self._renamed: list[tuple[str, str]] = []
        """Folders whose new names were not synced."""
        world.act["full"] = self._fill

    def _fill(self) -> None:
        self.full = int(self.world.rng.integers(1, FULL_OPERATIONS))

    def _here(self, path: Any) -> bool:
        return not isinstance(path, int) and os.path.abspath(os.fspath(path)).startswith(self.root)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """The calls of this process go by this disk."""
        with contextlib.ExitStack() as patches:
            for name in CHANGES:
                patches.enter_context(mock.patch.object(os, name, self._change(name, getattr(os, name))))
            patches.enter_context(mock.patch.object(os, "fsync", self._fsync))
            patches.enter_context(mock.patch.object(os, "open", self._os_open(os.open)))
            opened = self._open(builtins.open)
            patches.enter_context(mock.patch.object(builtins, "open", opened))
            patches.enter_context(mock.patch.object(io, "open", opened))
            yield

    def _change(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **options: Any) -> Any:
            inner = options.get("dir_fd") is not None
            if not (inner or self._here(path) or (args and isinstance(args[0], str) and self._here(args[0]))):
                return real(path, *args, **options)
            self.world.operation()
            if name in ("mkdir", "symlink", "link") and self.full > 0:
                self.full -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = real(path, *args, **options)
            if name in ("rename", "replace"):
                self._moved(os.path.abspath(path), os.path.abspath(args[0]))
            return done

        return changed

    def _moved(self, old: str, new: str) -> None:
        for path in [p for p in self.dirty if p == old or p.startswith(f"{old}/")]:
            del self.dirty[path]
            self.dirty[new + path[len(old) :]] = None
        if os.path.isdir(new):
            self._renamed.append((old, new))

    def _fsync(self, handle: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}")
        if path.startswith(self.root):
            self.world.operation()
            self.dirty.pop(path, None)
            self._renamed = [pair for pair in self._renamed if os.path.dirname(pair[1]) != path]

    def _os_open(self, real: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR) and self._here(path):
                self.world.operation()
            return real(path, flags, *args, **options)

        return opened

    def _open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file
            if not set("wax") & set(mode) or not self._here(path):
                return real(file, mode, *args, **options)
            self.world.operation()
            raw = _TornFile(file, mode.replace("b", "").replace("t", ""), options.get("closefd", True))
            raw.disk, raw.path = self, os.path.abspath(path)
            buffered = io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, "utf-8", newline=options.get("newline"))

        return opened

    def lose_power(self) -> None:
        """What was not synced may be whole, cut short or empty; folders may have their old names again."""
        rng = self.world.rng
        for path in [path for path in self.dirty if os.path.isfile(path)]:
            if rng.random() < 0.5:
                os.truncate(path, int(rng.integers(0, os.path.getsize(path) + 1)))
        for old, new in reversed(self._renamed):
            if rng.random() < 0.5 and os.path.isdir(new) and not os.path.exists(old):
                os.rename(new, old)
