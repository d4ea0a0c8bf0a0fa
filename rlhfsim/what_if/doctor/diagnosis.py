"""The answer of a doctor: whether a configuration fits, and the changes of its keys that help most.

An edit of the specs becomes keys by writing the plan before and after it in the framework's own form; the
keys that differ are put over the user's configuration, which is read and priced again. So a change is in the
words of the framework, and its figures are those of what the framework will read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from rlhfsim.errors import RlhfsimError
from rlhfsim.finding import Finding
from rlhfsim.frozen import frozen
from rlhfsim.interchange.configuration.keys import Unread, as_written, key_table, unread
from rlhfsim.interchange.export import Exporter, Value, Written, exporter, exporters
from rlhfsim.interchange.refusal import lacks_of
from rlhfsim.interchange.table import bare
from rlhfsim.specs.frameworks.runs import runs_of
from rlhfsim.what_if.doctor.case import Case, Described, Judged, findings, judged
from rlhfsim.what_if.doctor.certainty import computed
from rlhfsim.what_if.doctor.edits import edited, edits
from rlhfsim.what_if.estimate import planned, priced_placement

NOTICEABLE = 0.02
"""Share of the step below which a gain is not worth a change."""
ACCEPTED = 0.1
"""Risk of running out of memory that a faster change may come with, where the configuration has less."""
ADDED = 0.05
"""Risk of running out of memory that all faster changes together may add, where it has more than that."""
MOVED = 0.1
"""Difference of the risk from which a switch that nobody gave is named."""
MOST = 3
"""Changes that are named."""
CLIMBED = 12
"""Changes that are tried on top of another one."""
WANTED = 4
"""Fast changes that do not fit and are tried with what saves memory."""
SAVERS = 8
"""Changes that are tried in pairs, and in larger sets, where none makes it fit alone."""
Keys = Mapping[str, Value]


@frozen
class KeyChange:
    """Keys of a framework with new values, read again and priced."""

    keys: Keys
    judged: Judged


@frozen
class Diagnosis:
    """A configuration and what would help it."""

    case: Case
    judged: Judged
    fixes: tuple[KeyChange, ...] = ()
    """Each makes it fit, the fastest first; empty where it fits."""
    faster: tuple[KeyChange, ...] = ()
    """Each with those before it, and with the first fix where there is one; the one that saves most first."""
    nearest: KeyChange | None = None
    """Where nothing fits: all that saves memory at once."""
    absent: tuple[KeyChange, ...] = ()
    """Switches that the configuration leaves at their default, and whose other value moves the risk."""
    findings: tuple[Finding, ...]
    unread: tuple[Unread, ...] = ()
    """Keys that the configuration sets and nothing here reads, what matters first."""
    unnamed: str | None = None
    """Why no change could be put into keys."""

    @property
    def lacks(self) -> str:
        """How a key that the release does not have is introduced."""
        name = f"{self.case.configuration.title} {self.case.recorded}"
        examples = key_table(self.case.configuration.name).examples
        return f"no such key in the examples of {name}" if examples else f"no such key in {name}"


def diagnose(case: Case) -> Diagnosis:
    """What a configuration does and what would help.

    Raises:
        RlhfsimError: it leaves open what decides, or cannot exist.
    """
    base = judged(case.under({}), case.price)
    case = replace(case, stopped_by=_stopped_by(case, base))
    told = Diagnosis(
        case=case, judged=base, findings=tuple(findings(case, base)), unread=unread_keys(case, base)
    )
    try:
        tries = list(_tries(case, base, _writer(case)))
    except RlhfsimError as error:
        return replace(told, unnamed=error.message)
    start, nearest = KeyChange(keys={}, judged=base), None
    fixes = () if base.fits else tuple(_fixes(case, tries))
    if not base.fits and not fixes:
        nearest = _all_it_takes(case, tries)
        fixes = (nearest,) if nearest is not None and nearest.judged.fits else ()
    start = fixes[0] if fixes else start
    steps = _climbed(case, start, [*tries, *_paired(case, tries)]) if start.judged.fits else [start]
    return replace(
        told,
        fixes=fixes,
        faster=tuple(steps[1:]),
        nearest=None if fixes else nearest,
        absent=tuple(_absent(base, tries)),
    )


def unread_keys(case: Case, base: Judged) -> tuple[Unread, ...]:
    """Keys that the configuration sets and nothing reads; none matters that says what is priced."""
    left = unread(case.configuration.name, case.version, base.described.settings)
    if all(key.kind == "default" for key in left):
        return left
    try:
        return as_written(left, _exporter(case).write(base.plan).values)
    except RlhfsimError:
        return left


# --- a change in keys -------------------------------------------------------------------------------


def _exporter(case: Case) -> Exporter:
    """How plans are written in the keys of its framework."""
    name = case.configuration.name
    if name not in exporters():
        raise RlhfsimError("framework-not-exported", f"{name} has no export that names its keys", help="")
    return exporter(name)


def _writer(case: Case) -> Callable[[Described], Written]:
    """How what is said is written in the keys of its framework."""
    way = _exporter(case)

    def write(described: Described) -> Written:
        specs = described.specs
        priced = priced_placement(specs.placement, specs.workload, specs.cluster)
        return way.write(planned(priced, priced.iteration, None))

    return write


def _tries(case: Case, base: Judged, write: Callable[[Described], Written]) -> Iterator[KeyChange]:
    """Every edit that the framework has keys for, read again from the user's configuration."""
    specs = base.described.specs
    before = _exporter(case).write(base.plan).values
    seen: list[Keys] = []
    for edit in edits(specs):
        try:
            after = write(replace(base.described, specs=edited(specs, edit))).values
        except RlhfsimError:
            continue  # an edit that cannot exist
        keys = {key: value for key, value in after.items() if before.get(key) != value}
        dropped = dict.fromkeys(key for key in before if key not in after)
        for new in (keys, keys | dropped):
            said = _spelled(case, new)
            change = changed(case, said) if said and said not in seen else None
            if change is not None and change.judged.described.specs != specs:
                seen.append(said)
                yield change
                break


def _spelled(case: Case, keys: Keys) -> Keys:
    """Keys under the names of the release that the configuration is written for; none where they clash."""
    settings, way = case.settings, case.configuration
    version = settings.find(way.version_key)
    try:
        names = case.under(keys).settings.names
    except RlhfsimError:
        return {}
    said: dict[str, Value] = {}
    for key, value in keys.items():
        renamed = way.spelled(key, version)
        if renamed is None:
            return {}
        own = key.replace(bare(key), settings.spelled(bare(key), names))
        said[own if renamed == key else renamed] = value
    return said


def changed(case: Case, keys: Keys) -> KeyChange | None:
    """The configuration with these keys, priced; None where the framework stops at one of them or does not
    run it. What it stops at without them as well is no reason."""
    try:
        found = judged(case.under(keys), case.price)
    except RlhfsimError:
        return None
    return None if _stopped_by(case, found) - case.stopped_by else KeyChange(keys=keys, judged=found)


def _stopped_by(case: Case, found: Judged) -> frozenset[str]:
    """What the framework stops at, and what of the plan it does not run where plans are written for it."""
    described, runs = found.described, runs_of(case.configuration.name)
    stops = {f.what for f in case.configuration.findings(described.settings, described.run) if f.stops}
    if runs is not None:
        stops |= {lacks.what for lacks in lacks_of(found.plan, runs, described.specs.cluster.vendors)}
    return frozenset(stops)


def _merged(case: Case, *changes: KeyChange) -> KeyChange | None:
    """Several changes at once; None where two of them set the same key."""
    keys: dict[str, Value] = {}
    for change in changes:
        if keys.keys() & change.keys.keys():
            return None
        keys |= change.keys
    return changed(case, keys)


def _absent(base: Judged, tries: Sequence[KeyChange]) -> list[KeyChange]:
    """Switches that nobody gave and that move the risk, those that move it most first."""
    said, risk = base.described.settings, _risk_of(base)
    moving = [
        change
        for change in tries
        if not any(said.says(*said.names.get(bare(key), (bare(key),))) for key in change.keys)
        and all(isinstance(value, bool | str) for value in change.keys.values())
        and abs(_risk(change) - risk) >= MOVED
    ]
    return sorted(moving, key=lambda change: -abs(_risk(change) - risk))[:MOST]


# --- which help -------------------------------------------------------------------------------------


def _fixes(case: Case, tries: Sequence[KeyChange]) -> list[KeyChange]:
    """Changes with which it fits: one key set, then two at once; the fastest first."""
    single = _fitting(tries)
    if len(single) >= MOST:
        return single[:MOST]
    savers = sorted((t for t in tries if t not in single), key=lambda t: t.judged.excess)[:SAVERS]
    pairs = _fitting(_merged(case, *pair) for pair in combinations(savers, 2))
    return [*single, *pairs][:MOST]


def _fitting(changes: Iterable[KeyChange | None]) -> list[KeyChange]:
    """Those that fit, one of those that set the same keys; without much risk first, then the fastest."""
    best: dict[frozenset[str], KeyChange] = {}
    for change in changes:
        if change is None or not change.judged.fits:
            continue
        keys = frozenset(change.keys)
        if keys not in best or _rank(change) < _rank(best[keys]):
            best[keys] = change
    return sorted(best.values(), key=_rank)


def _rank(change: KeyChange) -> tuple[bool, float]:
    return _risk(change) > ACCEPTED, change.judged.step_s


def _risk(change: KeyChange) -> float:
    return _risk_of(change.judged)


def _risk_of(judged: Judged) -> float:
    """The risk as it is printed, before it is kept from the extremes."""
    return computed(judged.memory)


def _all_it_takes(case: Case, tries: Sequence[KeyChange]) -> KeyChange | None:
    """What saves memory on top of each other, until it fits or nothing saves more."""
    savers = sorted(tries, key=lambda t: t.judged.excess)[:CLIMBED]
    whole = savers[0] if savers else None
    while whole is not None and not whole.judged.fits:
        more = [m for saver in savers if (m := _merged(case, whole, saver)) is not None]
        best = min(more, key=lambda m: m.judged.excess, default=None)
        if best is None or best.judged.excess >= whole.judged.excess:
            break
        whole = best
    return whole


def _paired(case: Case, tries: Sequence[KeyChange]) -> Iterator[KeyChange]:
    """Those that are fast and do not fit, each with one that saves memory."""
    unfit = sorted((t for t in tries if not t.judged.fits), key=lambda t: t.judged.step_s)[:WANTED]
    savers = sorted(tries, key=lambda t: t.judged.excess)[:SAVERS]
    for one in unfit:
        for other in savers:
            if (both := _merged(case, one, other)) is not None and both.judged.fits:
                yield both


def _climbed(case: Case, start: KeyChange, tries: Sequence[KeyChange]) -> list[KeyChange]:
    """The start, and one change more each time, the one that saves most then."""
    steps = [start]
    risk = max(ACCEPTED, _risk(start) + ADDED)
    likely = sorted(
        (t for t in tries if not t.keys.keys() & start.keys.keys()), key=lambda t: t.judged.step_s
    )
    while len(steps) <= MOST:
        here = steps[-1]
        more = [m for t in likely[:CLIMBED] if (m := _merged(case, here, t)) is not None]
        safe = [m for m in more if m.judged.fits and _risk(m) <= risk]
        best = min(safe, key=lambda m: m.judged.step_s, default=None)
        if best is None or best.judged.step_s > here.judged.step_s * (1 - NOTICEABLE):
            break
        steps.append(best)
    return steps
