"""A configuration as the doctor is given it, a plan of what it says under any change of its keys, and what
is notable in it: rules of its framework, and what its ledger is full of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.finding import Finding
from rlhfsim.frozen import frozen
from rlhfsim.interchange.carried import NODE_GPUS, OVERSUBSCRIPTION, UNSAID, planned_fields, planned_workload
from rlhfsim.interchange.configuration.configuration import Configuration
from rlhfsim.interchange.configuration.described import Lengths, RunDescription, RunSpecs, setup
from rlhfsim.interchange.configuration.keys import key_table
from rlhfsim.interchange.configuration.served_reward import SERVED_REWARD
from rlhfsim.interchange.configuration.settings import NAMED_MODEL, PLANNED_MODEL, FrameworkSettings
from rlhfsim.interchange.export import exporter
from rlhfsim.interchange.table import bare
from rlhfsim.memory.findings import host_findings, logits_findings, sleep_findings
from rlhfsim.memory.ledger import Ledger
from rlhfsim.plan import Plan
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.what_if.doctor import certainty
from rlhfsim.what_if.estimate import planned, priced_placement, step_of

ROOM, TOO_MUCH = 0.9, 2.0
"""Share of a GPU that is filled without risk, and the value for an engine without any KV cache."""
RESPONSE_SHARE, PROMPT_SHARE = 0.4, 0.15
"""Mean tokens over the limit, where nobody says them: of responses 0.37 (0.13 to 0.74) over 21 published logs
of verl and RLinf, of prompts 0.14 (0.08 to 0.2) over 17 of verl (lab/scoreboard/data/rlhf*.csv). None of the
scored cases of memory is among them, but verl's scripts among these have such prompts too."""
UNLIMITED = 1024.0
"""Mean tokens where there is no limit either."""


def check_model(settings: FrameworkSettings, name: str) -> None:
    """Refuse a policy whose shape is not known, by the key that names it.

    Raises:
        RlhfsimError: it is neither a known model nor a folder with its config.json.
    """
    try:
        resolve_model(name)
    except RlhfsimError as error:
        if error.code not in ("unknown-model", "unreadable-file"):
            raise
        key = next((key for key in settings.values if settings.find(key) == name), "the model")
        key = {NAMED_MODEL: "--model", PLANNED_MODEL: "the model of the exported plan"}.get(key, key)
        raise RlhfsimError(
            error.code,
            f"{key} is {name!r}, whose shape is not known",
            place=Place(file=settings.name),
            help="name the model that it was made from: --model Qwen/Qwen2.5-7B, or give the folder of its "
            "config.json",
        ) from error


@frozen
class Case:
    """One configuration and what is said in addition to it."""

    configuration: Configuration
    settings: FrameworkSettings
    gpu: str
    rollout_gpu: str | None = None
    prompt_tokens: float | None = None
    """Mean of a prompt; None: not said."""
    response_tokens: float | None = None
    """Mean of a response; None: not said."""
    measured: Lengths | None = None
    """Lengths of a log, with how responses spread; None: what is said above."""
    price: float | None = None
    """USD per GPU-hour."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the configuration rests on and the user's shell sets."""
    stopped_by: frozenset[str] = frozenset()
    """What the framework stops at as it is, in the words of its findings."""

    @property
    def version(self) -> str | None:
        """Release that reads the configuration; None: nobody says, so the latest."""
        version = self.settings.find(self.configuration.version_key)
        return None if version is None else str(version)

    @property
    def recorded(self) -> str:
        """The nearest release whose keys are recorded."""
        table = key_table(self.configuration.name)
        return table.releases[table.place(self.version)]

    def under(self, keys: Mapping[str, Any]) -> Described:
        """What it says with these keys changed.

        Raises:
            RlhfsimError: keys are missing, or what they say cannot exist.
        """
        settings = self.settings.with_values({bare(key): value for key, value in keys.items()})
        run = self.configuration.run(settings)
        check_model(settings, run.model)
        lengths = self._lengths(run)
        specs = setup(run, lengths, self.gpu, self.rollout_gpu, settings.count(NODE_GPUS))
        cluster = replace(
            specs.cluster,
            framework=self.configuration.name,
            oversubscription=settings.find(OVERSUBSCRIPTION) or 1.0,
        )
        work = planned_workload(settings, specs.workload, self._limits(run))
        specs = replace(specs, cluster=cluster, workload=work)
        return Described(settings=settings, run=run, lengths=lengths, specs=specs)

    def _limits(self, run: RunDescription) -> dict[str, int | None]:
        """Lengths that nobody gave with the doctor, and where the configuration cuts them."""
        limits = {"prompt_len": run.max_prompt, "response_len": run.max_response}
        given = {"prompt_len": self.prompt_tokens, "response_len": self.response_tokens}
        return {field: limit for field, limit in limits.items() if given[field] is None}

    def _lengths(self, run: RunDescription) -> Lengths:
        if self.measured is not None:
            return replace(self.measured, longest_prompt=run.max_prompt)
        if run.full and run.max_tokens:
            return Lengths(prompt=1.0, response=run.max_tokens - 1.0, longest=None)
        prompt = self.prompt_tokens or PROMPT_SHARE * (run.max_prompt or UNLIMITED)
        response = self.response_tokens or RESPONSE_SHARE * (run.max_response or UNLIMITED)
        return Lengths(prompt=prompt, response=response, longest=None, longest_prompt=run.max_prompt)

    def assumed(self, described: Described) -> Iterator[str]:
        """What nobody said, in words: release and lengths; defaults are in the settings."""
        if self.version is None:
            latest = exporter(self.configuration.name).version
            yield f"{self.configuration.title} {latest}, the latest known here"
        elif not self.recorded.startswith(self.version.removeprefix("v")):
            name = f"{self.configuration.title} {self.recorded}"
            yield f"keys as in {name}: those of {self.version} are not recorded"
        unknown = tuple(described.settings.unknown())
        if unknown:
            yield f"not known: {'; '.join(unknown)}; the defaults stand in for them"
        for name, value in self.environment.items():
            yield f"{name}={value}, as this shell has it"
        planned = [
            *(["model"] if self.settings.find(PLANNED_MODEL) else []),
            *dict(planned_fields(self.settings)),
            *(["the reward model's GPUs"] if self.settings.find(SERVED_REWARD) else []),
        ]
        if planned:
            yield f"{', '.join(planned)} as in the plan that was exported"
        for unsaid in self.settings.find(UNSAID) or ():
            yield f"of the exported plan no key says {unsaid}"
        lengths, run = described.lengths, described.run
        if run.full and run.max_tokens:
            yield f"samples are packed into full rows of {run.max_tokens:,} tokens, each a prompt here"
            return
        for name, field_, said, mean, limit in (
            ("prompts", "prompt_len", self.prompt_tokens, lengths.prompt, run.max_prompt),
            ("responses", "response_len", self.response_tokens, lengths.response, run.max_response),
        ):
            if said is None and field_ not in planned:
                share = f"{mean / limit:.0%} of the limit of {limit:,}" if limit else "no limit is known"
                yield f"{name} of {mean:,.0f} tokens on average ({share})"


@frozen
class Described:
    """What a configuration says."""

    settings: FrameworkSettings
    run: RunDescription
    lengths: Lengths
    specs: RunSpecs


@frozen
class Judged:
    """What a configuration says, priced."""

    described: Described
    plan: Plan
    memory: Ledger

    @property
    def fits(self) -> bool:
        """Whether GPU, engine and host hold it, more likely than not."""
        return self.memory.fits

    @property
    def risk(self) -> float:
        """Risk of running out of memory as it is said; the search for changes compares the computed one."""
        return self.plan.prediction.probability_out_of_memory

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.plan.prediction.step_s

    @property
    def excess(self) -> float:
        """How much does not fit, in GPUs and nodes, added up over the step: `ROOM` of each is used freely."""
        memory = self.memory
        held = [phase.bytes / phase.capacity for phase in memory.phases]
        held += [memory.host_bytes[pool] / memory.host_capacity[pool] for pool in memory.host_bytes]
        if engine := memory.engine:
            held.append(engine.needed_tokens / engine.kv_tokens if engine.kv_tokens > 0 else TOO_MUCH)
        return math.fsum(max(0.0, share - ROOM) for share in held)


def judged(described: Described, price: float | None) -> Judged:
    """The plan of what a configuration says, whether it fits or not.

    Raises:
        RlhfsimError: it cannot exist.
    """
    specs = described.specs
    priced = priced_placement(specs.placement, specs.workload, specs.cluster)
    plan = planned(priced, step_of(priced), price)
    risk = certainty.said(certainty.computed(priced.memory), specs.cluster.framework or certainty.OTHERS)
    plan = replace(plan, prediction=replace(plan.prediction, probability_out_of_memory=risk))
    return Judged(described=described, plan=plan, memory=priced.memory)


def findings(case: Case, base: Judged) -> Iterator[Finding]:
    """Those that end the run first."""
    described = base.described
    own = list(case.configuration.findings(described.settings, described.run))
    yield from (f for f in own if f.stops)
    yield from logits_findings(base.memory, described.specs.placement, described.specs.workload)
    yield from sleep_findings(base.memory, described.specs.placement)
    yield from host_findings(base.memory, described.specs.placement)
    yield from (f for f in own if not f.stops)
