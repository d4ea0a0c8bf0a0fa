"""`rlhfsim sync`: every way to move weights from training to rollout, side by side."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, cast

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.cli import completion
from rlhfsim.cli.options import layout_option, rollout_layout_option
from rlhfsim.cli.params import bad_option
from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.kernels.devices import device_of
from rlhfsim.specs.hardware.hardware import NodeGroup, Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.weight_sync.endpoints import route
from rlhfsim.weight_sync.weight_sync import SyncCost, every_path

SCHEMA = "rlhfsim.sync/1"
WIDTH = 100
"""Columns that a table never exceeds."""
_PARTIAL = ("none", "lora", "quantised")
"""Paths that do not bring all trained weights over unchanged."""
_HEAVIEST = 3
"""Coefficients that are named per path."""
EPILOG = """\b
Examples:
  rlhfsim sync --model 70b --from tp=8,dp=2 --to tp=8
  rlhfsim sync --model qwen3-235b-a22b --from tp=4,pp=4,dp=4,ep=16 --to tp=8,dp=4 --gpu h200
  rlhfsim sync --run
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked, checked."""

    model: ModelSpec
    train: Layout
    rollout: RolloutLayout
    profile: Profile
    gpus_per_node: int
    backend: Backend
    same_pool: bool
    lora: Lora | None
    rdma: bool


@click.command(epilog=EPILOG)
@click.option(
    "--model",
    shell_complete=completion.models,
    help="Preset, alias (8b, 70b, ...) or a config.json; with --run a model folder.",
)
@click.option("--from", "source", metavar="LAYOUT", help="Training layout: tp=8,pp=2,dp=4,ep=8,zero=1.")
@click.option("--to", "target", metavar="LAYOUT", help="Rollout layout: tp=8,dp=4,precision=fp8.")
@click.option(
    "--gpu",
    default="h100-sxm",
    show_default=True,
    shell_complete=completion.gpus,
    help="Hardware profile, alias or YAML path.",
)
@click.option("--gpus-per-node", type=click.IntRange(1, 4096), help="GPUs per node; default of the profile.")
@click.option(
    "--backend",
    default="megatron",
    show_default=True,
    type=click.Choice(list(BACKENDS)),
    help="Training backend.",
)
@click.option(
    "--same-pool", is_flag=True, help="Training and rollout share the GPUs (default: separate pools)."
)
@click.option(
    "--lora",
    type=click.IntRange(1, 4096),
    metavar="RANK",
    help="The policy trains adapters of this rank only.",
)
@click.option("--no-rdma", is_flag=True, help="The network has no RDMA.")
@click.option("--run", "run_it", is_flag=True, help="Run and time every local path on this machine instead.")
@click.option(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="With --run: transfers of each path.",
)
@click.option("--json", "as_json", is_flag=True, help=f"Print the same content as JSON ({SCHEMA}).")
def sync(
    model: str | None,
    source: str | None,
    target: str | None,
    gpu: str,
    gpus_per_node: int | None,
    backend: str,
    same_pool: bool,
    lora: int | None,
    no_rdma: bool,
    run_it: bool,
    repeats: int,
    as_json: bool,
) -> None:
    """Compare every way to move weights from training to rollout.

    Seconds come with their P10 to P90. A path that cannot be used between these two ends is priced
    all the same and says why not.
    """
    if run_it:
        from rlhfsim.cli import sync_run

        sync_run.run(model, repeats, as_json=as_json)
        return
    if model is None or source is None or target is None:
        missing = next(o for o, v in (("--model", model), ("--from", source), ("--to", target)) if v is None)
        raise bad_option(
            f"{missing} is missing",
            "as in --model 70b --from tp=8,dp=2 --to tp=8; or time the paths of this machine: --run",
        )
    profile = load_profile(gpu)
    chosen = cast(Backend, backend)
    question = Question(
        model=resolve_model(model),
        train=layout_option(source, "--from", chosen),
        rollout=rollout_layout_option(target, "--to"),
        profile=profile,
        gpus_per_node=gpus_per_node or profile.node.gpus,
        backend=chosen,
        same_pool=same_pool,
        lora=Lora(rank=lora) if lora else None,
        rdma=not no_rdma,
    )
    costs = answer(question)
    if as_json:
        click.echo(json.dumps(as_data(question, costs), indent=2))
    else:
        show(question, costs, Console(width=WIDTH, file=sys.stdout))


def answer(question: Question) -> tuple[SyncCost, ...]:
    """Every path between the two ends.

    Raises:
        RlhfsimError: tensor parallelism does not divide the heads, or a shared pool of two sizes.
    """
    train, rollout = question.train, question.rollout
    for tp in (train.tp, rollout.tp):
        question.model.check_tp(tp)
    if question.same_pool and train.gpus != rollout.gpus:
        raise RlhfsimError(
            "pools-differ",
            f"--same-pool: training fills {train.gpus} GPUs and rollout {rollout.gpus}",
            place=Place(file="command line"),
            help="choose dp so that both fill the pool",
        )
    source, target = (device_of(_pool(question, gpus)) for gpus in (train.gpus, rollout.gpus))
    ends = route(
        question.model,
        train,
        rollout,
        source=source,
        target=target,
        backend=question.backend,
        same_pool=question.same_pool,
        lora=question.lora,
        rdma=question.rdma,
    )
    return every_path(ends)


def _pool(question: Question, gpus: int) -> NodeGroup:
    """Whole nodes: the two pools may share one."""
    nodes = -(-gpus // question.gpus_per_node)
    return NodeGroup(
        profile=question.profile, gpus=nodes * question.gpus_per_node, gpus_per_node=question.gpus_per_node
    )


# --- views --------------------------------------------------------------------------------------------


def as_data(question: Question, costs: tuple[SyncCost, ...]) -> dict[str, Any]:
    """The answer as plain data; bytes, seconds and bytes per second."""
    return {
        "schema": SCHEMA,
        "model": question.model.name,
        "model_bytes": costs[0].model_bytes,
        "from": question.train.label,
        "to": question.rollout.label,
        "gpu": question.profile.name,
        "gpus_per_node": question.gpus_per_node,
        "backend": question.backend,
        "same_pool": question.same_pool,
        "paths": [_path(cost) for cost in costs],
    }


def _path(cost: SyncCost) -> dict[str, Any]:
    low, high = cost.cost.interval
    return {
        "name": cost.name,
        "path": cost.path,
        "title": cost.title,
        "available": cost.available,
        "why_not": cost.why_not,
        "seconds": cost.cost.seconds,
        "low": low,
        "high": high,
        "bytes_per_s": cost.bytes_per_s,
        "bytes_moved": cost.bytes_moved,
        "extra_train_bytes": cost.extra_train_bytes,
        "extra_rollout_bytes": cost.extra_rollout_bytes,
        "extra_host_bytes": cost.extra_host_bytes,
        "bound_by": cost.cost.bound_by if cost.cost.parts else None,
        "seconds_by_resource": cost.cost.by_resource(),
        "limits": cost.limits,
        "overlaps_with": cost.overlaps_with,
        "rests_on": list(cost.cost.rests_on),
    }


def show(question: Question, costs: tuple[SyncCost, ...], console: Console) -> None:
    """Two tables: figures, then conditions; unavailable paths are dim."""
    pool = "one shared pool" if question.same_pool else "separate pools"
    console.print(
        f"{question.model.name}: {units.format(costs[0].model_bytes, 'byte')} in BF16, "
        f"{question.train.label} -> {question.rollout.label}, {question.profile.title}, {pool}\n",
        highlight=False,
        markup=False,
    )
    console.print(_figures(costs))
    console.print(_conditions(costs))
    fastest = min((c for c in costs if c.available and c.name not in _PARTIAL), key=lambda c: c.cost.seconds)
    console.print(
        f"fastest with all weights as trained: {fastest.title}, {units.format(fastest.cost.seconds, 's')}. "
        "GB/s: bytes of the model per second. Extra GPU memory: training / rollout side.",
        highlight=False,
        markup=False,
    )


def _figures(costs: tuple[SyncCost, ...]) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("path")
    table.add_column("here", no_wrap=True)
    for name in ("seconds", "P10-P90", "GB/s", "extra GPU", "host"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for c in costs:
        low, high = c.cost.interval
        table.add_row(
            c.title,
            "yes" if c.available else "no",
            units.significant(c.cost.seconds),
            f"{units.significant(low, 2)}-{units.significant(high, 2)}",
            units.significant(c.bytes_per_s / units.GB) if c.cost.seconds else "-",
            f"{_size(c.extra_train_bytes)} / {_size(c.extra_rollout_bytes)}",
            _size(c.extra_host_bytes),
            c.cost.bound_by if c.cost.parts else "-",
            style="" if c.available else "dim",
        )
    return table


def _size(size: float) -> str:
    return units.format(size, "byte", digits=2).replace(" ", "") if size else "0"


def _conditions(costs: tuple[SyncCost, ...]) -> Table:
    table = Table(box=SIMPLE, width=WIDTH, padding=(0, 1))
    for name, ratio in (("path", 24), ("works only when", 26), ("overlaps with", 22), ("rests on", 26)):
        table.add_column(name, ratio=ratio)
    for c in costs:
        limits = Text(c.limits)
        if c.why_not:
            limits.append(f"\nnot here: {c.why_not}", style="yellow")
        rests = ", ".join(c.cost.rests_on[:_HEAVIEST]) or "nothing"
        table.add_row(c.title, limits, c.overlaps_with, rests, style="" if c.available else "dim")
    return table
