"""`rlhfsim design`: choose architecture and layouts for a cluster and a model."""

from __future__ import annotations

import json
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import click

from rlhfsim.api import design as search_design
from rlhfsim.cli.design_view import design_dict, show
from rlhfsim.cli.inputs import (
    COMMAND_LINE,
    backend_option,
    build_cluster,
    build_workload,
    cluster_options,
    json_option,
    workload_options,
)
from rlhfsim.cli.view import console
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.plan import write_plan
from rlhfsim.search.request import FIXABLE_SEATS, FORBIDDABLE, SWITCHES, Request
from rlhfsim.specs.layout import Layout

EPILOG = """\b
Examples:
  rlhfsim design --gpus 64 --model 70b
  rlhfsim design --gpus 8 --gpu a100-80 --model 7b --algorithm grpo --prompts 128 --samples 8
  rlhfsim design --gpus 64 --model 70b --allow async,lora --max-staleness 2 --fix rollout.tp=8
"""
FIXABLE = {f.name for f in dataclass_fields(Layout)} - {"sequence_parallel", "offload_params"}


@click.command(epilog=EPILOG)
@cluster_options
@workload_options
@backend_option
@click.option(
    "--objective",
    type=click.Choice(["time", "cost", "memory"]),
    default="time",
    show_default=True,
    help="What is minimised.",
)
@click.option(
    "--allow",
    default="",
    help=f"Choices that change what is learnt may compete: {', '.join(SWITCHES)}.",
)
@click.option(
    "--max-staleness",
    type=float,
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
@click.option("--forbid", default="", help=f"Rule out: {', '.join([*FORBIDDABLE, *SWITCHES])}.")
@click.option(
    "--max-oom",
    type=float,
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
    request = _request(given)
    answer = search_design(request)
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
        raise RlhfsimError(
            "unknown-price",
            "no price is known for this hardware, so cost cannot be minimised",
            place=COMMAND_LINE,
            help="give --price USD_PER_GPU_HOUR",
        )
    if not 0 < given["max_oom"] < 1:
        raise RlhfsimError(
            "bad-value",
            f"--max-oom {given['max_oom']} is not a probability",
            place=COMMAND_LINE,
            help="give a number between 0 and 1",
        )
    if not 0 < given["max_staleness"] <= 64:
        raise RlhfsimError(
            "bad-value",
            f"--max-staleness {given['max_staleness']} is out of range",
            place=COMMAND_LINE,
            help="give versions, as in 1 or 4",
        )
    try:
        return Request(
            cluster=cluster, workload=workload, backend=given["backend"], objective=given["objective"], allow=_names(given["allow"]),
            forbid=_names(given["forbid"]), fix=_fixed(given["fix"]), max_staleness=given["max_staleness"], max_oom=given["max_oom"],
        )  # fmt: skip
    except RlhfsimError as error:
        raise error.at(COMMAND_LINE) from error


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _fixed(items: tuple[str, ...]) -> dict[str, dict[str, int | str]]:
    """`actor.tp=8` and `rollout.tp=4` as seat -> field -> value."""
    fixed: dict[str, dict[str, int | str]] = {}
    for item in (part for text in items for part in text.split(",")):
        name, equals, value = item.partition("=")
        seat, dot, field = name.strip().partition(".")
        if not equals or not dot:
            raise RlhfsimError(
                "bad-option",
                f"--fix {item!r} is not SEAT.FIELD=VALUE",
                place=COMMAND_LINE,
                help="write --fix actor.tp=8",
            )
        if seat not in FIXABLE_SEATS:
            raise unknown_name("role", seat, FIXABLE_SEATS, place=COMMAND_LINE)
        if field not in FIXABLE:
            raise unknown_name("layout field", field, FIXABLE, place=COMMAND_LINE)
        fixed.setdefault(seat, {})[field] = _value(field, value.strip())
    return fixed


def _value(field: str, text: str) -> int | str:
    choices = {"recompute": ("none", "selective", "full"), "offload_optimizer": ("none", "cpu")}
    if field in choices:
        if text not in choices[field]:
            raise unknown_name(field, text, choices[field], place=COMMAND_LINE)
        return text
    if not text.isdecimal() or not 0 <= int(text) <= 65536 or (int(text) == 0 and field != "zero"):
        raise RlhfsimError(
            "bad-value",
            f"--fix {field}={text} is not a whole number above 0",
            place=COMMAND_LINE,
            help=f"write --fix actor.{field}=8",
        )
    return int(text)
