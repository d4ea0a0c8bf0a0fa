"""Values of command-line options: `tp=8,dp=2` becomes a layout."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.specs.loading import convert, parse_json
from rlhfsim.specs.placement.backends import Backend, violation
from rlhfsim.specs.placement.layout import Layout, RolloutLayout

T = TypeVar("T")
COMMAND_LINE = Place(file="command line")
_DEFAULT_ZERO: dict[Backend, int] = {"fsdp2": 3}


def parse_pairs(text: str, option: str) -> dict[str, str]:
    """`tp=8,dp=2` as a mapping; spaces around names and values do not matter.

    Raises:
        RlhfsimError: an item without `=`, without a name or value, or a name that stands twice.
    """
    pairs: dict[str, str] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name and equals and value):
            raise _bad(f"{option}: {item.strip()!r} is not name=value", f"write {option} tp=8,dp=2")
        if name in pairs:
            raise _bad(f"{option}: {name!r} stands twice", "give each name once")
        pairs[name] = value
    return pairs


def _bad(message: str, help: str) -> RlhfsimError:
    return RlhfsimError("bad-option", message, place=COMMAND_LINE, help=help)


def layout_option(text: str, option: str, backend: Backend = "megatron") -> Layout:
    """A training layout from `tp=8,pp=2,dp=4`; ZeRO is 3 for FSDP and 1 otherwise unless given.

    Raises:
        RlhfsimError: an unknown name, a bad degree, or a layout that the backend cannot run.
    """
    pairs: dict[str, Any] = dict(parse_pairs(text, option))
    pairs.setdefault("zero", _DEFAULT_ZERO.get(backend, 1))
    layout = _spec(Layout, pairs, option)
    reason = violation(backend, layout)
    if reason:
        raise RlhfsimError(
            "layout-not-supported",
            f"{option} {text}: {reason}",
            place=COMMAND_LINE,
            help="choose another layout, or another --backend",
        )
    return layout


def rollout_layout_option(text: str, option: str) -> RolloutLayout:
    """A rollout layout from `tp=8,dp=4,precision=fp8`.

    Raises:
        RlhfsimError: an unknown name or a bad degree.
    """
    return _spec(RolloutLayout, parse_pairs(text, option), option)


def _spec(kind: type[T], pairs: dict[str, Any], option: str) -> T:
    try:
        return convert(kind, parse_json(json.dumps(pairs), "command line"))
    except RlhfsimError as error:
        help = error.help if error.code != "bad-value" else f"write {option} tp=8,dp=2"
        raise RlhfsimError(error.code, f"{option}: {error.message}", place=COMMAND_LINE, help=help) from error
