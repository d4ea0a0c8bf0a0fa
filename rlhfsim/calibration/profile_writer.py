"""A calibrated profile as a new YAML file: what changed, from what, on which runs, and how far it holds.

The file `extends` the profile before it and names only the coefficients that moved. It is written whole or
not at all, and never over a file that exists or under the name of a profile that is known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import yaml

from rlhfsim import units
from rlhfsim.calibration.biases import section
from rlhfsim.calibration.fit import Calibrated, Calibration
from rlhfsim.calibration.left_out import PhaseError, off
from rlhfsim.calibration.observation import Observation
from rlhfsim.calibration.predict import REST, STEP, with_lengths
from rlhfsim.calibration.priors import DRIFT
from rlhfsim.errors import RlhfsimError
from rlhfsim.outputs import write_new
from rlhfsim.specs.hardware.calibrated import FrameworkBiases, Measurable, Point, Provenance, WorkloadMeasured
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import (
    aliases,
    find_profile,
    load_profile,
    profile_hash,
    profile_names,
    profile_yaml,
)
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.measurable import TURNS, stated
from rlhfsim.step.region import point

ENGINES = (
    "vllm",
    "deepspeed",
    "torch",
    "transformers",
    "ray",
    "megatron-core",
    "verl",
    "openrlhf",
    "nemo-rl",
    "trl",
    "rlhfsim",
)
"""Libraries whose version decides times."""
MAX_SOURCE = 1900
"""Characters of a source; the profile's field takes 2000."""
DIGITS = 5
BEHIND_POINT = {"common": 3, "at": 3, "log": 4, "reach": 3, "phase_error": 4, "step_error": 4, "region": 3}
"""Field -> digits behind the point."""
HEADER = """\
# Written by rlhfsim calibrate. `low` and `high` are the 10th and 90th percentile of what is believed.
# Coefficients that are not named here keep the value of the profile that this one extends.
"""


def write_profile(path: str | Path, calibration: Calibration, base: str | Path | None = None) -> Profile:
    """Write the calibrated profile to a new file.

    `base` is the file of the profile before, if it is no shipped one.

    Raises:
        RlhfsimError: the file exists, its name is that of a known profile, or it cannot be written.
    """
    out = Path(path)
    return write_text(out, profile_text(out.stem, calibration, _extends(out, calibration.profile, base)))


def write_text(out: Path, text: str) -> Profile:
    """The text as a new profile.

    Raises:
        RlhfsimError: as of `write_profile`.
    """
    check_new(out)
    if not write_new(out, text):
        check_new(out)
    return load_profile(out)


def check_new(out: Path) -> None:
    """That nothing is overwritten or hidden by a profile at `out`.

    Raises:
        RlhfsimError: the file exists, or a known profile has its name.
    """
    if out.suffix not in (".yaml", ".yml"):
        raise RlhfsimError(
            "bad-value", "a profile is a YAML file", place=out, help="as in --out calibrated.yaml"
        )
    if out.exists() or out.is_symlink():
        raise RlhfsimError(
            "file-exists",
            "this file exists, and a profile is never overwritten",
            place=out,
            help="give another --out, such as one with a date in its name",
        )
    name = out.stem.lower().replace("_", "-")
    taken = {known.lower().replace("_", "-") for known in (*profile_names(), *aliases())}
    if name in taken:
        raise RlhfsimError(
            "name-taken",
            f"a profile named {out.stem} is known; this one would hide it",
            place=out,
            help=f"give another --out, such as {out.stem}_calibrated.yaml",
        )


def _extends(out: Path, profile: Profile, base: str | Path | None) -> str | None:
    """How the new file names the profile before it; None: it must carry all of it."""
    shipped = load_profile(find_profile(profile.name)) if profile.name in profile_names() else None
    if shipped is not None and profile_hash(shipped) == profile_hash(profile):
        return profile.name
    if base is not None and Path(base).is_file():
        return os.path.relpath(os.path.realpath(base), os.path.dirname(os.path.realpath(out)))
    return None


# --- content --------------------------------------------------------------------------------------


def profile_text(name: str, calibration: Calibration, extends: str | None) -> str:
    """The YAML of the calibrated profile."""
    origin = provenance(calibration)
    moved = {
        c.name: replace(c.after, source=source(c, calibration, origin)) for c in calibration.coefficients
    }
    title = f"{calibration.profile.title} (calibrated)".replace(" (calibrated) (calibrated)", " (calibrated)")
    whole = replace(
        calibration.profile,
        name=name,
        title=title,
        aliases=(),
        calibration=origin,
        coefficients={**calibration.profile.coefficients, **moved},
        biases=biases_after(calibration),
        workload=workload_after(calibration),
    )
    if extends is None:
        return HEADER + profile_yaml(whole)
    data: dict[str, Any] = {
        "name": name,
        "title": title,
        "extends": extends,
        "coefficients": _plain(moved),
        "calibration": _plain(origin),
    }
    further = {"biases": whole.biases, "workload": whole.workload}
    data |= {key: _plain(value) for key, value in further.items() if value}
    return HEADER + yaml_text(data)


def biases_after(calibration: Calibration) -> dict[str, FrameworkBiases]:
    """The key `biases`: of the runs' framework as fitted, of others as before."""
    origin = provenance(calibration)
    versions = "".join(f", {name} {version}" for name, version in origin.versions.items())
    source = f"calibrated {origin.date} on {len(origin.runs)} runs, {origin.device}{versions}"
    return {**calibration.profile.biases, **section(calibration.biases, source[:MAX_SOURCE])}


def workload_after(calibration: Calibration) -> tuple[WorkloadMeasured, ...]:
    """The key `workload`: medians of runs by what their workloads stated, P10 to P90 of their steps.

    What was measured before where the runs stated that measurement is measured anew.
    """
    origin, runs = provenance(calibration), dict[tuple[Measurable, float], list[Observation]]()
    for run in calibration.observations:
        for name, said in stated(run.plan.workload).items():
            if run.workload.get(name):
                runs.setdefault((name, said), []).append(run)
    new = {
        (name, said): _median(
            [run.workload[name] for run in those],
            f"calibrated {origin.date} on {', '.join(run.name for run in those)}",
            "1" if name == TURNS else "s",
        )
        for (name, said), those in runs.items()
    }
    old = {(of.name, of.stated): of.measured for of in calibration.profile.workload}
    merged = {key: new.get((key[0], value.value), value) for key, value in old.items()} | new
    return tuple(
        WorkloadMeasured(name=name, stated=said, measured=c) for (name, said), c in sorted(merged.items())
    )


def _median(runs: Sequence[Sequence[float]], source: str, dimension: units.Dimension) -> Coefficient:
    value = median(map(median, runs))
    low, high = (float(x) for x in np.quantile([x for run in runs for x in run], (0.1, 0.9)))
    return Coefficient(
        value=value,
        low=min(value, low),
        high=max(value, high),
        dimension=dimension,
        source=source[:MAX_SOURCE],
    )


def _plain(value: Any, digits: int | None = None) -> Any:
    """A record as the mapping of a profile file, without what says nothing; `digits`: behind the point."""
    if isinstance(value, Coefficient):
        return _numbers(value)
    if is_dataclass(value):
        items = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {name: _plain(x, BEHIND_POINT.get(name)) for name, x in items if x not in (None, "", ())}
    if isinstance(value, Mapping):
        return {key: _plain(x, digits) for key, x in value.items()}
    if isinstance(value, tuple):
        return [_plain(x, digits) for x in value]
    return value if digits is None else round(value, digits)


def _numbers(c: Coefficient) -> dict[str, Any]:
    value, low, high = (written(x, c.dimension) for x in (c.value, c.low, c.high))
    return {"value": value, "low": low, "high": high, "source": c.source}


def written(value: float, dimension: units.Dimension, digits: int = DIGITS) -> float | str:
    """A number as a profile file says it: `450 GB/s`, or plain where it has no dimension."""
    if dimension == "1":
        return float(f"{value:.{digits}g}")
    return units.format(value, dimension, digits=digits).replace(",", "")


def yaml_text(data: Mapping[str, Any]) -> str:
    """The keys of a profile file in their order."""
    return yaml.dump(data, Dumper=yaml.CSafeDumper, sort_keys=False, width=100, allow_unicode=True)


def source(c: Calibrated, calibration: Calibration, origin: Provenance) -> str:
    """Runs, n, date, device, versions and interconnect of one coefficient, and what it was before."""
    versions = ", ".join(f"{k} {v}" for k, v in origin.versions.items())
    value, low, high = (written(x, c.before.dimension) for x in (c.before.value, c.before.low, c.before.high))
    before = f"{value} [{low}, {high}]"
    text = (
        f"calibrated {origin.date} on {c.runs} of {len(origin.runs)} runs "
        f"({', '.join(origin.runs[:6])}{', ...' * (len(origin.runs) > 6)}), n={c.n}, "
        f"{origin.device}, {origin.interconnect}{', ' * bool(versions)}{versions} | before {before}: "
        f"{c.before.source}"
    )
    return text if len(text) <= MAX_SOURCE else text[:MAX_SOURCE] + "..."


def provenance(calibration: Calibration) -> Provenance:
    """The key `calibration` of the new profile."""
    runs = calibration.observations
    dates = sorted(run.date for run in runs if run.date)
    return Provenance(
        base=calibration.profile.name,
        date=dates[-1] if dates else "unknown",
        device=", ".join(dict.fromkeys(run.device for run in runs)),
        interconnect=interconnect(calibration.profile),
        versions=engine_versions(runs),
        runs=tuple(run.name for run in runs),
        data=calibration.data,
        phase_error=error_pair(calibration.errors, step=False),
        step_error=error_pair(calibration.errors, step=True),
        drift=DRIFT,
        region=region(runs),
    )


def interconnect(profile: Profile) -> str:
    """`nvlink 450 GB/s over 8 GPUs, nic 50 GB/s`."""
    fabric = profile.scale_up
    rate, nic = (units.format(x, "byte/s") for x in (fabric.bandwidth.value, profile.nic.value))
    return f"{fabric.kind} {rate} over {fabric.domain} GPU{'s' * (fabric.domain != 1)}, nic {nic}"


def engine_versions(runs: Sequence[Observation]) -> dict[str, str]:
    """Versions of the engines; several of one are joined by /."""
    seen = {name: dict.fromkeys(r.versions[name] for r in runs if name in r.versions) for name in ENGINES}
    return {name: "/".join(versions) for name, versions in seen.items() if versions}


def error_pair(errors: Sequence[PhaseError], *, step: bool) -> tuple[float, float] | None:
    """Median error before and after, of steps or of phases; None where nothing could be left out."""
    rows = [e for e in errors if (e.phase == STEP) == step and e.after_s is not None]
    if not rows:
        return None
    before = median(off(e.before_s, e.measured_s) or 0.0 for e in rows)
    return before, median(off(e.after_s, e.measured_s) or 0.0 for e in rows)


def region(runs: Sequence[Observation]) -> dict[str, tuple[Point, ...]]:
    """The point of every run, by phase."""
    points_of: dict[str, dict[Point, None]] = {}
    for run in runs:
        plan = run.plan
        work = with_lengths(plan.workload, run.prompt_tokens, run.response_tokens)
        for phase in dict.fromkeys(p for name in run.phases for p in run.covers.get(name, (name,))):
            at = point(phase, plan.models, work, plan.placement)
            rounded = cast(Point, tuple(round(x, BEHIND_POINT["region"]) for x in at))
            points_of.setdefault(phase, {})[rounded] = None
    return {phase: tuple(points) for phase, points in points_of.items() if phase not in (STEP, REST)}
