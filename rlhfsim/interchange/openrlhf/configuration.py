"""OpenRLHF: what marks its arguments, and what it refuses at start, or does otherwise than they suggest.

openrlhf/cli/train_ppo_ray.py and openrlhf/utils/deepspeed/deepspeed.py (0.11.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import Configuration
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import (
    group_of_one,
    reduced_in_turn,
    refused,
    said_as,
    short_budget,
    uneven_updates,
    without_engine,
)
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.openrlhf import given_keys
from rlhfsim.interchange.openrlhf.keys import (
    HOSTED,
    LIMITS,
    MARKS,
    OLD,
    OVERLAPS,
    REFERENCE_AWAY,
    REWARD_AWAY,
    RUNS,
    TABLE,
)
from rlhfsim.interchange.table import Table, bare
from rlhfsim.specs.workload.workload import sequences_of


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What is noteworthy in the arguments."""
    software = run.software or RUNS.software.get(run.backend)
    yield from reduced_in_turn(run, software, bare(OVERLAPS), remedy=OVERLAPS)
    yield from _stays(s, run)
    if given_keys.trainer_of(s):
        update, table = run.prompts, given_keys.TABLE
        yield from _accumulation(s, run, update, table)
        return
    yield from group_of_one(s, run, *TABLE.names("workload.samples"), stops=True)
    yield from short_budget(
        s,
        run,
        *TABLE.names("actor.pack_tokens"),
        then="it becomes a micro-batch of its own, as large as it is",
    )
    batch = TABLE.names("samples_of_update")
    update = s.find(*batch)
    if isinstance(update, int):
        then = "the rest of the batch is not an update of its own"
        yield from uneven_updates(
            run.prompts * run.samples, update, said_as(s, TABLE.names("samples_of_update")), then=then
        )
        yield from _accumulation(s, run, update, TABLE)
    yield from _placement(s, run)


def _accumulation(s: FrameworkSettings, run: RunDescription, update: int, table: Table) -> Iterator[Finding]:
    """DeepSpeed wants micro-batch x accumulation x data-parallel ranks to be the batch."""
    micro, ranks = run.layout.micro_batch // sequences_of(run.algorithm), run.layout.dp
    if run.layout.pack_tokens is None and update % (micro * ranks):
        key = said_as(s, table.names("samples_of_update"))
        yield refused(
            f"a batch of {update:,} is no multiple of micro-batches of {micro} on {ranks} data-parallel "
            "ranks: DeepSpeed refuses it",
            key,
            said_as(s, table.names("actor.micro_batch")),
            remedy=f"{key}={-(-update // (micro * ranks)) * micro * ranks}",
        )


def _stays(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Models that only score, and that no key takes off the GPUs below ZeRO-3."""
    asked = [key for key in (REFERENCE_AWAY, REWARD_AWAY) if s.flag(*TABLE.named(key))]
    if asked and run.layout.zero not in HOSTED:
        yield Finding(
            what=f"ZeRO-{run.layout.zero} leaves models that only score on the GPUs: {' and '.join(asked)} "
            "does nothing",
            keys=tuple(said_as(s, TABLE.named(key)) for key in asked),
            remedy="--ds.zero_stage 3",
        )


def _placement(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Engines on shared GPUs, and sleep where nothing is shared."""
    shared, engine = run.rollout_gpus is None, run.rollout
    engines, sleep = (said_as(s, TABLE.names(f"rollout.{name}")) for name in ("dp", "sleep"))
    asleep = s.flag(*TABLE.names("rollout.sleep"))
    if not s.count(*TABLE.names("rollout.dp")):
        yield without_engine((engines,), f"--{engines} {run.gpus // 2 or 1}")
        return
    if shared and engine.tp * engine.dp != run.gpus:
        yield refused(
            f"{engine.dp} engines of {engine.tp} GPUs on {run.gpus} shared GPUs: OpenRLHF refuses it",
            engines,
            remedy=f"{engines}={run.gpus // engine.tp}",
        )
    if not shared and asleep:
        yield Finding(what="the engines have GPUs of their own, so that they never sleep", keys=(sleep,))
    if shared and not asleep and (engine.memory_utilization or 0) > 0.5:
        yield Finding(
            what=f"engines that share their GPUs and never sleep hold {engine.memory_utilization:.0%} of "
            "each while the models train",
            keys=(sleep,),
            remedy=f"--{sleep}",
        )


def _version(values: Mapping[str, Any]) -> str | None:
    """The last version with the names that are used: dots came with 0.10, `max_len` with 0.9."""
    if not any(key in values for key in OLD):
        return None
    return "0.8.11" if {*LIMITS} & values.keys() else "0.9.10"


CONFIGURATION = Configuration(
    name="openrlhf",
    title="OpenRLHF",
    describe=lambda s: (given_keys.TABLE if given_keys.trainer_of(s) else TABLE).describe(s),
    findings=findings,
    entries=(r"\bopenrlhf\.cli\.\w+",),
    unread={r"\bopenrlhf\.cli\.train_kto\b": "kto"},
    shown=("openrlhf.cli.train_ppo_ray",),
    keys=MARKS,
    version_of=_version,
)
