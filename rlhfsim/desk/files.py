"""Files that are given to the desk as one text, and what is answered to them.

They are data: bounded in size, and written into a folder of their own while they are answered.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import NamedTuple

from rlhfsim.errors import RlhfsimError
from rlhfsim.present.answers.tree import Page

MAX_CHARACTERS = 2 * 2**20
HINT = "Drop files here: of a run, of the jobs of a pool, of a purchase, or of a reward to reach."
_HEAD = re.compile(r"^---[ \t]*#[ \t]*(\S+)[ \t]*$", re.MULTILINE)
_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)


class NamedFile(NamedTuple):
    """A file that was pasted."""

    name: str
    text: str


class DocumentAnswer(NamedTuple):
    """What is answered, and the command that answers the same in a terminal."""

    page: Page
    command: str


ReadDocuments = Callable[[str, tuple[NamedFile, ...]], DocumentAnswer]
"""From the query of an address and the files to the answer; importable, since another process calls it."""


def named_files(text: str) -> tuple[NamedFile, ...]:
    """The files of a text: each begins with a line `--- # NAME`; without one it is a single file.

    Raises:
        RlhfsimError: too large, empty, or a name that is no plain file name.
    """
    check_size(text, "a terminal takes files of any size")
    first, *more = _HEAD.split(text)
    named = [NamedFile("asked.yaml", first)] if first.strip() else []
    named += [NamedFile(name, part) for name, part in zip(more[::2], more[1::2], strict=True)]
    if not named:
        raise RlhfsimError("nothing-given", "there is nothing to answer", help=HINT)
    for name, _ in named:
        if not _NAME.fullmatch(name):
            raise RlhfsimError(
                "bad-name", f"{name[:40]!r} is no plain file name", help="as in --- # run.yaml"
            )
    return tuple(named)


def check_size(text: str, remedy: str) -> None:
    """Refuse what is longer than a page may send.

    Raises:
        RlhfsimError: it is.
    """
    if len(text) > MAX_CHARACTERS:
        longer = f"this is longer than {MAX_CHARACTERS // 2**20} MiB"
        raise RlhfsimError("too-large", longer, help=remedy)


def decoded(contents: str) -> str:
    """The text of a dropped file, `data:...;base64,...`.

    Raises:
        RlhfsimError: it is no text.
    """
    try:
        return base64.b64decode(contents.partition(",")[2], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise RlhfsimError("not-text", "the file is no UTF-8 text", help="drop a text") from error
