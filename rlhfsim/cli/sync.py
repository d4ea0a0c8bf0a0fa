"""`rlhfsim sync`: every way to move weights from training to rollout, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import click

from rlhfsim.cli import completion
from rlhfsim.cli.inputs import wan_option
from rlhfsim.cli.params import (
    COMMAND_LINE,
    Given,
    OneOf,
    Told,
    Words,
    bad_option,
    command,
    flag,
    from_pairs,
    option,
    parse_pairs,
)
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import device_of
from rlhfsim.present.answers import sync as view
from rlhfsim.specs.frameworks.runs import frameworks
from rlhfsim.specs.hardware.hardware import NodeGroup, Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.backends import BACKENDS, Backend, violation
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.weight_sync.endpoints import PoolPair, Route, route
from rlhfsim.weight_sync.weight_sync import every_path

T = TypeVar("T")
NAMES = tuple(each.name for each in frameworks())
LAYOUT, DEGREE = Words("LAYOUT"), click.IntRange(1, 4096)
EPILOG = """\b
Examples:
  rlhfsim sync --model 70b --from tp=8,dp=2 --to tp=8
  rlhfsim sync --model qwen3-235b-a22b --from tp=4,pp=4,dp=4,ep=16 --to tp=8,dp=4 --gpu h200
  rlhfsim sync --model 70b --from tp=8,dp=2 --to tp=8 --wan rtt=60ms,bandwidth=10Gbit/s,loss=0.01%
  rlhfsim sync --run
"""


@command(EPILOG)
@option(
    "--model",
    Words("TEXT", completion.models),
    "Preset, alias (8b, 70b, ...) or a config.json; with --run a model folder.",
)
@option("--from source", LAYOUT, "Training layout: tp=8,pp=2,dp=4,ep=8,zero=1.")
@option("--to target", LAYOUT, "Rollout layout: tp=8,dp=4,precision=fp8.")
@option("--gpu", Words("TEXT", completion.gpus), "Hardware profile, alias or YAML path.", default="h100-sxm")
@option("--gpus-per-node", DEGREE, "GPUs per node; default of the profile.")
@option("--backend", click.Choice(list(BACKENDS)), "Training backend.", default="megatron")
@option(
    "--framework",
    OneOf("framework", NAMES),
    "Who runs it, where runs say what it takes there; default: anyone.",
)
@flag("--same-pool", "Training and rollout share the GPUs (default: separate pools).")
@option("--lora", DEGREE, "The policy trains adapters of this rank only.", metavar="RANK")
@flag("--no-rdma", "The network has no RDMA.")
@option("--wan", Words("KEY=VALUE,..."), "Rollout in another region: rtt=60ms,bandwidth=10Gbit/s,loss=0.01%.")
@flag("--run run_it", "Run and time every local path on this machine instead.")
@option("--repeats", click.IntRange(1, 1000), "With --run: transfers of each path.", default=5)
@flag("--json as_json", f"Print the same content as JSON ({view.SCHEMA}).")
def sync(model: str | None, as_json: bool, **given: Any) -> Told:
    """Compare every way to move weights from training to rollout.

    Seconds come with their P10 to P90. A path that cannot be used between these two ends is priced
    all the same and says why not.
    """
    if given["run_it"]:
        from rlhfsim.cli import sync_run

        return sync_run.run(model, given["repeats"], as_json=as_json)
    ends = {"--model": model, "--from": given["source"], "--to": given["target"]}
    if model is None or None in ends.values():
        raise bad_option(
            f"{next(name for name, value in ends.items() if value is None)} is missing",
            "as in --model 70b --from tp=8,dp=2 --to tp=8; or time the paths of this machine: --run",
        )
    profile, spec = load_profile(given["gpu"]), resolve_model(model)
    per_node = given["gpus_per_node"] or profile.node.gpus
    asked = _route(spec, profile, per_node, given)
    return Told(view.sync_page(spec, profile, per_node, asked, every_path(asked)))


def _route(model: ModelSpec, profile: Profile, per_node: int, given: Given) -> Route:
    """The two ends.

    Raises:
        RlhfsimError: tensor parallelism does not divide the heads, or a shared pool of two sizes.
    """
    train = layout_option(given["source"], "--from", given["backend"])
    rollout = rollout_layout_option(given["target"], "--to")
    for tp in (train.tp, rollout.tp):
        model.check_tp(tp)
    if given["same_pool"] and train.gpus != rollout.gpus:
        raise RlhfsimError(
            "pools-differ",
            f"--same-pool: training fills {train.gpus} GPUs and rollout {rollout.gpus}",
            place=COMMAND_LINE,
            help="choose dp so that both fill the pool",
        )

    used = train.gpus + (0 if given["same_pool"] else rollout.gpus)
    whole = -(-used // per_node) * per_node  # both pools: they may share a node, or a rack's scale-up domain
    group = NodeGroup(profile=profile, gpus=whole, gpus_per_node=per_node)
    far = None if given["wan"] is None else wan_option(given["wan"], "--wan")
    if far is not None and given["same_pool"]:
        raise bad_option(
            "--wan with --same-pool: GPUs that both use are in one region", "leave one of them out"
        )
    software = {"framework": given["framework"], "backend": given["backend"]} if given["framework"] else {}
    device = device_of(group, **software)
    target = device if far is None else device_of(replace(group, wan=far), **software)
    return route(
        model,
        train,
        rollout,
        PoolPair(device, target, given["same_pool"], rdma=not given["no_rdma"]),
        given["backend"],
        Lora(rank=given["lora"]) if given["lora"] else None,
    )


def layout_option(text: str, option: str, backend: Backend = "megatron") -> Layout:
    """A training layout from `tp=8,pp=2,dp=4`; ZeRO is 3 for FSDP and 1 otherwise unless given.

    Raises:
        RlhfsimError: an unknown name, a bad degree, or a layout that the backend cannot run.
    """
    zero = "3" if backend == "fsdp2" else "1"
    layout = _layout(Layout, {"zero": zero, **parse_pairs(text, option)}, option)
    if reason := violation(backend, layout):
        raise RlhfsimError(
            "layout-not-supported",
            f"{option} {text}: {reason}",
            place=COMMAND_LINE,
            help="choose another layout, or another --backend",
        )
    return layout


def rollout_layout_option(text: str, option: str) -> RolloutLayout:
    """A rollout layout from `tp=8,dp=4,precision=fp8`.

    Raises:
        RlhfsimError: an unknown name or a bad degree.
    """
    return _layout(RolloutLayout, parse_pairs(text, option), option)


def _layout(kind: type[T], pairs: dict[str, str], option: str) -> T:
    try:
        return from_pairs(kind, pairs, option)
    except RlhfsimError as error:
        if error.code != "bad-value":
            raise
        raise error.with_help(f"write {option} tp=8,dp=2") from error
