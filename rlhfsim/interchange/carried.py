"""What a plan says that no key of a framework holds: comments of its launch, which `rlhfsim doctor` reads.

    # rlhfsim: plan.model = "qwen2.5-7b"

They lie below all that keys say. Names with `plan.` are read by the doctor, the others are keys of a user's
`--set` and variables of the script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import ceil
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.interchange.configuration.engines import EXPECTED, KEPT, SPECULATION
from rlhfsim.interchange.configuration.served_reward import SERVED_REWARD, served_reward
from rlhfsim.interchange.configuration.settings import PLANNED_MODEL, FrameworkSettings
from rlhfsim.plan import Plan
from rlhfsim.specs.loading import Source, convert
from rlhfsim.specs.workload.lengths import AnyLengths, Empirical, Fixed
from rlhfsim.specs.workload.workload import Workload

NODE_GPUS, OVERSUBSCRIPTION, UNSAID = "plan.gpus_per_node", "plan.oversubscription", "plan.unsaid"
FIELDS = ("prompt_len", "response_len", "environment", "custom", "oversampling", "seed", "reward")
"""Fields of a workload that no key holds, or not whole."""
_LINE = re.compile(r"^# rlhfsim: ([\w.]+) = (.+)$", re.MULTILINE)


def with_carried(files: Mapping[str, str], plan: Plan, unsaid: Sequence[str]) -> dict[str, str]:
    """Scripts and YAML files of a launch with the comments, below those with which they begin.

    `unsaid`: what no key and no comment says of the plan, in words.
    """
    values = carried(plan, "".join(files.values())) | ({UNSAID: list(unsaid)} if unsaid else {})
    lines = [f"# rlhfsim: {key} = {json.dumps(value)}" for key, value in values.items()]
    return {
        name: _below_head(text, lines) if name.endswith((".sh", ".yaml")) else text
        for name, text in files.items()
    }


def _below_head(text: str, lines: list[str]) -> str:
    old = text.split("\n")
    head = next((i for i, line in enumerate(old) if not line.startswith("#")), len(old))
    return "\n".join([*old[:head], *lines, *old[head:]])


def carried(plan: Plan, scripts: str) -> dict[str, Any]:
    """What no key of a launch says of a plan, by name; `scripts`: its text."""
    work, rollout = plan.workload, plan.placement.rollout
    drafts = rollout.layout.speculation if rollout else None
    variables = {
        "REWARD_MODEL": work.reward.model,
        "REWARD": work.reward.model,
        "DRAFT_MODEL": drafts.model if drafts else None,
    }
    values: dict[str, Any] = {
        PLANNED_MODEL: work.model,
        NODE_GPUS: plan.hardware[0].gpus_per_node,
        OVERSUBSCRIPTION: plan.oversubscription if plan.oversubscription != 1 else None,
        **dict(_fields(plan)),
        **{name: value for name, value in variables.items() if f"${{{name}}}" in scripts},
        **{f"{SPECULATION}.{name}": getattr(drafts, name, None) or None for name in EXPECTED},
        KEPT: work.dynamic_sampling.kept if work.dynamic_sampling else None,
        SERVED_REWARD: served_reward(plan, scripts),
    }
    return {key: value for key, value in values.items() if value is not None}


def _fields(plan: Plan) -> Iterator[tuple[str, Any]]:
    """Fields of the workload that differ from their defaults, as JSON."""
    plain, usual = plan.to_dict()["workload"], {field.name: field.default for field in fields(Workload)}
    for name in FIELDS:
        if plain[name] != usual[name]:
            yield f"plan.{name}", plain[name]


def carried_in(text: str, name: str) -> dict[str, Any]:
    """Values of the comments in a text.

    Raises:
        RlhfsimError: one is not JSON.
    """
    return {match[1]: _value(match, name) for match in _LINE.finditer(text)}


def _value(match: re.Match[str], name: str) -> Any:
    try:
        return json.loads(match[2])
    except (ValueError, RecursionError) as error:
        line = match.string.count("\n", 0, match.start()) + 1
        raise RlhfsimError(
            "malformed-comment",
            f"the comment `# rlhfsim: {match[1]} = ...` does not hold JSON: {error}",
            place=Place(file=name, line=line),
            help="correct it, or remove the line: its value is then assumed",
        ) from error


def planned_workload(s: FrameworkSettings, work: Workload, limits: Mapping[str, int | None]) -> Workload:
    """A workload with what the comments say of it; `limits`: lengths as the keys cut them, by field.

    A field that `limits` lacks, of the lengths, is said by somebody else.

    Raises:
        RlhfsimError: a comment holds what cannot be.
    """
    said = dict(planned_fields(s))
    for field in ("prompt_len", "response_len"):
        if field not in limits:
            said.pop(field, None)
    if not said:
        return work
    plain = {field: said[field] for field in said if field != "reward"}
    read = convert(Workload, Source(s.name, "", {"model": work.model, **said}))
    changes: dict[str, Any] = {field: getattr(read, field) for field in plain}
    for field, limit in limits.items():
        if field in changes:
            changes[field] = within(changes[field], limit)
    if "reward" in said and read.reward.rules is not None:
        changes["reward"] = replace(read.reward, model=work.reward.model)
    return replace(work, **changes)


def planned_fields(s: FrameworkSettings) -> Iterator[tuple[str, Any]]:
    """Fields of a workload that comments hold."""
    for field in FIELDS:
        value = s.find(f"plan.{field}")
        if value is not None:
            yield field, value


def within(lengths: AnyLengths, limit: int | None) -> AnyLengths:
    """Lengths cut at `limit` tokens; None: as they are."""
    if limit is None or isinstance(lengths, Empirical) or ceil(lengths.maximum) == limit:
        return lengths
    if isinstance(lengths, Fixed):
        return Fixed(value=min(lengths.value, limit))
    return replace(lengths, max=limit)
