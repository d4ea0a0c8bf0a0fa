"""Older releases of a framework: keys that had other names, and what could not be told yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan


@frozen
class Missing:
    """A key, or a group of keys, that a release does not have."""

    what: str = ""
    """What it says of a plan; empty: nothing that the release does not do by itself."""
    instead: str = ""
    nearest: Callable[[Plan], Plan] | None = None
    """The plan as the release runs it; None: not priced."""
    refused: bool = False
    """The plan cannot be run without it."""


@frozen
class Release:
    """An older release, told apart from the newest that is written."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Key, or beginning of keys, of the newest -> of this one; the longest that fits holds."""
    missing: Mapping[str, Missing] = field(default_factory=dict)
    """Key, or beginning of keys, of the newest."""

    def key(self, newest: str) -> str:
        """The key of this release."""
        old = _longest(newest, self.renamed)
        return newest if old is None else self.renamed[old] + newest[len(old) :]

    def lacks(self, newest: str) -> Missing | None:
        """What is missing with a key of the newest; None: it is there."""
        old = _longest(newest, self.missing)
        return None if old is None else self.missing[old]


def _longest(key: str, beginnings: Iterable[str]) -> str | None:
    return max((b for b in beginnings if key.startswith(b)), key=len, default=None)


def numbers(version: str) -> tuple[int, ...]:
    """Major, minor and patch of a release, as far as it names them."""
    return tuple(int(number) for number in re.findall(r"\d{1,6}", version)[:3])


def nearest_release(version: str, known: Iterable[str]) -> str | None:
    """The known release of the same minor version with the nearest patch, without a patch the last one.

    None: no release of that minor version is known.
    """
    wanted = numbers(version)
    alike = [release for release in known if len(wanted) > 1 and numbers(release)[:2] == wanted[:2]]

    def distance(release: str) -> tuple[int, int]:
        patch = (*numbers(release), 0)[2]
        return (abs(patch - wanted[2]) if len(wanted) > 2 else 0, -patch)

    return min(alike, key=distance, default=None)


def check_version(name: str, version: str, known: Iterable[str]) -> None:
    """Refuse a release that is not written.

    Raises:
        RlhfsimError: its keys are not known.
    """
    if version not in known:
        raise RlhfsimError(
            "version-not-written",
            f"the keys of {name} {version} are not known",
            help=f"known: {', '.join(known)}; leave out --version for the newest",
        )


def refusal(name: str, version: str, missing: Missing) -> RlhfsimError:
    """A plan that needs what a release lacks."""
    return RlhfsimError(
        "release-does-not-run-plan",
        f"{name} {version} has no key for {missing.what}",
        help=f"{missing.instead}, or leave out --version",
    )
