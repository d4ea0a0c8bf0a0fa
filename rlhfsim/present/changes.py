"""Words of differences: `~` changed, `+` new, `-` gone, `!` another architecture; one cause as one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhfsim import units
from rlhfsim.present.input_names import input_name
from rlhfsim.present.tables import added
from rlhfsim.present.words import call, signed, work_parts
from rlhfsim.what_if.differences import RENT, RUN, ChangedField, ChangedFigure, Difference, Leaf, Value
from rlhfsim.what_if.scenarios.points import worded

MAIN = ("architecture", "role_placement")
"""Fields whose change is another design, not another number."""


def mark(before: object, after: object) -> str:
    """The sign of a change."""
    return "+" if before is None else "-" if after is None else "~"


def mark_of(change: ChangedField) -> str:
    """The sign of a changed field."""
    return "!" if change.path in MAIN else mark(change.before, change.after)


def leaf_text(leaf: Leaf, digits: int = 4) -> str:
    """A field's value."""
    if leaf is None or isinstance(leaf, bool):
        return {None: "-", True: "yes", False: "no"}[leaf]
    return units.significant(leaf, digits) if isinstance(leaf, float | int) else leaf


def changed_line(change: ChangedField) -> tuple[str, str]:
    """Sign and text of a changed field."""
    leaves = f"{leaf_text(change.before)} -> {leaf_text(change.after)}"
    return mark_of(change), f"{input_name(change.path)}: {leaves}"


def figure_line(figure: ChangedFigure, name: str) -> str:
    """A figure of the outcome, before and after."""
    by = f" ({_change(figure)})" if figure.relative is not None else ""
    return f"{name}: {value_text(figure.before)} -> {value_text(figure.after)}{by}"


def asked_leaf(path: str, leaf: Leaf) -> str:
    """A value that a scenario sets; a list or a mapping without its brackets."""
    if isinstance(leaf, str) and leaf.startswith(("{", "[")):
        return leaf.strip("{}[]").replace('"', "")
    return worded(path, leaf)


def value_text(value: Value | None) -> str:
    """A figure of the outcome."""
    if value is None:
        return "-"
    if value.likelihood:
        return units.likely(value.value)
    return units.significant(value.value, 4) if value.unit == "1" else units.format(value.value, value.unit)


# --- folded and summed up -------------------------------------------------------------------------------

WHOLE = 3
"""Fields from which on a part that only one side has is one row."""


def folded(rows: Sequence[ChangedField]) -> list[ChangedField]:
    """One row for a part that came or went, and for fields that changed alike; no hashes and sources."""
    rows = list(_parts([row for row in rows if not _follows(row, rows)]))
    groups: dict[tuple[object, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(_cause(row), []).append(row.path)
    first = {_cause(row): row for row in reversed(rows)}
    return [
        ChangedField(path=joined(paths), before=first[cause].before, after=first[cause].after)
        for cause, paths in groups.items()
    ]


def _follows(row: ChangedField, rows: Sequence[ChangedField]) -> bool:
    """Whether a field is the hash or the source of another one that changed."""
    follows = {row.path.removesuffix("_hash"), row.path.removesuffix("source") + "value"}
    return any(other.path in follows - {row.path} for other in rows)


def _part(path: str) -> str:
    """`critic`, `models.critic`: what a field is part of."""
    parts = path.split(".")
    return ".".join(parts[: 2 if parts[0] in ("models", "pools", "workload") else 1])


def _parts(rows: Sequence[ChangedField]) -> Iterator[ChangedField]:
    sides = {row.path: (row.before is None, row.after is None) for row in rows}
    count = added((_part(row.path), 1) for row in rows)
    seen = set()
    for row in rows:
        part = _part(row.path)
        of_part = {side for path, side in sides.items() if _part(path) == part}
        if count[part] < WHOLE or len(of_part) > 1 or of_part == {(False, False)}:
            yield row
        elif part not in seen:
            seen.add(part)
            there = f"all {count[part]:.0f} fields"
            gone = row.after is None
            yield ChangedField(path=part, before=there if gone else None, after=None if gone else there)


def _cause(row: ChangedField) -> tuple[object, ...]:
    """What changes of one cause have in common: the same values, of numbers under the same name."""
    words = isinstance(row.before, str) or isinstance(row.after, str)
    return row.before, row.after, "" if words else row.path.rsplit(".", 1)[-1]


def joined(paths: Sequence[str]) -> str:
    """`{actor,critic}.layout.dp`; paths that differ in more than one place one after the other."""
    split = [path.split(".") for path in paths]
    different = [i for i, parts in enumerate(zip(*split, strict=False)) if len(set(parts)) > 1]
    if len(paths) > 1 and len({len(parts) for parts in split}) == 1 and len(different) == 1:
        [at] = different
        parts = [*split[0]]
        parts[at] = f"{{{','.join(p[at] for p in split)}}}"
        return ".".join(parts)
    return ", ".join(paths)


def summary(difference: Difference) -> str:
    """`step 144 s -> 29.4 s (-80 %); not the same work (...): per sample -80 %`."""
    figures = {row.name: row for row in difference.outcome}
    said = [_moved("step", figures["step"])] if "step" in figures else ["the step stays as it is"]
    if "price of a step" in figures:
        said.append(_moved("price", figures["price of a step"]))
    said += [_moved(name, figures[name]) for name in (RUN, RENT) if name in figures]
    one, other = (side.plan.architecture for side in (difference.before, difference.after))
    said.append(f"{one} -> {other}" if one != other else f"{one} as before")
    if difference.other_work:
        each = next((row for name, row in figures.items() if name.startswith("step, per ")), None)
        by = f": {each.name.removeprefix('step, ')} {_change(each)}" if each else ""
        return f"{'; '.join(said)}; NOT THE SAME WORK ({work_parts(difference.other_work)}){by}"
    calls = [row for row in difference.outcome if "." in row.name and (row.before or row.after)]
    if calls:
        most = max(calls, key=lambda row: abs(_more(row)))
        said.append(f"most in {call(most.name)}: {_more(most):+.3g} s")
    return "; ".join(said)


def _moved(name: str, row: ChangedFigure) -> str:
    before, after = ("-" if v is None else units.format(v.value, v.unit) for v in (row.before, row.after))
    return f"{name} {before} -> {after}{f' ({_change(row)})' if row.relative is not None else ''}"


def _change(row: ChangedFigure) -> str:
    return "" if row.relative is None else signed(row.relative)


def _more(row: ChangedFigure) -> float:
    return (row.after.value if row.after else 0.0) - (row.before.value if row.before else 0.0)
