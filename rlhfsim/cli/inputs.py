"""Options that several commands share, and how they become specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from rlhfsim.cli.options import parse_pairs
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.specs.backends import BACKENDS
from rlhfsim.specs.hardware import Cluster
from rlhfsim.specs.lengths import AnyLengths
from rlhfsim.specs.loading import parse_json
from rlhfsim.specs.profiles import parse_cluster
from rlhfsim.specs.workload import Algorithm, Workload

F = TypeVar("F", bound=Callable[..., Any])
COMMAND_LINE = Place(file="command line")


def _all(options: list[Callable[[F], F]]) -> Callable[[F], F]:
    def apply(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


cluster_options = _all([
    click.option("--gpus", type=int, required=True, help="GPUs in the cluster (with --rollout-gpus: those that train)."),
    click.option("--gpu", default="h100-sxm", show_default=True, help="Hardware profile, alias or YAML path."),
    click.option("--gpus-per-node", type=int, help="GPUs per node; default of the profile."),
    click.option("--rollout-gpu", help="Another profile for a second, rollout-only pool."),
    click.option("--rollout-gpus", type=int, help="GPUs in the rollout-only pool."),
    click.option("--oversubscription", type=float, default=1.0, help="How much thinner the fabric is than the sum of NICs."),
    click.option("--price", type=float, help="USD per GPU-hour; replaces the profile's price."),
])  # fmt: skip

workload_options = _all([
    click.option("--model", required=True, help="Policy: preset, alias (8b, 70b, ...) or a config.json."),
    click.option("--algorithm", default="ppo", show_default=True, type=click.Choice(get_args(Algorithm)), help="RLHF algorithm."),
    click.option("--prompts", type=int, default=1024, show_default=True, help="Prompts per step."),
    click.option("--samples", type=int, default=1, show_default=True, help="Responses per prompt."),
    click.option("--prompt-len", default="1024", show_default=True, help="Tokens, or a distribution (see docs/workload.md)."),
    click.option("--response-len", default="1024", show_default=True, help="Tokens, or lognormal:mean=2000,sigma=0.8,max=8192."),
    click.option("--epochs", type=int, default=1, show_default=True, help="Passes over the batch per step."),
    click.option("--mini-batches", type=int, default=1, show_default=True, help="Optimizer steps per epoch."),
    click.option("--critic", default="same", show_default=True, help="Critic model (PPO)."),
    click.option("--reference", default="same", show_default=True, help="Reference model, or none."),
    click.option("--reward", default="same", show_default=True, help="Reward model, or none."),
    click.option("--rules", help="Rule rewards: seconds_per_sample=0.01,workers=64."),
    click.option("--no-kl", is_flag=True, help="No KL term, so no reference forward."),
    click.option("--no-packing", is_flag=True, help="Pad every sequence to the longest."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of drawn lengths."),
])  # fmt: skip

backend_option = click.option(
    "--backend",
    default="deepspeed",
    show_default=True,
    type=click.Choice(list(BACKENDS)),
    help="Training backend.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print the same content as JSON."
)


def build_cluster(given: dict[str, Any]) -> Cluster:
    """The cluster of `cluster_options`."""
    return parse_cluster(
        gpus=given["gpus"], gpu=given["gpu"], gpus_per_node=given["gpus_per_node"], rollout_gpu=given["rollout_gpu"],
        rollout_gpus=given["rollout_gpus"], oversubscription=given["oversubscription"],
    )  # fmt: skip


def build_workload(given: dict[str, Any], **changes: Any) -> Workload:
    """The workload of `workload_options`."""
    import json

    raw: dict[str, Any] = {
        "algorithm": given["algorithm"], "model": given["model"], "critic": given["critic"], "reference": given["reference"],
        "reward": _reward(given), "prompts": given["prompts"], "samples": given["samples"],
        "prompt_len": lengths(given["prompt_len"], "--prompt-len"), "response_len": lengths(given["response_len"], "--response-len"),
        "epochs": given["epochs"], "mini_batches": given["mini_batches"], "kl": not given["no_kl"], "packing": not given["no_packing"],
        "seed": given["seed"], **changes,
    }  # fmt: skip
    return from_options(Workload, raw, json)


def from_options(kind: Any, raw: dict[str, Any], json: Any) -> Any:
    """A spec from option values; errors name the option, not a line."""
    from rlhfsim.specs.loading import convert

    try:
        return convert(kind, parse_json(json.dumps(raw), "command line"))
    except RlhfsimError as error:
        raise RlhfsimError(
            error.code, error.message, place=COMMAND_LINE, help=error.help
        ) from error


def _reward(given: dict[str, Any]) -> dict[str, Any]:
    model = None if given["reward"] == "none" else given["reward"]
    rules = parse_pairs(given["rules"], "--rules") if given["rules"] else None
    return {"model": model, "rules": rules}


def lengths(text: str, option: str) -> dict[str, Any]:
    """`1024`, `lognormal:mean=2000,sigma=0.8,max=8192`, `truncated:...` or `empirical:file=lengths.txt`."""
    kind, _, rest = text.partition(":")
    if not rest:
        try:
            return {"kind": "fixed", "value": float(text)}
        except ValueError as error:
            raise RlhfsimError("bad-length", f"{option}: {text!r} is not a number of tokens", place=COMMAND_LINE,
                               help="write 1024 or lognormal:mean=2000,sigma=0.8,max=8192") from error  # fmt: skip
    return {"kind": kind, **parse_pairs(rest, option)}


__all__ = [
    "AnyLengths",
    "backend_option",
    "build_cluster",
    "build_workload",
    "cluster_options",
    "json_option",
    "lengths",
    "workload_options",
]
