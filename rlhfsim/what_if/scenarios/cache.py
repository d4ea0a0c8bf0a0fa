"""Designs kept on disk: one file each, named by the hash of what was asked, written in one step.

A file that cannot be read, or that another version wrote in another form, counts as absent.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.plan import Plan, write_atomically
from rlhfsim.specs.loading import checked


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search came to."""

    plan: Plan | None
    """None: nothing fits."""
    shortage: str | None = None
    """Where nothing fits: what is missing."""
    gap: float = 0.0
    """Share of the step by which a plan could still be shorter."""
    seconds: float = 0.0
    """Of the search."""


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/rlhfsim/designs`, under `~/.cache` where that is not set."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home or Path.home() / ".cache") / "rlhfsim" / "designs"


class Store:
    """A folder of designs."""

    def __init__(self, folder: Path) -> None:
        """The folder is made where it is absent.

        Raises:
            RlhfsimError: it cannot be made.
        """
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RlhfsimError(
                "unwritable-file",
                f"cannot keep designs: {(error.strerror or 'error').lower()}",
                place=Place(file=str(folder)),
                help="give --cache FOLDER, or --no-cache",
            ) from error

    def recall(self, key: str) -> Found | None:
        """The design of this key; None where there is none that can be read."""
        try:
            data = json.loads(self._path(key).read_bytes())
            found: Found = TypeAdapter(Found).validate_python(data)
        except (OSError, ValueError, ValidationError, RecursionError):
            return None
        return found

    def keep(self, key: str, found: Found) -> None:
        """Write a design; a reader sees all of it or nothing."""
        data = TypeAdapter(Found).dump_python(found, mode="json")
        write_atomically(self._path(key), json.dumps(data) + "\n")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
