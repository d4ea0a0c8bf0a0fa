"""`rlhfsim design`: choose architecture and layouts for a cluster and a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from rlhfsim.api import design as search_design
from rlhfsim.cli.design_view import design_dict, show
from rlhfsim.cli.inputs import (
    backend_option,
    build_cluster,
    build_workload,
    cluster_options,
    json_option,
    on_command_line,
    workload_options,
)
from rlhfsim.cli.params import Number, OneOf, Several, bad_option
from rlhfsim.cli.seats import check_layouts, fixed_fields
from rlhfsim.cli.view import console
from rlhfsim.errors import unknown_name
from rlhfsim.plan import write_plan
from rlhfsim.search.request import FIXABLE_SEATS, FORBIDDABLE, SWITCHES, Request
from rlhfsim.specs.models import models_of

EPILOG = """\b
Examples:
  rlhfsim design --gpus 64 --model 70b
  rlhfsim design --gpus 8 --gpu a100-80 --model 7b --algorithm grpo --prompts 128 --samples 8
  rlhfsim design --gpus 64 --model 70b --allow async,lora --max-staleness 2 --fix rollout.tp=8
"""
CHOICES = {**FORBIDDABLE, **SWITCHES}


@click.command(epilog=EPILOG)
@cluster_options
@workload_options
@backend_option
@click.option(
    "--objective",
    type=OneOf("objective", ("time", "cost", "memory")),
    default="time",
    show_default=True,
    help="What is minimised: time, cost or memory.",
)
@click.option(
    "--allow",
    type=Several("switch", SWITCHES),
    default="",
    help=f"Choices that change what is learnt may compete: {', '.join(SWITCHES)}.",
)
@click.option(
    "--max-staleness",
    type=Number(1, 64),
    default=1,
    show_default=True,
    help="Most policy versions of lag with --allow async.",
)
@click.option(
    "--fix",
    multiple=True,
    metavar="SEAT.FIELD=VALUE",
    help="Fix part of a layout: actor.tp=8, rollout.tp=4.",
)
@click.option(
    "--forbid", type=Several("choice", CHOICES), default="", help=f"Rule out: {', '.join(CHOICES)}."
)
@click.option(
    "--max-oom",
    type=Number(0.001, 0.999),
    default=0.1,
    show_default=True,
    help="Largest risk of running out of memory that a plan may carry.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("plan.json"),
    show_default=True,
    help="Where the plan is written.",
)
@json_option
@click.pass_context
def design(ctx: click.Context, /, **given: Any) -> None:
    """Choose architecture and layouts for a cluster and a model."""
    answer = search_design(_request(given))
    if answer.chosen is not None:
        write_plan(given["out"], answer.chosen)
    if given["as_json"]:
        click.echo(json.dumps(design_dict(answer), indent=1))
    else:
        show(console(), answer, str(given["out"]))
    ctx.exit(0 if answer.chosen is not None else 1)


def _request(given: dict[str, Any]) -> Request:
    cluster, workload = build_cluster(given), build_workload(given)
    if given["objective"] == "cost" and any(p.profile.price is None for p in cluster.pools):
        raise bad_option(
            "no price is known for this hardware, so cost cannot be minimised",
            "give --price USD_PER_GPU_HOUR",
        )
    with on_command_line():
        request = Request(
            cluster=cluster, workload=workload, backend=given["backend"], objective=given["objective"], allow=frozenset(given["allow"]),
            forbid=frozenset(given["forbid"]), fix=_fixed(given["fix"]), max_staleness=given["max_staleness"], max_oom=given["max_oom"],
        )  # fmt: skip
        check_layouts(request, models_of(workload))
    return request


def _fixed(items: tuple[str, ...]) -> dict[str, dict[str, int | str]]:
    """`actor.tp=8` and `rollout.tp=4` as seat -> field -> value."""
    texts: dict[str, list[str]] = {}
    for item in (part for text in items for part in text.split(",")):
        name, equals, value = item.partition("=")
        seat, dot, field = name.strip().partition(".")
        if not equals or not dot:
            raise bad_option(f"--fix {item!r} is not SEAT.FIELD=VALUE", "write --fix actor.tp=8")
        if seat not in FIXABLE_SEATS:
            raise unknown_name("role", seat, FIXABLE_SEATS)
        texts.setdefault(seat, []).append(f"{field}={value}")
    return {
        seat: fixed_fields(seat, ",".join(pairs), f"--fix {seat}") for seat, pairs in texts.items()
    }
