"""Which measured runs lie near a question, and how far a prediction may be off there.

    nearest(conditions)             the measured run that is most like it, with our error there
    spread(base, distance)          standard deviation of ln(true / predicted) that no coefficient explains
    widened(seconds, low, high, spread)

    distance^2 = sum of squares: a share of each e-fold between sizes, lengths and numbers of GPUs (`SIZES`),
                 a fixed amount for another GPU, framework, backend, kind of model, ... (`WORDS`)
    spread^2   = base^2 (1 + distance^2)

`measured_runs.csv` holds the runs of `lab.scoreboard` with the error of a prediction that saw no row of
their publisher; the base is `training_discrepancy`, `rl_step_discrepancy` or `memory_discrepancy` of
`common.yaml`, fitted on those errors (both: `python -m lab.fits.discrepancy`). The amounts of a distance are
judged, not fitted.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib import resources
from statistics import median

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.hardware import Cluster, Profile
from rlhfsim.specs.model.presets import preset_name, resolve_model
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.units import significant

FILE = "measured_runs.csv"
FAR = 1.0
"""Distance from which a run is not called near: another framework, GPU and kind of model at once."""
REACH = "memory_reach"
"""Coefficient: distance up to which the intervals of memory were compared with measurements."""
COEFFICIENTS = {
    "training": "training_discrepancy",
    "rlhf.step": "rl_step_discrepancy",
    "memory.training_peak": "memory_discrepancy",
}
"""Kind of a measured run -> coefficient with the spread close to a measured run."""
SIZES = {"params": 0.3, "length": 0.2, "gpus": 0.15}
"""Distance of an e-fold."""
WORDS = {
    "framework": 0.4,
    "backend": 0.3,
    "model_kind": 0.6,
    "mixer": 0.6,
    "algorithm": 0.3,
    "precision": 0.3,
}
"""Distance of another word."""
SAME_GENERATION, OTHER_GENERATION = 0.3, 0.6
"""Distance of another GPU."""
GENERATIONS = (
    ("v100",),
    ("a100", "a800", "a10g", "a40", "a6000"),
    ("l4", "l20", "l40s", "rtx"),
    ("h100", "h200", "h800", "h20"),
    ("b200", "b300", "gb200", "gb300"),
    ("mi250x", "mi300x", "mi325x", "mi355x"),
)


@frozen
class Conditions:
    """What decides how well a run is known."""

    kind: str
    """`training`, `rlhf.step` or `memory.training_peak`."""
    framework: str
    """Without its release; empty where any may run it."""
    backend: str
    gpu: str
    """Name of the profile."""
    model: str
    params: float
    moe: bool
    length: float
    """Mean prompt and response, or the sequence length, tokens."""
    gpus: int
    algorithm: str
    precision: str
    mixer: str = "attention"
    """`ModelSpec.mixer`."""
    dispatcher: str = "none"
    """Dispatcher of experts over ranks: `none`, `named` or `not named`; decides a group, no distance."""
    kernels: str = "own"
    """Tables of kernel times: the GPU's `own`, `borrowed` or `none`; decides a group, no distance."""

    @property
    def model_kind(self) -> str:
        """What a mixture of experts is told from."""
        return "mixture of experts" if self.moe else "dense"


@frozen
class MeasuredRun:
    """A published run and our error there."""

    conditions: Conditions
    release: str
    error: float
    """(predicted - measured) / measured, by a prediction that saw no row of the publisher."""
    source: str
    """Publication."""


@frozen
class Near:
    """The measured run that is most like a question."""

    run: MeasuredRun
    distance: float
    differs: tuple[str, ...]
    """In what, for people."""

    @property
    def near(self) -> bool:
        """Whether it says something about the question."""
        return self.distance < FAR


def dispatcher_of(layout: Layout) -> str:
    """Whether who sends tokens to experts is known."""
    if layout.ep == 1:
        return "none"
    return "named" if layout.dispatcher else "not named"


def kernels_of(profile: Profile) -> str:
    """Whose kernel times a GPU has."""
    curves = profile.curves or {}
    return "borrowed" if curves.get("borrow") else "own" if curves.get("tables") else "none"


def distance(a: Conditions, b: Conditions) -> float:
    """How unlike two runs are; 0 for the same."""
    return math.hypot(*_terms(a, b).values())


def _terms(a: Conditions, b: Conditions) -> dict[str, float]:
    sizes = {n: w * abs(math.log(getattr(a, n) / getattr(b, n))) for n, w in SIZES.items()}
    words = {n: w * (_word(a, n) != _word(b, n)) for n, w in WORDS.items()}
    return {**sizes, **words, "gpu": _gpu_distance(a.gpu, b.gpu)}


def _word(a: Conditions, name: str) -> str:
    """`NeMo-RL` and `nemo-rl` are one framework."""
    return _plain(getattr(a, name))


@cache
def _plain(word: object) -> str:
    return str(word).lower().replace("_", "-")


def _gpu_distance(a: str, b: str) -> float:
    if a == b:
        return 0.0
    return SAME_GENERATION if _generation(a) == _generation(b) else OTHER_GENERATION


@cache
def _generation(gpu: str) -> int | str:
    family = gpu.split("_")[0].split("-")[0]
    return next((i for i, names in enumerate(GENERATIONS) if family in names), family)


def nearest(question: Conditions, runs: Iterable[MeasuredRun] | None = None) -> Near | None:
    """The run of the same kind that is most like it; None where that kind was never measured."""
    known = [r for r in (measured_runs() if runs is None else runs) if r.conditions.kind == question.kind]
    if not known:
        return None
    run = min(known, key=lambda r: (distance(question, r.conditions), abs(r.error)))
    return Near(
        run=run,
        distance=distance(question, run.conditions),
        differs=tuple(_differences(question, run.conditions)),
    )


def compared(framework: str, kind: str = "rlhf.step") -> tuple[float, ...]:
    """Our errors on the published runs of a framework (`nemo-rl`), whichever its release; empty where none of
    its runs was ever compared with a prediction."""
    runs = (r for r in measured_runs() if r.conditions.kind == kind)
    return tuple(r.error for r in runs if _word(r.conditions, "framework").partition(" ")[0] == framework)


@cache
def model_error(kind: str = "rlhf.step") -> float:
    """Median of |predicted - measured| / measured over the published runs of a kind."""
    return median(abs(r.error) for r in measured_runs() if r.conditions.kind == kind)


def _differences(question: Conditions, run: Conditions) -> Iterator[str]:
    """What is not the same there, the heaviest first."""
    terms = _terms(question, run)
    for name in sorted((n for n, d in terms.items() if d > 0), key=lambda n: -terms[n]):
        here, there = getattr(question, name), getattr(run, name)
        if name in SIZES:
            factor = here / there
            if max(factor, 1 / factor) >= 1.5:
                what = {"params": "the parameters", "length": "the length", "gpus": "the GPUs"}[name]
                times = significant(max(factor, 1 / factor), 2)
                yield f"{times} times {what} here" if factor > 1 else f"1/{times} of {what} here"
        elif name == "framework":
            yield f"framework {there}"
        else:
            yield f"{there} there" if name in ("model_kind", "mixer") else f"{name} {there}"


def memory_doubt(models: Models, backend: Backend, workload: Workload, cluster: Cluster) -> float:
    """Deviation of a plan's bytes over that of its components, for its distance from measured peaks.

        max(1, sqrt(1 + d^2) / sqrt(1 + r^2))      r = `memory_reach`

    The components' own intervals hold the peaks of publishers that were left out, up to the distance r. The
    algorithm asks nothing of memory that the components do not say.
    """
    profile, actor = cluster.node_group.profile, models.actor
    length = stats(workload.prompt_len).mean + stats(workload.response_len).mean
    question = Conditions(
        kind="memory.training_peak",
        framework=cluster.framework or "",
        backend=backend,
        gpu=profile.name,
        model=actor.name,
        params=actor.num_params,
        moe=actor.moe is not None,
        length=max(1.0, length),
        gpus=cluster.gpus,
        algorithm="pre-training",
        precision="fp8" if workload.train_precision == "fp8" else "bf16",
        mixer=actor.mixer,
    )
    return max(1.0, math.hypot(1.0, _peak_distance(question)) / math.hypot(1.0, profile[REACH]))


@lru_cache(maxsize=1024)
def _peak_distance(question: Conditions) -> float:
    found = nearest(question)
    return found.distance if found else FAR


def spread(base: float, away: float) -> float:
    """Standard deviation of ln(true / predicted) in addition to what the coefficients say."""
    return base * math.hypot(1.0, away)


def widened(value: float, low: float, high: float, more: float) -> tuple[float, float]:
    """P10 and P90 with `more`, at P90 in ln, added in squares on both sides."""
    if more <= 0 or value <= 0:
        return low, high
    up = math.hypot(math.log(max(high, value) / value), more)
    least = min(low, value)
    down = math.hypot(math.log(value / least), more) if least > 0 else math.inf
    return value * math.exp(-down), value * math.exp(up)


# --- the file ---------------------------------------------------------------------------------------


@cache
def measured_runs() -> tuple[MeasuredRun, ...]:
    """The runs that ship."""
    text = (resources.files("rlhfsim.step") / FILE).read_text(encoding="utf-8")
    return tuple(map(_run, csv.DictReader(io.StringIO(text))))


@lru_cache(maxsize=1024)
def mixer_of(model: str) -> str:
    """`ModelSpec.mixer` of a preset or of a config at hand; `attention` for a name that is neither."""
    if preset_name(model) is None and not os.path.exists(model):
        return "attention"
    try:
        return resolve_model(model).mixer
    except RlhfsimError:  # a plan may be shown where another file bears the name of its model
        return "attention"


def _run(cells: dict[str, str]) -> MeasuredRun:
    conditions = Conditions(
        kind=cells["kind"],
        framework=cells["framework"],
        backend=cells["backend"],
        gpu=cells["gpu"],
        model=cells["model"],
        params=float(cells["params"]),
        moe=cells["moe"] == "1",
        length=float(cells["length"]),
        gpus=int(cells["gpus"]),
        algorithm=cells["algorithm"],
        precision=cells["precision"],
        mixer=mixer_of(cells["model"]),
    )
    return MeasuredRun(
        conditions=conditions, release=cells["release"], error=float(cells["error"]), source=cells["source"]
    )
