"""Which profile a GPU's name means, as people and logs write it: `DGX-A100`, `NVIDIA H100 80GB HBM3`.

A name is the words in it: family, memory, form (SXM, PCIe, NVL), watts; makers, boxes and kinds of memory say
nothing more. It means the profile that knows every one of its words, and where several do, the one that bears
just these. A word that no profile knows makes it another machine, never the nearest one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from pathlib import Path

SILENT = frozenset(
    ("nvidia", "amd", "intel", "geforce", "tesla", "instinct", "rtx", "dgx", "hgx", "gpu", "tensor", "core")
) | {"hbm", "hbm2", "hbm2e", "hbm3", "hbm3e"}
"""Words that tell no two profiles apart."""
_MEMORY = re.compile(r"(\d+)g(?:i?b)?")
_FORM = re.compile(r"(sxm)\d*")
_PLACE = re.compile(r"rtx(\d+)")


def words(name: str) -> frozenset[str]:
    """The words of a name that tell machines apart; `80GB` and `80` are one."""
    found = {_word(word) for word in re.split(r"[\s_\-/()]+", name.strip().lower()) if word}
    return frozenset(found - SILENT)


def _word(word: str) -> str:
    for pattern in (_MEMORY, _FORM, _PLACE):
        if match := pattern.fullmatch(word):
            return match[1]
    return word


def meant(name: str, profiles: Mapping[Path, Set[str]]) -> Path | None:
    """The profile that is meant; None where none knows all words, or several do and none bears the bare name.

    `profiles`: file -> its name and aliases.
    """
    wanted = words(name)
    if not wanted:
        return None
    known = [p for p, names in profiles.items() if wanted <= frozenset().union(*map(words, names))]
    if len(known) > 1:
        known = [p for p in known if any(words(alias) == wanted for alias in profiles[p])]
    return known[0] if len(known) == 1 else None
