"""Files that commands write: whole or absent, and never over what this program did not write.

A file is written next to its place under a temporary name and renamed. A link at its place is followed where
we or root made it, and refused where somebody else did. While it is written its temporary is locked (flock):
one that nobody holds was left by a killed process, and the next write in that folder removes it.
What is not a regular file (/dev/null, a FIFO) is written to as it is.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rlhfsim.errors import RlhfsimError, shown

PREFIX = ".rlhfsim-"
TEMPORARY = re.compile(re.escape(PREFIX) + r"[0-9a-f]{16}")
HEAD, TAIL = 4096, 65536
"""Bytes at the start and the end of a file in which its mark is looked for."""
MARKS = {
    "plan": rb'^\s*\{\s*"schema": "rlhfsim\.plan/',
    "what-if": rb'^\s*\{\s*"schema": "rlhfsim\.whatif/',
    "points.csv": rb"^name,[^\n]*\bgpus,architecture,role_placement,actor,rollout,",
    "points.parquet": rb"^PAR1.*\brole_placement\b.*PAR1$",
    "trace": rb'^\s*\{\s*"schema": "rlhfsim\.trace/\d+",\s*"source": "predicted"',
    "trace for Perfetto": rb'^\s*\{"displayTimeUnit": "ms", "otherData": \{"schema": "rlhfsim\.trace/',
    "page": rb'^<!DOCTYPE html>.*<meta name="generator" content="rlhfsim ',
    "rows": rb'^(kind,file,line,source,label,|\[\s*\{\s*"kind": "[^"]*",\s*"file": "[^"]*",\s*"line": )',
}
"""Kind of output -> the pattern by which an earlier one is known; a measured trace is none of them."""
FORMULAS = ("=", "+", "-", "@")
"""How a formula begins."""
DEVICES = ("/dev/", "/proc/")
"""What lies below is a stream of somebody else, even where it leads to a regular file."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` in one step; a reader sees the old file or the new one, never a part.

    Raises:
        RlhfsimError: it cannot be written.
    """
    with _told(path):
        if not is_replaceable(path):
            path.write_bytes(_bytes(content))
            return
        check_own_link(path)
        target = Path(os.path.realpath(path))  # a link stays a link
        with _temporary_file(target.parent, content) as temporary:
            with suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            os.replace(temporary, target)


def write_new(path: Path, content: str) -> bool:
    """The whole file in one step; False, and nothing is written, where there is one.

    Raises:
        RlhfsimError: it cannot be written.
    """
    with _told(path), _temporary_file(path.parent, content) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


@contextmanager
def growing(path: Path, kind: str) -> Iterator[IO[str]]:
    """A text file that others may read while it grows, as `PATH.part`; it takes its name when it is whole.

    What came before an error stays in the part, which the next run begins anew.

    Raises:
        RlhfsimError: it cannot be written, or one of the two is no output of this kind (of `MARKS`).
    """
    part = path.with_name(f"{path.name}.part")
    for one in (path, part):
        check_file(one, kind)
    with _told(path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(part, flags, 0o666), "w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(part, os.path.realpath(path))


def write_folder(out: Path, files: Mapping[str, str | bytes]) -> None:
    """A new folder with all files, or none; scripts (.sh) can be run.

    Raises:
        RlhfsimError: the folder holds something, or it cannot be written.
    """
    check_new_folder(out)
    with _told(out):
        target = Path(os.path.realpath(out))
        target.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_folder(target.parent) as work:
            for name, content in files.items():
                (work / name).write_bytes(_bytes(content))
                if name.endswith(".sh"):
                    (work / name).chmod((work / name).stat().st_mode | 0o111)
            try:
                os.replace(work, target)
            except OSError:
                check_new_folder(out)  # another process was faster
                raise


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/rlhfsim/NAME`, under `~/.cache` where that is not set: what is kept for a user.

    Raises:
        RlhfsimError: the user has no home folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(cache or Path.home() / ".cache") / "rlhfsim" / name
    except RuntimeError as error:
        raise RlhfsimError(
            "no-home-folder",
            f"there is no home folder to keep {name.replace('_', ' ')} in",
            help="set XDG_CACHE_HOME to a folder; whatif also takes --cache FOLDER and --no-cache",
        ) from error


# --- before a command works -------------------------------------------------------------------------


def check_file(path: Path, kind: str | None = None) -> None:
    """That `path` can be written, and replaces nothing but an output of this kind (of `MARKS`).

    Raises:
        RlhfsimError: its folder is missing or read-only, or it is a file of somebody else.
    """
    with _told(path):
        check_own_link(path)
        if path.is_symlink():
            with suppress(FileNotFoundError):  # its target may be new
                path.stat()
        if not is_replaceable(path):
            return
        _check_writable(path, Path(os.path.realpath(path)).parent)
        if kind is None or not path.exists() or not path.stat().st_size:
            return
        known = re.search(MARKS[kind], _ends(path), re.DOTALL)
    if known is None:
        raise RlhfsimError(
            "foreign-file",
            f"this file exists and is no {kind} of rlhfsim, so it is not written over",
            place=path,
            help="name another file, or move this one away",
        )


def check_own_link(path: Path) -> None:
    """That `path`, where it is a symbolic link, was made by us or by root.

    Raises:
        RlhfsimError: somebody else made it.
    """
    if path.is_symlink() and (owner := path.lstat().st_uid) not in (0, os.geteuid()):
        raise RlhfsimError(
            "foreign-link",
            f"this is a link that user {owner} made, so it is not followed",
            place=path,
            help="name the file itself, or remove the link",
        )


def check_new_folder(out: Path) -> None:
    """That `out` is no file, holds nothing, and can be made.

    Raises:
        RlhfsimError: otherwise.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RlhfsimError(
            "folder-not-empty",
            "the folder holds something already" if out.is_dir() else "this is a file",
            place=out,
            help="name a new folder with --out; nothing is overwritten",
        )
    _check_writable(out, next(p for p in Path(os.path.realpath(out)).parents if p.exists()))


def is_file(path: Path) -> bool:
    """Whether it is a regular file; False for what cannot be a path."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_replaceable(path: Path) -> bool:
    """Whether a rename may put another file there: a regular one, or none."""
    if str(path.absolute()).startswith(DEVICES):
        return False
    return not path.exists() or path.is_file() or path.is_dir()


def _check_writable(path: Path, folder: Path) -> None:
    reason = None
    if not folder.is_dir():
        reason = "there is no such folder" if not folder.exists() else "not a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = "the folder is read-only"
    if reason is not None:
        raise _unwritable(path, reason)


def _ends(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(HEAD)
        file.seek(max(HEAD, path.stat().st_size - TAIL))
        return head + file.read(TAIL)


# --- temporaries ------------------------------------------------------------------------------------


@contextmanager
def _temporary_file(folder: Path, content: str | bytes) -> Iterator[Path]:
    """The content under a temporary name, locked; gone afterwards unless it was renamed."""
    sweep(folder)
    while True:
        path = folder / f"{PREFIX}{secrets.token_hex(8)}"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(handle, "wb") as file:
            try:
                if not _locked(handle, path):
                    continue
                file.write(_bytes(content))
                file.flush()
                os.fsync(handle)  # else a power failure after the rename leaves an empty file under its name
                yield path
                return
            finally:
                with suppress(FileNotFoundError):
                    path.unlink()


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """An empty folder under a temporary name, locked; gone afterwards unless it was renamed."""
    sweep(folder)
    while True:
        path = folder / f"{PREFIX}{secrets.token_hex(8)}"
        path.mkdir()
        handle = os.open(path, os.O_RDONLY)
        try:
            if _locked(handle, path):
                yield path
                return
        finally:
            os.close(handle)
            shutil.rmtree(path, ignore_errors=True)


def _locked(handle: int, path: Path) -> bool:
    """Lock it; False where a sweep was faster. Without locks in this file system nothing is swept either."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def sweep(folder: Path) -> None:
    """Remove what killed processes left in the folder: our temporaries that nobody holds."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if TEMPORARY.fullmatch(name):
                _remove_unless_held(folder / name)


def _remove_unless_held(path: Path) -> None:
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        finally:
            os.close(handle)


# --- errors -----------------------------------------------------------------------------------------


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritable(path, (error.strerror or "error").lower()) from error


def _unwritable(path: Path, reason: str) -> RlhfsimError:
    return RlhfsimError(
        "unwritable-file",
        f"cannot write: {reason}",
        place=path,
        help="check that the folder exists and is writable",
    )


def _bytes(content: str | bytes) -> bytes:
    return content.encode(errors="backslashreplace") if isinstance(content, str) else content


# --- names ------------------------------------------------------------------------------------------


def csv_cell(value: object) -> object:
    """What is written in a cell of a CSV file: text that a spreadsheet would take for a formula is quoted.

    Source: OWASP, CSV injection.
    """
    if not isinstance(value, str) or not value.startswith(FORMULAS) or len(value) == 1:
        return value
    with suppress(ValueError):
        float(value)
        return value
    return f"'{value}"


def comment(text: str) -> str:
    """A line of a script or of YAML that nothing reads, whatever names `text` holds."""
    return f"# {shown(text).replace(chr(10), ' ')}"


def markdown_text(text: str) -> str:
    """A name in Markdown: it ends no cell of a table, and is neither link, image, code nor HTML."""
    plain = re.sub(r"[|\[\]`]", r"\\\g<0>", shown(text.replace("\n", " ")))
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", plain)
