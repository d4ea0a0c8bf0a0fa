"""A plan as the launch of another framework: its settings with reasons, and what it cannot be told.

A framework that can be written for has a module `export` in its folder with an `EXPORT`; nothing lists them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from rlhfsim import resources
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.interchange.carried import with_carried
from rlhfsim.interchange.cluster_jobs import FILES, MASTER, job
from rlhfsim.interchange.launch_script import TORCHRUN, bash, read_by
from rlhfsim.interchange.nearest import cost, with_placement, with_rollout, with_schedule
from rlhfsim.interchange.predictions import headline, memory, predicted
from rlhfsim.interchange.read_back import PLACED, Differences, differences, paths
from rlhfsim.interchange.refusal import check_runs
from rlhfsim.interchange.releases import Missing, Release, check_version, nearest_release, refusal
from rlhfsim.outputs import comment, markdown_text
from rlhfsim.plan import Plan, Prediction
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.frameworks.says import Aspect, value_of
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.verdict import verdict

AS_READ = "as its keys are read"
"""Ends what is written in place of a field that no row names, and that reads back otherwise."""
Value = bool | int | float | str | None
Price = Callable[[Plan], Prediction]
"""What a plan's placement and workload are predicted to take."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a framework."""

    key: str
    value: Value
    why: str = ""
    """The choice or the prediction behind it; empty where the question itself says so."""


@frozen
class Section:
    """Settings that belong together."""

    title: str
    settings: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class Unsaid:
    """Something in a plan that a framework has no key for."""

    what: str
    instead: str
    """What is written in its place, or what the framework does by itself."""
    nearest: Plan | None = None
    """The plan with that in place, its prediction still the plan's; None: the planner cannot price it."""
    cost: str = ""
    """What that is predicted to cost; empty where it is not priced."""

    of: tuple[str, ...] = ()
    """Fields of the plan that read back differently: `workload.*`, `schedule`, `actor.layout.*`."""

    @property
    def sentence(self) -> str:
        """What, what instead, at which cost."""
        return f"{self.what}: {self.instead}" + (f" ({self.cost})" if self.cost else "")


@frozen
class Written:
    """A plan in the keys of a framework."""

    sections: tuple[Section, ...]
    unsaid: tuple[Unsaid, ...] = ()

    @property
    def values(self) -> Mapping[str, Value]:
        """Key -> value."""
        return {s.key: s.value for section in self.sections for s in section.settings}


@frozen
class Exporter:
    """How plans are written for one framework."""

    version: str
    """Release whose keys are written."""
    write: Callable[[Plan], Written]
    files: Callable[[Plan, Written], Mapping[str, str]]
    """File name -> content; a name that ends in `.sh` can be run."""
    start: str
    """The one command, run in the folder of the files."""
    needs: Mapping[str, str]
    """Variables that scripts may read -> what they hold."""
    install: str
    """Command that puts the release on a node."""
    timed: Callable[[Plan], bool] = lambda plan: True
    """Whether the log of such a run prints the time of its steps, for `import-run`."""
    releases: Mapping[str, Release] = field(default_factory=dict)
    """Older releases that are written as well."""
    left_open: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Field of a plan that a question may leave open -> its keys, whose defaults then hold; where those do
    not fit, the first fields are chosen first."""
    usual: Callable[[Plan], Mapping[str, Value]] = lambda plan: {}
    """What its own examples of such a plan set over the defaults of those keys, and what its script passes
    that is no key of `write`."""
    ray: str = "ray"
    """Command of the Ray that it runs on; empty: its script starts on every node that trains."""


@frozen
class Exported:
    """What `rlhfsim export` writes."""

    framework: str
    version: str
    written: Written
    files: Mapping[str, str]
    start: str
    warning: str | None = None
    """Where the release that was asked for is not recorded."""


def exporters() -> tuple[str, ...]:
    """Frameworks that plans can be written for, by name."""
    return resources.frameworks_with("export")


@cache
def exporter(name: str) -> Exporter:
    """How plans are written for one of `exporters`."""
    found: Exporter = resources.of_framework(name, "export").EXPORT
    return found


def export(
    plan: Plan,
    name: str,
    vendors: frozenset[str],
    price: Price | None = None,
    *,
    manager: str | None = None,
    version: str | None = None,
) -> Exported:
    """A plan as the files of a framework, with the job of a cluster's manager where one is named.

    `price` predicts what is written where something cannot be said; `version`: None for the newest.

    Raises:
        RlhfsimError: the framework does not run the plan.
    """
    check_runs(plan, framework(name), vendors)
    way = of_version(exporter(name), name, version)
    written = as_release(plan, way.write(plan), name, way)
    written = _with_the_rest(plan, written, name, way)
    if price is not None:
        written = _priced(plan, written, price)
    files = with_carried(way.files(plan, written), plan, [unsaid.sentence for unsaid in written.unsaid])
    needs = read_by(files["launch.sh"], way.needs)
    start = way.start
    if manager is not None:
        title = f"{headline(plan)}, {framework(name).title} {way.version}"
        ray = "" if TORCHRUN in files["launch.sh"] else way.ray
        content, start = job(manager, plan, title, needs, way.install, ray=ray)
        files[FILES[manager]] = content
        needs = {name: what for name, what in needs.items() if name != MASTER}
    files["README.md"] = readme(plan, name, replace(way, start=start), written, needs)
    title = framework(name).title
    other = version is not None and version != way.version
    warning = f"the keys of {title} {version} are not recorded: written for {way.version}" if other else None
    return Exported(
        framework=name, version=way.version, written=written, files=files, start=start, warning=warning
    )


def in_keys(plan: Plan, name: str) -> Written:
    """A plan in the keys of the newest release of a framework, with all that these cannot say.

    Raises:
        RlhfsimError: the plan is not written for it.
    """
    way = exporter(name)
    return _with_the_rest(plan, way.write(plan), name, way)


def _with_the_rest(plan: Plan, written: Written, name: str, way: Exporter) -> Written:
    """With what no framework's own rows name."""
    named = {field for unsaid in written.unsaid for field in unsaid.of}
    sleep = () if "rollout.sleep" in named else _of_sleep(plan, name)
    unsaid = (*written.unsaid, *_of_exchange(plan, written), *sleep)
    named = {field for each in unsaid for field in each.of}
    launch = way.files(plan, written)["launch.sh"]
    found = differences(plan, name, written.values, way.version, launch)
    rest = (_read_otherwise(plan, role, fields, named) for role, fields in found.items() if role not in named)
    return replace(written, unsaid=(*unsaid, *(each for each in rest if each is not None)))


def _read_otherwise(plan: Plan, owner: str, found: Differences, named: Collection[str]) -> Unsaid | None:
    """Fields of a role, or of the schedule, that the keys read back otherwise and nothing has named."""
    left = {field: pair for field, pair in found.items() if paths(owner, field)[0] not in named}
    if not left:
        return None
    ours, theirs = (", ".join(f"{field} {pair[side]}" for field, pair in left.items()) for side in (0, 1))
    return Unsaid(
        f"{ours} of the {owner}",
        f"{theirs}, {AS_READ}",
        nearest=_as_read(plan, owner, left),
        of=tuple(path for field in left for path in paths(owner, field)),
    )


def _as_read(plan: Plan, owner: str, left: Differences) -> Plan | None:
    """The plan with these fields as they are read; None where no such plan can be."""
    changes = {field: theirs for field, (_, theirs) in left.items()}
    with suppress(RlhfsimError):
        if owner == "schedule":
            return with_schedule(plan, **changes)
        role: Any = plan.placement.roles[owner]
        placed = {field: changes.pop(field) for field in PLACED if field in changes}
        if isinstance(changes.get("zero"), bool):  # of a role that only scores: sharded or not
            changes["zero"] = 3 if changes["zero"] else 2
        return with_placement(
            plan, **{owner: replace(role, layout=replace(role.layout, **changes), **placed)}
        )
    return None


def _of_sleep(plan: Plan, name: str) -> Iterator[Unsaid]:
    """A rollout that sleeps otherwise than the framework's does (`says`)."""
    rollout, placement = plan.placement.rollout, plan.placement
    if rollout is None:
        return
    shared = rollout.pool == placement.actor.pool
    levels = framework(name).of(plan.workload).says.places(shares=shared).sleep
    if placement.weight_path == "lora":  # the base weights under the adapters stay
        levels = tuple(min(level, 1) for level in levels)
    level = rollout.sleep_level
    if level in levels and rollout.residency != "offloaded":
        return
    runs = level if level in levels else max(levels)
    yield Unsaid(
        f"a rollout that is {rollout.residency} and sleeps at level {level}",
        f"it sleeps at level {runs}" if runs else "it stays awake: the GPUs are its own",
        nearest=with_rollout(plan, rollout, sleep=runs, residency="resident"),
        of=("rollout.sleep", "rollout.residency"),
    )


def _of_exchange(plan: Plan, written: Written) -> Iterator[Unsaid]:
    """How tokens reach experts, where the plan says it and no key does."""
    keys, rollout = [_bare(key) for key in written.values], plan.placement.rollout
    sent = rollout.layout.dispatcher if rollout else None
    if sent and not any("a2a_backend" in key or "all2all_backend" in key for key in keys):
        yield Unsaid(
            f"dispatcher {sent} of the rollout",
            "the engine's option by hand (all2all_backend of vLLM, moe-a2a-backend of SGLang)",
            of=("rollout.layout.dispatcher",),
        )
    trained = [role.layout for name, role in plan.placement.trainers.items() if name in TRAINED]
    sends = plan.placement.actor.layout.dispatcher
    said = {"dispatcher": f"dispatcher {sends}" if sends else ""}
    said |= {"overlap_moe": "overlap" if any(layout.ep_overlap for layout in trained) else ""}
    lacking = [what for name, what in said.items() if what and not any(name in key for key in keys)]
    if lacking:
        yield Unsaid(
            f"{' and '.join(lacking)} of the experts' exchange",
            "Megatron-Core's moe_token_dispatcher_type and overlap_moe_expert_parallel_comm by hand",
            of=tuple(f"{role}.layout.{x}" for role in trained for x in ("dispatcher", "ep_overlap")),
        )


def _bare(key: str) -> str:
    return key.replace("-", "_")


def unsaid_of(plan: Plan, name: str) -> tuple[str, ...]:
    """What of a plan the newest release of a framework has no key for; the reason where it is not written."""
    try:
        return tuple(unsaid.what for unsaid in in_keys(plan, name).unsaid)
    except RlhfsimError as error:
        return (error.message,)


def is_written(plan: Plan, name: str) -> bool:
    """Whether `rlhfsim export` writes a plan for a framework, whatever its keys cannot say."""
    try:
        exporter(name).write(plan)
    except RlhfsimError:
        return False
    return True


def of_version(way: Exporter, name: str, version: str | None) -> Exporter:
    """The exporter of a release.

    Raises:
        RlhfsimError: the release is not known.
    """
    known = (way.version, *way.releases)
    version = version if version in known else nearest_release(version or "", known) or version
    if version is None or version == way.version:
        return way
    check_version(name, version, known)

    def files(plan: Plan, written: Written) -> Mapping[str, str]:
        named, title = way.files(plan, written), framework(name).title
        return {f: text.replace(f"{title} {way.version}", f"{title} {version}") for f, text in named.items()}

    install = way.install.replace(way.version, version)
    return replace(way, version=version, files=files, install=install)


def as_release(plan: Plan, written: Written, name: str, way: Exporter) -> Written:
    """What is written in the keys of the release.

    Raises:
        RlhfsimError: the plan needs what the release does not have.
    """
    release = way.releases.get(way.version)
    if release is None:
        return written
    title, lacking, known = framework(name).title, dict[str, Missing](), set[str]()
    sections = []
    for section in written.sections:
        kept = []
        for setting in section.settings:
            missing, key = release.lacks(setting.key), release.key(setting.key)
            if missing is not None and missing.refused:
                raise refusal(title, way.version, missing)
            if missing is not None:
                lacking[missing.what] = missing
            elif key not in known:
                kept.append(replace(setting, key=key))
            known.add(key)
        sections.append(replace(section, settings=tuple(kept)))
    said = tuple(
        Unsaid(what, m.instead, nearest=m.nearest(plan) if m.nearest else None)
        for what, m in lacking.items()
        if what
    )
    return Written(sections=tuple(sections), unsaid=(*written.unsaid, *said))


def _priced(plan: Plan, written: Written, price: Price) -> Written:
    """With the cost of each nearest against the plan, both predicted now."""
    if all(unsaid.nearest is None for unsaid in written.unsaid):
        return written
    now = price(plan)
    said = (
        replace(unsaid, cost=cost(now, price(unsaid.nearest))) if unsaid.nearest else unsaid
        for unsaid in written.unsaid
    )
    return replace(written, unsaid=tuple(said))


def readme(plan: Plan, name: str, way: Exporter, written: Written, needs: Mapping[str, str]) -> str:
    """The page that goes with the files: the command, what is predicted, what could not be said."""
    title = framework(name).title
    lines = [
        f"# {markdown_text(headline(plan))}, {title} {way.version}",
        "",
        f"{markdown_text(verdict(plan))} {markdown_text(predicted(plan))}. {markdown_text(memory(plan))}.",
    ]
    lines += ["", "```sh", *(f"export {key}=...   # {what}" for key, what in needs.items())]
    lines += [way.start, "```", ""]
    if written.unsaid:
        lines += [f"What {title} cannot be told of this plan:", ""]
        lines += [f"- {markdown_text(unsaid.sentence)}." for unsaid in written.unsaid]
    else:
        lines.append(f"{title} is told all of this plan.")
    lines += ["", "Written from `plan.json` (next to this page) by `rlhfsim export`."]
    read = name in resources.frameworks_with("logs")
    if read and not way.timed(plan):
        lines.append("Its log prints no time of a step, so nothing of the run can be held against this page.")
    elif read:
        after = f"`rlhfsim import-run LOG --framework {name}`"
        lines.append(f"After the run, {after} holds what was measured against what is predicted.")
    return "\n".join(lines) + "\n"


def scored_alike(plan: Plan, role: RolePlacement) -> bool:
    """Whether a role scores as the actor does: weights cut alike, micro-batches of the same size."""
    actor, backend = plan.placement.actor, plan.placement.backend
    aspects: tuple[Aspect, ...] = ("cut", "scoring")
    if role.layout.tp > 1 and role.layout.sequence_parallel != actor.layout.sequence_parallel:
        return False
    return all(value_of(x, role, backend) == value_of(x, actor, backend) for x in aspects)


def longest_prompt(plan: Plan) -> int:
    """Tokens."""
    return math.ceil(plan.workload.prompt_len.maximum)


def longest_response(plan: Plan) -> int:
    """Tokens."""
    return math.ceil(plan.workload.response_len.maximum)


def the_rollout(plan: Plan, title: str) -> RolloutPlacement:
    """The rollout of a plan.

    Raises:
        RlhfsimError: the plan trains on given pairs or labels.
    """
    if plan.placement.rollout is None:
        raise RlhfsimError(
            "algorithm-not-exported",
            f"{title} is written for algorithms that generate, not for {plan.workload.algorithm}",
            help="export it to trl (SFT to verl, openrlhf or nemo-rl too, DPO to the last two), or run it "
            "with rlhfsim launch",
        )
    return plan.placement.rollout


def nodes_of(plan: Plan, gpus: int) -> tuple[int, int]:
    """(nodes, GPUs of each) that so many GPUs are.

    Raises:
        RlhfsimError: they do not fill whole nodes.
    """
    each = plan.hardware[0].gpus_per_node
    if gpus <= each:
        return 1, gpus
    if gpus % each:
        raise RlhfsimError(
            "pool-is-not-whole-nodes",
            f"a pool of {gpus} GPUs does not fill nodes of {each}, and frameworks count nodes",
            help=f"design with pools of whole nodes, for example on {gpus // each * each} GPUs",
        )
    return gpus // each, each


def argument(setting: Setting) -> str:
    """`--flag value` as bash reads it; a switch without value."""
    if setting.value is True:
        return setting.key
    value = f'"{setting.value}"' if "$" in str(setting.value) else setting.value
    return f"{setting.key} {value}"


def override(setting: Setting) -> str:
    """`key=value` as bash and the grammars of Hydra and OmegaConf read it."""
    value = setting.value
    if isinstance(value, str):
        return f'{setting.key}="{value}"'
    return f"{setting.key}={json.dumps(value)}"


def script(
    head: str, needs: Mapping[str, str], written: Written, render: Callable[[Setting], str], command: str
) -> str:
    """A bash script whose settings are in one array, each below its reason."""
    array = ["settings=(", *_array(written, render), ")"]
    return bash(head, needs, "\n".join([*array, "", f'{command} "${{settings[@]}}" "$@"']))


def _array(written: Written, render: Callable[[Setting], str]) -> Iterator[str]:
    for section in written.sections:
        yield f"    {comment(f'--- {section.title}')}"
        for setting in section.settings:
            if setting.why:
                yield f"    {comment(setting.why)}"
            yield f"    {render(setting)}"
