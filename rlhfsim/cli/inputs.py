"""Options that several commands share, and how they become specs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from rlhfsim import units
from rlhfsim.cli import completion
from rlhfsim.cli.params import (
    COMMAND_LINE,
    FILE,
    F,
    Given,
    Number,
    OneOf,
    Words,
    bad_option,
    field_option,
    flag,
    from_pairs,
    on_command_line,
    option,
    parse_pairs,
    together,
    typed,
)
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.specs.frameworks.runs import ANY, OWN, framework, frameworks
from rlhfsim.specs.hardware.clusters import ClusterText
from rlhfsim.specs.hardware.hardware import Cluster, Fabric
from rlhfsim.specs.hardware.prices import MARKETS
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.loading import convert, parse_json
from rlhfsim.specs.model.context import check_context
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.quantities import UsdPerHour
from rlhfsim.specs.ranges import PoolGpus
from rlhfsim.specs.workload.lengths import AnyLengths, Empirical, Fixed, LogNormal, Truncated
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import (
    AT_MOST,
    GROUPED,
    MAX_SEQUENCES,
    WITHOUT_KL,
    Environment,
    OwnParts,
    Rules,
    Workload,
    usual_batch,
)

DISTRIBUTIONS: dict[str, Any] = {
    "fixed": Fixed,
    "lognormal": LogNormal,
    "truncated": Truncated,
    "empirical": Empirical,
}
SAME = (
    "algorithm",
    "model",
    "critic",
    "reference",
    "prompts",
    "samples",
    "epochs",
    "mini_batches",
    "seed",
    "oversampling",
    "router_replay",
    "teacher_top",
)
"""Fields of the workload that an option gives as they are."""
PARTS: Mapping[str, type] = {
    "rules": Rules,
    "speculation": Speculation,
    "environment": Environment,
    "custom": OwnParts,
    "dynamic_sampling": DynamicSampling,
}
"""Option -> what its pairs describe."""
_WRITE = (
    "write 1024, 8k, lognormal:mean=2000,sigma=0.8,max=8192, truncated:mean=500,std=200,max=2048 "
    "or empirical:file=lengths.txt"
)


GPU, NAME, PAIRS = Words("NAME", completion.gpus), Words("NAME"), Words("KEY=VALUE,...")
oversubscription_option = field_option(
    ClusterText, "oversubscription", "2: the network between nodes carries half of what the NICs could."
)
FRAMEWORKS = (*(x.name for x in frameworks()), ANY)
backend_options = together(
    option(
        "--framework",
        OneOf("framework", FRAMEWORKS),
        f"Who runs the plan: {', '.join(FRAMEWORKS)} (all that is priced). Default: {OWN}, or the first that "
        "trains with --backend and runs the GPUs.",
    ),
    option(
        "--backend",
        OneOf("backend", BACKENDS),
        f"Training backend: {', '.join(BACKENDS)}. Default: as most of the framework's own examples, unless "
        "another is much faster.",
    ),
)


class Rent(Number):
    """USD per GPU-hour, or the name of a market."""

    name = "USD|MARKET"

    def read(self, text: str, option: str) -> float | str:  # type: ignore[override]  # a market too
        """The price, or the market whose listed price counts.

        Raises:
            RlhfsimError: neither.
        """
        market = text.strip().lower()
        return market if market in MARKETS else super().read(text, option)


price_option = option("--price", UsdPerHour, "USD per GPU-hour, in place of the listed price.")
rent_option = option(
    "--price", typed(UsdPerHour, Rent), "USD per GPU-hour, or the listed price that counts: reserved, spot."
)


def _cluster(*, required: bool) -> Callable[[F], F]:
    gpus = PoolGpus
    far = "That pool is in another region: rtt=60ms,bandwidth=10Gbit/s,loss=0.01%,streams=16; or goodput."
    known = "GPU: name or alias (rlhfsim gpus), or a YAML file, such as one of rlhfsim calibrate."
    return together(
        option(
            "--gpus", gpus, "GPUs in the cluster; with --rollout-gpus: those that train.", required=required
        ),
        option("--gpu --profile gpu", GPU, known, default="h100-sxm"),
        option("--gpus-per-node", gpus, "GPUs per node; default: the usual node of the GPU."),
        option("--rollout-gpus", gpus, "GPUs of a second pool, for the rollout only."),
        option("--rollout-gpu", GPU, "Another GPU for that second pool."),
        option("--rollout-wan", PAIRS, far),
        oversubscription_option,
        option("--fabric", OneOf("fabric", get_args(Fabric)), "What joins the nodes: infiniband, roce, efa."),
        rent_option,
    )


def _workload(*, required: bool) -> Callable[[F], F]:
    tokens = Words("TOKENS")
    model, grouped = Words("NAME", completion.models), ", ".join(sorted(GROUPED))
    drawn = "Tokens, or lognormal:mean=2000,sigma=0.8,max=8192; more in docs/workload.md."
    started = "Further prompts started, as a share: 0.25; the first to finish are trained on."
    drafted = "Speculative decoding may compete: method=eagle,draft_tokens=3,acceptance=0.65."
    refilled = (
        "Share of the groups whose rewards differ; the others are thrown away and generated anew (DAPO). "
        "With more: kept=0.5,gen_prompts=1536,max_gen_batches=10."
    )
    answered = (
        "Answers between turns (agents): turns=4,seconds_per_turn=2s,workers=256; sandboxes: cold_start=60s."
    )
    own = "Seconds of your own loss, advantages, sampler, filter, logger a sample: filter=2ms,loss=0.1ms."
    ruled = "Rewards by rules on CPUs: seconds_per_sample=5ms,workers=64."
    return together(
        option(
            "--model", model, "Policy: name or alias (rlhfsim models), or a config.json.", required=required
        ),
        field_option(Workload, "algorithm", "{choices}."),
        field_option(
            Workload,
            "prompts",
            "Prompts per step; default: 1,024, or 128 where --samples is 8.",
            default=None,
        ),
        field_option(
            Workload, "samples", f"Responses per prompt; default: 8 for {grouped}, else 1.", default=None
        ),
        option("--prompt-len", tokens, "Tokens, or a distribution as for --response-len.", default="1024"),
        option("--response-len", tokens, drawn, default="1024"),
        field_option(Workload, "epochs", "Passes over the batch in one step."),
        field_option(Workload, "mini_batches", "Optimizer updates per epoch."),
        field_option(Workload, "critic", "Critic model (PPO); same: as the policy."),
        field_option(
            Workload, "reference", "Reference model, same or none; of distillation the teachers: a,b."
        ),
        option("--reward", NAME, "Reward model, same or none; default: same, or none with --rules."),
        option("--rules", PAIRS, ruled),
        option("--environment", PAIRS, answered),
        option("--custom", PAIRS, own),
        option("--settings settings_file", FILE, "Settings of a run: what its own parts declare is priced."),
        option("--dynamic-sampling", Words("KEPT"), refilled),
        field_option(Workload, "oversampling", started),
        option("--speculation", PAIRS, drafted),
        field_option(Workload, "teacher_top", "Distillation: largest logits of the teacher at each token."),
        flag("--router-replay", "Training takes the experts that the rollout chose (R3)."),
        flag("--no-kl", "No KL term, so no reference model."),
        flag("--no-packing", "Pad every sequence to the longest."),
        field_option(Workload, "seed", "Seed of drawn lengths."),
    )


cluster_options, workload_options = _cluster(required=True), _workload(required=True)
input_options = together(_cluster(required=False), _workload(required=False))
"""Both, for commands that read a file instead."""


# --- cluster and workload ---------------------------------------------------------------------------


def build_cluster(given: Given) -> Cluster:
    """The cluster of `cluster_options`.

    Raises:
        RlhfsimError: an unknown GPU, a bad profile, or a rollout pool without a size.
    """
    _needed(given, "gpus")
    names = (
        "gpus",
        "gpu",
        "gpus_per_node",
        "rollout_gpu",
        "rollout_gpus",
        "oversubscription",
        "fabric",
        "price",
    )
    with on_command_line():
        cluster = parse_cluster(**{name: given[name] for name in names})
        text = given["rollout_wan"]
        return cluster if text is None else cluster.behind(wan_option(text, "--rollout-wan"))


def wan_option(text: str, option: str) -> WanLink:
    """A link between two regions from `rtt=60ms,bandwidth=10Gbit/s,loss=0.01%`.

    Raises:
        RlhfsimError: an unknown name, a bad value, or a rate that is said twice or not at all.
    """
    return from_pairs(WanLink, parse_pairs(text, option), option)


def build_workload(given: Given) -> Workload:
    """The workload of `workload_options`; every model it names is known.

    Raises:
        RlhfsimError: an unknown model, a bad distribution, no reward, or a batch that does not split.
    """
    _needed(given, "model")
    batch = usual_batch(given["algorithm"])
    given = {**given, **{name: given[name] or usual for name, usual in batch.items()}}
    if given["prompts"] * given["samples"] > MAX_SEQUENCES:
        raise bad_option(
            f"--prompts {given['prompts']:,} times --samples {given['samples']:,} is out of range", AT_MOST
        )
    parts = ((name, _pairs(name, given)) for name in PARTS if name != "rules")
    raw: dict[str, Any] = {
        **{name: given[name] for name in SAME},
        "reward": _reward(given),
        "prompt_len": lengths(given["prompt_len"], "--prompt-len"),
        "response_len": lengths(given["response_len"], "--response-len"),
        **{name: pairs for name, pairs in parts if pairs is not None},
        "kl": not (given["no_kl"] or given["algorithm"] in WITHOUT_KL),
        "packing": not (given["no_packing"] or _pads(given.get("framework"))),
    }
    with on_command_line():
        workload = convert(Workload, parse_json(json.dumps(raw), COMMAND_LINE.file))
        models_of(workload)
        check_context(workload)
    rewarded = workload.reward.model or workload.reward.rules or workload.environment
    if workload.distils and workload.reference in ("same", "none"):
        raise bad_option(
            f"--algorithm distillation with --reference {workload.reference} has no teacher",
            "name it, as in --model 8b --reference 70b",
        )
    if workload.generates and rewarded is None and not workload.distils:
        raise bad_option(
            "--reward none leaves no reward",
            "add --rules seconds_per_sample=5ms,workers=64, or name a reward model",
        )
    return workload if given["settings_file"] is None else _declared(workload, given["settings_file"])


def _declared(workload: Workload, settings: Path) -> Workload:
    """The workload with the seconds that parts and rewards of the settings declare."""
    from executor.algorithms.custom import with_declared  # read only where it is asked for
    from rlhfsim.cli.run_settings import settings_of

    return with_declared(workload, settings_of(settings, ()))


def _pads(name: str | None) -> bool:
    return name not in (None, ANY) and framework(name).pads


def _needed(given: Given, name: str) -> None:
    if given[name] is None:
        raise bad_option(f"--{name} is missing", "as in --gpus 64 --model 70b")


def _reward(given: Given) -> dict[str, Any]:
    rules = _pairs("rules", given)
    model = given["reward"] or ("none" if rules else "same")
    return {"model": None if model == "none" else model, "rules": rules}


def _pairs(name: str, given: Given) -> dict[str, str] | None:
    """The pairs of an option of `PARTS`, checked; None where it was not given."""
    text, option = given[name], f"--{name.replace('_', '-')}"
    if text is None:
        return None
    if name == "dynamic_sampling" and "=" not in text:
        text = f"kept={text}"
    pairs = parse_pairs(text, option)
    from_pairs(PARTS[name], pairs, option)
    return pairs


# --- lengths ----------------------------------------------------------------------------------------


def lengths(text: str, option: str) -> dict[str, Any]:
    """A distribution of tokens as plain data: `1024`, `8k`, `lognormal:mean=2000,sigma=0.8,max=8192`.

    Raises:
        RlhfsimError: an unknown kind or name, a bad number, or a file of lengths that cannot be read.
    """
    kind, colon, rest = (part.strip() for part in text.partition(":"))
    if not colon:
        pairs: dict[str, Any] = {"value": _number("value", kind, option)}
        kind = "fixed"
    else:
        if kind not in DISTRIBUTIONS:
            raise unknown_name("length distribution", kind[:40], DISTRIBUTIONS, place=COMMAND_LINE)
        pairs = {k: _number(k, v, option) for k, v in parse_pairs(rest, option).items()}
    try:
        spec: AnyLengths = from_pairs(DISTRIBUTIONS[kind], pairs, option)
    except RlhfsimError as error:
        raise RlhfsimError(error.code, error.message, place=COMMAND_LINE, help=_WRITE) from error
    spec.maximum  # noqa: B018  # a file of lengths is read now, so that a bad one is reported here
    return {"kind": kind, **pairs}


def _number(name: str, text: str, option: str) -> float | str:
    if name == "file":
        return text
    tokens = name in ("value", "mean", "std", "min", "max")
    try:
        return units.parse(text, "token" if tokens else "1")
    except RlhfsimError as error:
        meaning = "a number of tokens" if tokens else "a number"
        raise bad_option(f"{option}: {text[:40]!r} is not {meaning}", _WRITE) from error
