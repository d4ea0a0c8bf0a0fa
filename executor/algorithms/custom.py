"""Parts of an algorithm that the user brings: `custom` in the settings names a function or class for each.

loss        batch (`PolicyBatch`) -> (B, T) terms of the surrogate, or these and {metric: (B, T)}
advantages  samples, rewards as they are learned from -> a number or (R,) array a sample; with a critic
            (advantages, returns)
sampler     batch, count, size -> `count` positions of problems (`size` of them; None: endless); the same
            where a batch is asked for twice
filter      scored samples -> those to learn from, at most as many; in the place of others nothing is learned
logger      iterations done, metrics of the last -> None

All get their `options` as keyword arguments: a function at each call, a class when it is made. An object that
remembers has `save(folder)` and `load(folder)`, which are part of every checkpoint; a sampler may have
`update(samples)`, a logger `show(step, lines)` and `close()`. `seconds_per_sample` of a function or class is
what the prediction adds for each sample of a step. Legend: B sequences, T and R response tokens.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from executor.samples import Sample, emptied
from executor.settings import Custom, CustomPart, Settings
from executor.targets import resolve
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.specs.workload.workload import OwnParts, Workload
from rlhfsim.trace import CPU_POOL
from rlhfsim.units import parse

if TYPE_CHECKING:  # the launcher has none
    from torch import Tensor

FOLDER = "custom"
"""Folder of a checkpoint: what parts remember."""
_HELP = "what each part gets and returns: docs/executor.md, your own algorithm"


Estimates = tuple[list[Any], list[Any] | None]
"""Advantages, and with a critic returns."""


class PolicyBatch(NamedTuple):
    """What a loss sees of a micro-batch: (B, T) in FP32, 0 where the mask is 0."""

    logprobs: Tensor
    """Log-probs of the policy in training, with gradient."""
    old_logprobs: Tensor
    """Before this step's update."""
    advantages: Tensor
    mask: Tensor
    rollout_logprobs: Tensor | None
    """As the rollout engine reported them."""
    reference_logprobs: Tensor | None


def make(part: CustomPart, folder: str = "") -> Callable[..., Any]:
    """The part, ready to be called; modules are looked for in `folder`, by default the working directory.

    Raises:
        RlhfsimError: it cannot be imported or made.
    """
    _see_folder(folder)
    with named("", part):
        found: Any = resolve(part.target)
        made: Any = found(**part.options) if inspect.isclass(found) else partial(found, **part.options)
        return made  # type: ignore[no-any-return]


def _see_folder(folder: str) -> None:
    folder = folder or os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)


@contextmanager
def named(name: str, part: CustomPart) -> Iterator[None]:
    """An error inside is one of this part."""
    try:
        yield
    except RlhfsimError:
        raise
    except Exception as error:
        where = f"custom.{name} " if name else ""
        raise RlhfsimError(
            "custom-part", f"{where}{part.target} failed: {type(error).__name__}: {error}", help=_HELP
        ) from error


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts of a run that its driver calls, with what they remember."""

    custom: Custom = field(default_factory=Custom)
    with_reference: bool = False
    timed: Callable[[str, int], AbstractContextManager[Any]] = lambda name, step: nullcontext()
    """Records what a part takes in an iteration."""
    made: dict[str, Any] = field(default_factory=dict)
    """Name -> callable."""

    def __post_init__(self) -> None:
        """Make those that are named; the loss is made where it is computed."""
        for name in ("advantages", "sampler", "filter", "logger"):
            if (part := getattr(self.custom, name)) is not None:
                self.made.setdefault(name, make(part))

    def call(self, name: str, step: int, *args: Any) -> list[Any]:
        """The list that a part returns, timed.

        Raises:
            RlhfsimError: it failed, or gave no list.
        """
        with self.timed(name, step), named(name, getattr(self.custom, name)):
            return list(self.made[name](*args))

    def filtered(self, samples: Sequence[Sample], step: int) -> list[Sample]:
        """As many samples, those that the filter left out without their response.

        Raises:
            RlhfsimError: it failed, returned more, or something else.
        """
        if "filter" not in self.made:
            return list(samples)
        kept = self.call("filter", step, list(samples))
        if len(kept) > len(samples) or not all(isinstance(sample, Sample) for sample in kept):
            text = f"custom.filter returned {len(kept)} of {len(samples)} samples, or something else"
            raise RlhfsimError("custom-filter", text, help=_HELP)
        ids = {sample.id for sample in kept}
        if len(ids) < len(kept):
            raise RlhfsimError("custom-filter", "custom.filter returned a sample twice", help=_HELP)
        rest = [sample for sample in samples if sample.id not in ids][: len(samples) - len(kept)]
        return kept + [emptied(sample, with_reference=self.with_reference) for sample in rest]

    def estimates(self, samples: list[Sample], step: int, *, critic: bool) -> Estimates:
        """What `advantages` finds of each sample.

        Raises:
            RlhfsimError: it failed, or gave no lists.
        """
        found = self.call("advantages", step, samples)
        if not critic:
            return found, None
        if len(found) != 2:
            text = f"custom.advantages gave {len(found)} lists, with a critic it gives advantages and returns"
            raise RlhfsimError("custom-advantages", text, help=_HELP)
        with named("advantages", self.custom.advantages):  # type: ignore[arg-type]
            advantages, returns = map(list, found)
        return advantages, returns

    def learned(self, samples: Sequence[Sample]) -> None:
        """An iteration has been trained on these: the sampler may follow."""
        update = getattr(self.made.get("sampler"), "update", None)
        if update is not None:
            with named("sampler", self.custom.sampler):  # type: ignore[arg-type]
                update(list(samples))

    def positions(self, batch: int, count: int, size: int | None) -> list[int]:
        """Positions of the problems of a generation batch, by the sampler.

        Raises:
            RlhfsimError: it failed, or gave another number of them, or one beyond the data.
        """
        found = self.call("sampler", max(batch, 0), batch, count, size)
        with named("sampler", self.custom.sampler):  # type: ignore[arg-type]
            chosen = list(map(int, found))
        if len(chosen) != count or any(at < 0 or (size is not None and at >= size) for at in chosen):
            text = f"custom.sampler gave {len(chosen)} positions of {count} wanted, below {size or 'any'}"
            raise RlhfsimError("custom-sampler", text, help=_HELP)
        return chosen

    def save(self, folder: Path) -> None:
        """What the parts remember, into a checkpoint."""
        for name, part in self.made.items():
            if hasattr(part, "save"):
                place = folder / FOLDER / name
                place.mkdir(parents=True)
                part.save(place)

    def load(self, folder: Path) -> None:
        """Undo `save`; a checkpoint of before the part leaves it as it was made."""
        for name, part in self.made.items():
            if hasattr(part, "load") and (place := folder / FOLDER / name).is_dir():
                part.load(place)


def for_workers(part: CustomPart) -> dict[str, Any]:
    """A loss as its workers get it: they may have another working directory."""
    return asdict(part) | {"folder": os.getcwd()}


def with_declared(workload: Workload, settings: Settings) -> Workload:
    """The workload with the seconds that parts and reward functions declare; what declares none stays.

    Raises:
        RlhfsimError: a part that cannot be made, or declares no seconds.
    """
    own = {name: seconds for name, seconds in asdict(declared(settings.custom)).items() if seconds}
    workload = replace(workload, custom=replace(workload.custom, **own))
    rules, rewards = workload.reward.rules, settings.rewards or ()
    each = [_seconds(CustomPart(target=rule.target)) if rule.target else 0.0 for rule in rewards]
    if rules is None or not any(each):
        return workload
    others = 0.0 if all(each) else rules.seconds_per_sample
    rules = replace(rules, seconds_per_sample=sum(each) + others)
    return replace(workload, reward=replace(workload.reward, rules=rules))


def declared(custom: Custom) -> OwnParts:
    """What the parts say they take (`seconds_per_sample`).

    Raises:
        RlhfsimError: a part that cannot be made, or declares no seconds.
    """
    given = {name: getattr(custom, name) for name in asdict(OwnParts())}
    return OwnParts(**{name: _seconds(part) for name, part in given.items() if part is not None})


def _seconds(part: CustomPart) -> float:
    """What it declares; 0: nothing."""
    _see_folder("")
    with named("", part):
        said = getattr(resolve(part.target), "seconds_per_sample", 0.0)
    try:
        seconds = parse(said, "s")
    except RlhfsimError as error:
        text = f"{part.target} declares seconds_per_sample: {error.message}"
        raise RlhfsimError("custom-seconds", text, help=error.help) from error
    if seconds < 0:
        text = f"{part.target} declares seconds_per_sample: {seconds:g} is negative"
        raise RlhfsimError("custom-seconds", text, help="declare what one sample takes, or nothing")
    return seconds


def priced(plan: Plan, custom: Custom) -> Plan:
    """The plan with what the parts declare and its workload does not hold in its prediction; once.

    They work between scoring and training, one sample after the other, on the driver; the loss on every rank
    of the actor.
    """
    before, work = plan.prediction, plan.workload
    ranks = {"loss": work.epochs / plan.placement.actor.layout.dp}
    costs = {
        f"{FOLDER}.{name}": each * work.num_sequences * ranks.get(name, 1.0)
        for name, each in asdict(declared(custom)).items()
        if each and not getattr(work.custom, name)
    }
    phases = [
        PredictedPhase(
            name=name,
            pool=CPU_POOL,
            start_s=before.step_s,
            seconds=seconds,
            low_s=seconds,
            high_s=seconds,
            bound_by=FOLDER,
            by_resource_s={FOLDER: seconds},
            rests_on=(),
            critical=True,
        )
        for name, seconds in costs.items()
        if name not in {phase.name for phase in before.phases}
    ]
    more = sum(phase.seconds for phase in phases)
    if not more:
        return plan
    ratio = (before.step_s + more) / before.step_s
    after = replace(
        before,
        step_s=before.step_s + more,
        low_s=before.low_s + more,
        high_s=before.high_s + more,
        tokens_per_s_per_gpu=before.tokens_per_s_per_gpu / ratio,
        usd_per_step=None if before.usd_per_step is None else before.usd_per_step * ratio,
        kwh_per_step=before.kwh_per_step * ratio,
        kg_co2e_per_step=before.kg_co2e_per_step * ratio,
        phases=(*before.phases, *phases),
    )
    return replace(plan, prediction=after)
