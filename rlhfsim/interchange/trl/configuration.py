"""TRL: what marks its arguments, what launchers add, and what it refuses at start or does otherwise.

trl/trainer/grpo_config.py and trl/generation/vllm_generation.py (1.16.0).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import Configuration
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import (
    reduced_in_turn,
    refused,
    whole_gradients,
    without_engine,
)
from rlhfsim.interchange.configuration.forms import Said
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.trl.accelerate import LAUNCHED, NAMED_FILE, OVERLAPS, PROCESSES, STAGE, STAGE_NAMED
from rlhfsim.interchange.trl.keys import ADAPTERS, EACH_BATCH, GIVEN, MARKS, RANK, RUNS, TABLE, TRAINER

MODES = ("colocate", "server")
_TRAINERS = "grpo|rloo|ppo|sft|dpo|kto|reward"
STARTED = re.compile(
    rf"\btrl ({_TRAINERS})\b|\bscripts/(?:\w+/)?({_TRAINERS})\w*\.py\b"
    rf"|\b((?i:{_TRAINERS}))(?:Config|Trainer)\b"
)
"""What starts a trainer: a command, a script of TRL's or its examples, the class in a script of the user."""


def launched_by(said: Said) -> Mapping[str, Any]:
    """Values of the shipped configuration of accelerate that a command names, and the trainer it starts."""
    named = PurePosixPath(str(said.values.get("accelerate_config") or said.values.get("config_file"))).stem
    started = STARTED.search(said.text)
    trainer: dict[str, Any] = {}
    if started:
        name = next(found for found in started.groups() if found).lower()
        trainer[TRAINER] = f"{'Reward' if name == 'reward' else name.upper()}Trainer"
    rank = said.values.get("LoraConfig.r", 8 if "LoraConfig(" in said.text else None)
    if rank and said.values.get("peft_config"):
        trainer |= {ADAPTERS: True, RANK: rank}
    if named in LAUNCHED:
        return {**trainer, PROCESSES: 8, **LAUNCHED[named]}
    stages = {*TABLE.names("actor.zero")}
    stage = STAGE_NAMED.search(named.lower()) if not stages & said.values.keys() else None
    return {**trainer, **({STAGE: int(stage[1])} if stage else {})}


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What is noteworthy in the arguments."""
    software = run.software or RUNS.software.get(run.backend)
    remedy = f"overlap_comm: true in {NAMED_FILE}'s own file, or more samples a micro-batch"
    yield from reduced_in_turn(run, software, OVERLAPS[0], remedy=remedy)
    if s.whole(TABLE.key("accumulation"), default=1) > 1:
        yield from whole_gradients(
            run,
            software,
            TABLE.key("accumulation"),
            who="transformers' Trainer reduces them once",
            remedy=f"{EACH_BATCH[0]}=True, or {TABLE.key('accumulation')}=1",
        )
    if run.algorithm in ("ppo", *GIVEN.values()):
        return
    yield from _groups(s, run)
    engine, mode = TABLE.key("vllm"), TABLE.key("shared")
    said = s.find(mode)
    if said is not None and said not in MODES:
        yield refused(
            f"{mode} {said!r} passes the parser and is refused at start", mode, remedy=f"{mode}=colocate"
        )
    if not s.flag(engine):
        yield without_engine((engine,), f"{engine}=True")
    named = s.find(NAMED_FILE)
    if isinstance(named, str) and s.find(*TABLE.names("actor.zero")) is None:
        yield Finding(
            what=f"ZeRO stage {run.layout.zero} is taken from the name {named}, which is not among the files",
            keys=(NAMED_FILE,),
        )


def _groups(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Groups of one response, and generations that are no whole groups."""
    samples, accumulation = TABLE.key("workload.samples"), TABLE.key("accumulation")
    if run.samples < 2:
        yield refused("a group needs two responses at least: TRL refuses one", samples, remedy=f"{samples}=8")
    given = s.find(TABLE.key("per_generation")) or s.find(accumulation)
    steps = int(given) if isinstance(given, int) else 1
    whole = run.gpus * run.layout.micro_batch * max(1, steps)
    if whole % max(1, run.samples):
        yield refused(
            f"a generation of {whole:,} samples ({run.gpus} processes x {run.layout.micro_batch} x "
            f"{steps} micro-batches) holds no whole groups of {run.samples}: TRL refuses it",
            samples,
            TABLE.key("actor.micro_batch"),
            accumulation,
            remedy=f"a multiple of {samples}",
        )


CONFIGURATION = Configuration(
    name="trl",
    title="TRL",
    describe=TABLE.describe,
    findings=findings,
    entries=(
        rf"\btrl ({_TRAINERS})\b",
        rf"\btrl/scripts/({_TRAINERS})\w*\.py\b",
        r"\b(GRPO|RLOO|PPO|SFT|DPO|KTO|Reward)(Config|Trainer)\b",
    ),
    shown=("trl grpo",),
    keys=MARKS,
    below=launched_by,
)
