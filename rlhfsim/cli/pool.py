"""`rlhfsim pool`: several jobs on one cluster, which when on how many GPUs, and which of them in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlhfsim.cli.constraints import confidence_option
from rlhfsim.cli.inputs import GPU, rent_option
from rlhfsim.cli.params import (
    FILE,
    Given,
    Number,
    Output,
    Told,
    Whole,
    command,
    detail_option,
    json_option,
    on_command_line,
    option,
)
from rlhfsim.cli.search_progress import shown
from rlhfsim.outputs import cache_folder
from rlhfsim.present.answers.pool import pool_page
from rlhfsim.specs.hardware.hardware import MAX_GPUS
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.units import DAY
from rlhfsim.what_if.scenarios.designs import Designs, Store
from rlhfsim.what_if.scenarios.workers import local
from rlhfsim.what_if.shared_pool.answer import PoolAnswer, answered, priced_options, read_jobs
from rlhfsim.what_if.shared_pool.schedule import LIMIT_S

EPILOG = """\b
Examples:
  rlhfsim pool jobs/a.yaml jobs/b.yaml jobs/c.yaml --gpus 256
  rlhfsim pool jobs/a.yaml jobs/b.yaml --gpus 64 --gpu h200 --price reserved --page pool.html
"""


@command(EPILOG)
@click.argument("jobs", nargs=-1, required=True, type=FILE)
@option("--gpus", Whole(1, MAX_GPUS), "GPUs of the pool.", required=True)
@option("--gpu", GPU, "Their kind: name or alias (rlhfsim gpus), or a YAML file.", default="h100-sxm")
@rent_option
@confidence_option
@option(
    "--time-limit",
    Number(1, DAY, "s"),
    "Half of it for designs, half for the schedule; then the best so far, with its gap.",
)
@option("--page", Output("page"), "The answer also as a page that works offline.")
@detail_option
@json_option
def pool(jobs: tuple[Path, ...], **given: Any) -> Told:
    """Schedule two to sixteen jobs on one cluster: next to each other, in sequence, in turn.

    JOBS are files of one job each: workload, steps, deadline, weight (docs/budget.md).

    Exit codes: 0 every deadline is kept, 1 one is not, 2 bad input.
    """
    with shown():
        answer = pooled(jobs, given)
    return Told(pool_page(answer), answer.meets)


def pooled(jobs: tuple[Path, ...], given: Given) -> PoolAnswer:
    """The schedule of the jobs of these files.

    Raises:
        RlhfsimError: a file or a kind of GPU that cannot be read.
    """
    asked = read_jobs(jobs)
    with on_command_line():
        profile = node_group(load_profile(given["gpu"]), 1, price=given["price"]).profile
    designs = Designs(local(), Store(cache_folder("designs")))
    sure, half_s = given["confidence"], given["time_limit"] and given["time_limit"] / 2
    options = priced_options(asked, profile, given["gpus"], designs, sure, half_s)
    return answered(asked, profile, given["gpus"], options, sure, half_s or LIMIT_S)
