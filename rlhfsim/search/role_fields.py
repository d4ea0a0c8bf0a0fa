"""Fields of a role that a question may fix or bound, and the values that each can have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast, get_args

from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.search.layouts import EXCHANGE, SHARES
from rlhfsim.specs.hardware.hardware import MAX_GPUS
from rlhfsim.specs.placement.layout import Dispatcher, Offload, Recompute
from rlhfsim.specs.placement.placement import Residency

Relation = Literal["=", "!=", "<=", ">="]
MAX_DEGREE = 65536
PACKS = ("pack_tokens", "score_pack_tokens")
MAX_PACK = 100_000_000
"""Tokens of a pack on a GPU."""
ROLE_DEGREES = (
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "vp",
    "zero",
    "shards",
    "micro_batch",
    "score_micro_batch",
    *PACKS,
    "recompute",
    *EXCHANGE,
)
"""Fields of a layout that may be fixed to values which do not compete by themselves."""
DEGREES = {"rollout": ("tp", "pp", "ep", "dispatcher")}
"""Role -> its `ROLE_DEGREES`, where it has others."""
WHOLE: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "vp"), (1, MAX_DEGREE)),
    **dict.fromkeys(("micro_batch", "score_micro_batch"), (1, MAX_DEGREE)),
    **dict.fromkeys(PACKS, (1, MAX_PACK)),
    "zero": (0, 3),
    "shards": (2, MAX_DEGREE),
    "sleep": (0, 2),
    "gpus": (1, MAX_GPUS),
}
"""Field -> range of its values; these may be bounded."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "recompute": get_args(Recompute),
    "dispatcher": get_args(Dispatcher),
    "ep_overlap": ("no", "yes"),
    "residency": get_args(Residency),
    "offload_optimizer": get_args(Offload),
    "offload_between": ("no", "yes"),
    "offload_fraction": tuple(f"{share:g}" for share in (*SHARES, 1)),
}
"""Field -> its values; these may be equal or not."""
_YES_OR_NO = {"true": "yes", "1": "yes", "false": "no", "0": "no"}
WORDS = dict.fromkeys(("offload_between", "ep_overlap"), _YES_OR_NO)
"""Field -> other words for its values."""
FIELDS: Mapping[str, tuple[str, ...]] = {
    "rollout": ("tp", "pp", "dp", "ep", "dispatcher", "sleep", "gpus"),
    "actor": (*dict.fromkeys((*ROLE_DEGREES, *NAMES)), "gpus"),
}
"""Role -> fields; the other roles have those of the actor."""


def bound(role: str, field: str, relation: str, text: str) -> tuple[Relation, int | float | str]:
    """Relation and value of a limit on a field; `<` and `>` of whole numbers become `<=` and `>=`.

    Raises:
        RlhfsimError: the role has no such field, or the field no such value.
    """
    fields = FIELDS.get(role, FIELDS["actor"])
    if field not in fields:
        raise unknown_name("layout field", field[:40], fields)
    if field in NAMES:
        return _equality(role, field, relation), _named(field, text)
    number = _whole(role, field, text)
    if relation in ("<", ">"):
        return ("<=", number - 1) if relation == "<" else (">=", number + 1)
    return cast(Relation, relation), number


def _equality(role: str, field: str, relation: str) -> Relation:
    if relation not in ("=", "!="):
        raise RlhfsimError(
            "bad-value",
            f"{role}.{field}: {relation} needs a number",
            help=f"write = or != and one of {', '.join(NAMES[field])}",
        )
    return cast(Relation, relation)


def _named(field: str, text: str) -> float | str:
    word = text.strip().lower()
    name = WORDS.get(field, {}).get(word, word)
    if name not in NAMES[field]:
        raise unknown_name(field.replace("_", " "), text[:40], NAMES[field])
    if field in WORDS:
        return name == "yes"
    return float(name) if field == "offload_fraction" else name


def _whole(role: str, field: str, text: str) -> int:
    """A whole number in the range of its field; thousands may be written 1,024 or 1_024."""
    low, high = WHOLE[field]
    digits = text.strip().replace(",", "").replace("_", "")
    is_whole = digits.removeprefix("-").isascii() and digits.removeprefix("-").isdecimal()
    if not is_whole or len(digits) > 30 or not low <= int(digits) <= high:
        what = "is out of range" if is_whole else "is not a whole number"
        raise RlhfsimError(
            "bad-value",
            f"{role}.{field}: {text.strip()[:40]!r} {what}",
            help=f"give a whole number from {low:,} to {high:,}",
        )
    return int(digits)
