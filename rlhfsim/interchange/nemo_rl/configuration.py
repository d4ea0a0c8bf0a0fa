"""NeMo-RL: what marks its configuration, its own examples, and what it refuses at start, or ignores.

nemo_rl/algorithms/grpo.py, nemo_rl/data/packing/algorithms.py and nemo_rl/models/policy (7ea279abf).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import Configuration
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import (
    group_of_one,
    refused,
    short_budget,
    uneven_batch,
    uneven_updates,
)
from rlhfsim.interchange.configuration.forms import Said
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.nemo_rl.engines import BUDGETS
from rlhfsim.interchange.nemo_rl.keys import ASYNC_ENGINE, CORRECTION, GIVEN, MARKS, STARTED, TABLE
from rlhfsim.specs.frameworks.files import read_shipped


@cache
def _examples() -> Mapping[str, Mapping[str, Any]]:
    """Name of one of NeMo-RL's example configurations -> what it sets over the one that it builds on."""
    return read_shipped(resources.files("rlhfsim.interchange") / "nemo_rl" / "examples.yaml")


def based_on(said: Said) -> Mapping[str, Any]:
    """Values of the example configurations that `--config` or `defaults` names; none for another `--config`.

    Raises:
        RlhfsimError: it rests on a file that is neither there nor one of the examples.
    """
    named = said.values.get("config")
    started = STARTED.search(said.text)
    if named is None and started and started[1] in GIVEN:
        named = started[1]  # the default of its script
    values = _whole(PurePosixPath(str(named or "")).stem)
    for base in said.lacking:
        if (name := PurePosixPath(base).stem) not in _examples():
            raise RlhfsimError(
                "missing-base",
                f"defaults names {base}, which is not there and no example of NeMo-RL",
                place=Place(file=said.name),
                help=f"give it too, before what lies over it: rlhfsim doctor {PurePosixPath(base).name} FILE",
            )
        values = {**_whole(name), **values}
    return values


def _whole(name: str) -> dict[str, Any]:
    own = dict(_examples().get(name, {}))
    parent = own.pop("defaults", None)
    return {**_whole(parent), **own} if parent else own


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What is noteworthy in the configuration; trainers of given data have nothing known."""
    if run.algorithm in GIVEN.values():
        return
    batch, size = TABLE.batch.values(), TABLE.key("update")
    yield from group_of_one(s, run, TABLE.key("workload.samples"))
    yield from short_budget(s, run, *BUDGETS, then="no pack has room for it", stops=True)
    yield from uneven_batch(run, *batch, then="NeMo-RL refuses it")
    update = s.find(size)
    if isinstance(update, int):
        yield from uneven_updates(
            run.prompts * run.samples, update, size, then="the batch is no whole number of them"
        )
    if run.algorithm == "distillation":
        yield from _split_packs(s)
    if s.flag(TABLE.key("schedule.asynchronous")):
        yield from _asynchronous(s)


def _split_packs(s: FrameworkSettings) -> Iterator[Finding]:
    """What distillation asserts of its two models (algorithms/distillation.py, line 270)."""
    for model in ("policy", "teacher"):
        keys = (f"{model}.dtensor_cfg.sequence_parallel", f"{model}.sequence_packing.enabled")
        if s.flag(f"{model}.dtensor_cfg.enabled") and all(s.flag(key) for key in keys):
            yield refused(
                f"distillation with {keys[0]}=true and packed samples: NeMo-RL refuses it",
                *keys,
                remedy=f"{keys[0]}=false",
            )


def _asynchronous(s: FrameworkSettings) -> Iterator[Finding]:
    """What asynchronous GRPO asserts."""
    wanted = ((ASYNC_ENGINE, True), (CORRECTION, True), (TABLE.key("shared"), False))
    for key, value in wanted:
        said = s.find(key)
        if isinstance(said, bool) and said is not value:
            yield refused(
                f"asynchronous GRPO with {key}={str(said).lower()}: NeMo-RL refuses it",
                TABLE.key("schedule.asynchronous"),
                key,
                remedy=f"{key}={str(value).lower()}",
            )


CONFIGURATION = Configuration(
    name="nemo-rl",
    title="NeMo-RL",
    describe=TABLE.describe,
    findings=findings,
    entries=(r"\brun_(?:vlm_)?(grpo|ppo|dpo|distillation|sft|rm)\w*\.py",),
    shown=("examples/run_grpo.py",),
    keys=MARKS,
    below=based_on,
)
