"""`rlhfsim choose`: one table across kinds of GPUs, sizes, backends and frameworks."""

from __future__ import annotations

from typing import Any

from rlhfsim.cli.constraints import confidence_option, constraint_options, promise_options
from rlhfsim.cli.inputs import FRAMEWORKS, oversubscription_option, rent_option, workload_options
from rlhfsim.cli.params import Given, OneOf, Told, Words, bad_option, command, json_option, option
from rlhfsim.cli.search_progress import counted
from rlhfsim.cli.size import kinds_of, on_one_gpu, targets_on
from rlhfsim.errors import RlhfsimError
from rlhfsim.present.answers.choose import choose_page
from rlhfsim.search.request import Request
from rlhfsim.search.requirements import Requirement
from rlhfsim.specs.frameworks.runs import ANY
from rlhfsim.specs.hardware.hardware import MAX_GPUS
from rlhfsim.what_if.choose import choose as search_choose
from rlhfsim.what_if.choose import not_run, questions
from rlhfsim.what_if.risk.odds import Targets
from rlhfsim.what_if.scenarios.workers import local

EPILOG = """\b
Examples:
  rlhfsim choose --model 32b --algorithm grpo --gpu h100,h200,b200,a100-80,mi300x --gpus 8..128
  rlhfsim choose --model 8b --gpu h100,l40s --gpus 8..16 --steps 1000 --deadline 7d --budget 5kUSD
  rlhfsim choose --model 8b --gpu h100 --gpus 8..32 --framework verl --require 'step_time<60s' --json
"""


@command(EPILOG)
@option("--gpu", Words("NAME,..."), "Kinds of GPUs: names or aliases, or YAML files.", default="h100-sxm")
@option("--gpus", Words("LOW..HIGH"), "Sizes: 8..128, or one number.", default="8..64")
@option(
    "--framework", OneOf("framework", FRAMEWORKS), f"Who runs the plan: {', '.join(FRAMEWORKS)}.", default=ANY
)
@oversubscription_option
@rent_option
@workload_options
@constraint_options
@promise_options
@confidence_option
@json_option
def choose(**given: Any) -> Told:
    """Compare kinds of GPUs, sizes, frameworks and backends: step, cost, probability."""
    asked, targets = candidates(given)
    with counted("designing", len(asked)) as tick:
        wanted = Targets(requirements=targets, steps=given["steps"], confidence=given["confidence"])
        options = search_choose(asked, wanted, local(), progress=tick)
    page = choose_page(options, targets, given["steps"], given["confidence"])
    return Told(page, options[0].meets)


def candidates(given: Given) -> tuple[list[Request], tuple[Requirement, ...]]:
    """What the options ask: a question a candidate, and the targets of all.

    Raises:
        RlhfsimError: a bad value, or nothing to choose from.
    """
    least, most = _sizes(given["gpus"])
    profiles = kinds_of(given["gpu"], given["price"])
    request = on_one_gpu(given, profiles[0])  # each candidate replaces the cluster
    targets = targets_on(given, request, profiles, least)
    asked = list(questions(request, profiles, least, most))
    if not asked and (lacking := list(not_run(request, profiles))):
        raise RlhfsimError("not-run", "no framework here runs this", help="; ".join(lacking))
    if not asked:
        raise bad_option(f"--gpus {given['gpus']}: no size of these GPUs lies there", "as in --gpus 8..64")
    return asked, targets


def _sizes(text: str) -> tuple[int, int]:
    """`8..128` as two ends."""
    low, dots, high = text.partition("..")
    ends = (low.strip(), high.strip() if dots else low.strip())
    if not all(end.isdecimal() and len(end) < 7 for end in ends):
        raise bad_option(f"--gpus {text[:40]!r} is not LOW..HIGH", "as in --gpus 8..128")
    least, most = map(int, ends)
    if not 1 <= least <= most <= MAX_GPUS:
        raise bad_option(f"--gpus {text[:40]}: out of range", f"1 to {MAX_GPUS:,}, the smaller number first")
    return least, most
