"""Options that several commands share, and how they become specs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import click

from rlhfsim import units
from rlhfsim.cli import completion
from rlhfsim.cli.options import parse_pairs
from rlhfsim.cli.params import COMMAND_LINE, Number, OneOf, Whole, bad_option
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.specs.hardware.hardware import MAX_GPUS, MAX_OVERSUBSCRIPTION, Cluster
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.loading import convert, parse_json
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.workload.lengths import AnyLengths, Empirical, Fixed, LogNormal, Truncated
from rlhfsim.specs.workload.workload import Algorithm, Rules, Workload

__all__ = [
    "COMMAND_LINE",
    "backend_option",
    "build_cluster",
    "build_workload",
    "cluster_options",
    "input_options",
    "json_option",
    "lengths",
    "on_command_line",
    "workload_options",
]
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
MAX_SEQUENCES = 10_000_000
"""Sequences of one step; a larger batch is a slip."""
MAX_PRICE = 10_000.0
"""USD per GPU-hour; more is a slip."""
DISTRIBUTIONS: dict[str, Any] = {
    "fixed": Fixed,
    "lognormal": LogNormal,
    "truncated": Truncated,
    "empirical": Empirical,
}
_LENGTHS = "1024, 8k, lognormal:mean=2000,sigma=0.8,max=8192, truncated:mean=500,std=200,max=2048 or empirical:file=lengths.txt"


def _all(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    def apply(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


def _cluster(required: bool) -> list[Callable[[F], F]]:
    return [
        click.option(
            "--gpus",
            type=Whole(1, MAX_GPUS),
            required=required,
            help="GPUs in the cluster; with --rollout-gpus: those that train.",
        ),
        click.option(
            "--gpu",
            "--profile",
            "gpu",
            default="h100-sxm",
            show_default=True,
            metavar="NAME",
            shell_complete=completion.gpus,
            help="GPU: name or alias (rlhfsim gpus), or a YAML file, such as one of rlhfsim calibrate.",
        ),
        click.option(
            "--gpus-per-node",
            type=Whole(1, MAX_GPUS),
            help="GPUs per node; default: the usual node of the GPU.",
        ),
        click.option(
            "--rollout-gpus", type=Whole(1, MAX_GPUS), help="GPUs of a second pool, for the rollout only."
        ),
        click.option(
            "--rollout-gpu",
            metavar="NAME",
            shell_complete=completion.gpus,
            help="Another GPU for that second pool.",
        ),
        click.option(
            "--oversubscription",
            type=Number(1, MAX_OVERSUBSCRIPTION),
            default=1.0,
            show_default=True,
            help="2: the network between nodes carries half of what the NICs could.",
        ),
        click.option(
            "--price",
            type=Number(0, MAX_PRICE, "usd/h"),
            help="USD per GPU-hour, in place of the listed price.",
        ),
    ]


def _workload(required: bool) -> list[Callable[[F], F]]:
    algorithms = get_args(Algorithm)
    return [
        click.option(
            "--model",
            required=required,
            metavar="NAME",
            shell_complete=completion.models,
            help="Policy: name or alias (rlhfsim models), or a config.json.",
        ),
        click.option(
            "--algorithm",
            default="ppo",
            show_default=True,
            type=OneOf("algorithm", algorithms),
            help=f"{', '.join(algorithms)}.",
        ),
        click.option(
            "--prompts",
            type=Whole(1, MAX_SEQUENCES),
            default=1024,
            show_default=True,
            help="Prompts per step.",
        ),
        click.option(
            "--samples",
            type=Whole(1, MAX_SEQUENCES),
            default=1,
            show_default=True,
            help="Responses per prompt.",
        ),
        click.option(
            "--prompt-len",
            default="1024",
            show_default=True,
            metavar="TOKENS",
            help="Tokens, or a distribution as for --response-len.",
        ),
        click.option(
            "--response-len",
            default="1024",
            show_default=True,
            metavar="TOKENS",
            help="Tokens, or lognormal:mean=2000,sigma=0.8,max=8192; more in docs/workload.md.",
        ),
        click.option(
            "--epochs",
            type=Whole(1, 100),
            default=1,
            show_default=True,
            help="Passes over the batch in one step.",
        ),
        click.option(
            "--mini-batches",
            type=Whole(1, 4096),
            default=1,
            show_default=True,
            help="Optimizer updates per epoch.",
        ),
        click.option(
            "--critic",
            default="same",
            show_default=True,
            metavar="NAME",
            help="Critic model (PPO); same: as the policy.",
        ),
        click.option(
            "--reference",
            default="same",
            show_default=True,
            metavar="NAME",
            help="Reference model, same or none.",
        ),
        click.option(
            "--reward",
            metavar="NAME",
            help="Reward model, same or none; default: same, or none with --rules.",
        ),
        click.option(
            "--rules",
            metavar="KEY=VALUE,...",
            help="Rewards by rules on CPUs: seconds_per_sample=5ms,workers=64.",
        ),
        click.option("--no-kl", is_flag=True, help="No KL term, so no reference model."),
        click.option("--no-packing", is_flag=True, help="Pad every sequence to the longest."),
        click.option(
            "--seed", type=Whole(0, 2**63 - 1), default=0, show_default=True, help="Seed of drawn lengths."
        ),
    ]


cluster_options = _all(_cluster(required=True))
workload_options = _all(_workload(required=True))
input_options = _all([*_cluster(required=False), *_workload(required=False)])
"""Both, for commands that read a file instead."""

backend_option = click.option(
    "--backend",
    default="deepspeed",
    show_default=True,
    type=OneOf("backend", BACKENDS),
    help=f"Training backend: {', '.join(BACKENDS)}.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the same content as JSON.")


@contextmanager
def on_command_line(prefix: str = "") -> Iterator[None]:
    """Errors without a place of their own stand on the command line; `prefix` names the option."""
    try:
        yield
    except RlhfsimError as error:
        place = error.place if error.place and error.place.file != COMMAND_LINE.file else None
        message = f"{prefix}{error.message}" if place is None else error.message
        raise RlhfsimError(error.code, message, place=place or COMMAND_LINE, help=error.help) from error


def from_pairs(kind: type[T], pairs: Mapping[str, Any], option: str) -> T:
    """A spec from `name=value` pairs; errors name the option.

    Raises:
        RlhfsimError: an unknown name, a missing one, or a bad value.
    """
    with on_command_line(f"{option}: "):
        return convert(kind, parse_json(json.dumps(pairs), COMMAND_LINE.file))


# --- cluster and workload ---------------------------------------------------------------------------


def build_cluster(given: Mapping[str, Any]) -> Cluster:
    """The cluster of `cluster_options`.

    Raises:
        RlhfsimError: an unknown GPU, a bad profile, or a rollout pool without a size.
    """
    _needed(given, "gpus")
    with on_command_line():
        return parse_cluster(
            gpus=given["gpus"],
            gpu=given["gpu"],
            gpus_per_node=given["gpus_per_node"],
            rollout_gpu=given["rollout_gpu"],
            rollout_gpus=given["rollout_gpus"],
            oversubscription=given["oversubscription"],
            price=given["price"],
        )


def build_workload(given: Mapping[str, Any], **changes: Any) -> Workload:
    """The workload of `workload_options`; every model it names is known.

    Raises:
        RlhfsimError: an unknown model, a bad distribution, no reward, or a batch that does not split.
    """
    _needed(given, "model")
    if given["prompts"] * given["samples"] > MAX_SEQUENCES:
        raise bad_option(
            f"--prompts {given['prompts']:,} times --samples {given['samples']:,} is out of range",
            f"at most {MAX_SEQUENCES:,} sequences per step",
        )
    raw: dict[str, Any] = {
        "algorithm": given["algorithm"],
        "model": given["model"],
        "critic": given["critic"],
        "reference": given["reference"],
        "reward": _reward(given),
        "prompts": given["prompts"],
        "samples": given["samples"],
        "prompt_len": lengths(given["prompt_len"], "--prompt-len"),
        "response_len": lengths(given["response_len"], "--response-len"),
        "epochs": given["epochs"],
        "mini_batches": given["mini_batches"],
        "kl": not given["no_kl"],
        "packing": not given["no_packing"],
        "seed": given["seed"],
        **changes,
    }
    with on_command_line():
        workload = convert(Workload, parse_json(json.dumps(raw), COMMAND_LINE.file))
        models_of(workload)
    if workload.generates and workload.reward.model is None and workload.reward.rules is None:
        raise bad_option(
            "--reward none leaves no reward",
            "add --rules seconds_per_sample=5ms,workers=64, or name a reward model",
        )
    return workload


def _needed(given: Mapping[str, Any], name: str) -> None:
    if given[name] is None:
        raise bad_option(f"--{name} is missing", "as in --gpus 64 --model 70b")


def _reward(given: Mapping[str, Any]) -> dict[str, Any]:
    rules = given["rules"]
    model = given["reward"] or ("none" if rules else "same")
    parsed = parse_pairs(rules, "--rules") if rules is not None else None
    if parsed is not None:
        from_pairs(Rules, parsed, "--rules")
    return {"model": None if model == "none" else model, "rules": parsed}


# --- lengths ----------------------------------------------------------------------------------------


def lengths(text: str, option: str) -> dict[str, Any]:
    """A distribution of tokens as plain data: `1024`, `8k`, `lognormal:mean=2000,sigma=0.8,max=8192`.

    Raises:
        RlhfsimError: an unknown kind or name, a bad number, or a file of lengths that cannot be read.
    """
    kind, colon, rest = (part.strip() for part in text.partition(":"))
    if not colon:
        pairs: dict[str, Any] = {"value": _tokens(kind, option)}
        kind = "fixed"
    else:
        if kind not in DISTRIBUTIONS:
            raise unknown_name("length distribution", kind[:40], DISTRIBUTIONS, place=COMMAND_LINE)
        pairs = {k: _number(k, v, option) for k, v in parse_pairs(rest, option).items()}
    try:
        spec: AnyLengths = from_pairs(DISTRIBUTIONS[kind], pairs, option)
    except RlhfsimError as error:
        raise RlhfsimError(error.code, error.message, place=COMMAND_LINE, help=f"write {_LENGTHS}") from error
    spec.maximum  # noqa: B018  # a file of lengths is read now, so that a bad one is reported here
    return {"kind": kind, **pairs}


def _number(name: str, value: str, option: str) -> float | str:
    if name == "file":
        return value
    return _tokens(value, option) if name in ("value", "mean", "std", "min", "max") else _plain(value, option)


def _tokens(text: str, option: str) -> float:
    try:
        return units.parse(text, "token")
    except RlhfsimError as error:
        raise bad_option(f"{option}: {text[:40]!r} is not a number of tokens", f"write {_LENGTHS}") from error


def _plain(text: str, option: str) -> float:
    try:
        return units.parse(text, "1")
    except RlhfsimError as error:
        raise bad_option(f"{option}: {text[:40]!r} is not a number", f"write {_LENGTHS}") from error
