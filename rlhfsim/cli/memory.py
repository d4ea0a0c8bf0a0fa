"""`rlhfsim memory`: what fills GPU memory, phase by phase, and where the peak is."""

from __future__ import annotations

from typing import Any

from rlhfsim.cli.params import Told, command
from rlhfsim.cli.planned import plan_options, planned
from rlhfsim.present.answers.memory import page

EPILOG = """\b
Examples:
  rlhfsim memory plan.json
  rlhfsim memory verl
  rlhfsim memory --gpus 64 --model 70b --architecture hybrid
"""


@command(EPILOG)
@plan_options
def memory(**given: Any) -> Told:
    """Show what fills GPU memory: every role by component, through one step.

    FILE is a plan.json, a scenario (YAML) or a shipped system (verl, openrlhf, trl, ...). Without
    FILE, options describe cluster, workload and layouts; what they leave open is
    as its framework has it where that fits, else chosen for speed.

    Exit codes: 0 it fits, 1 it does not fit, 2 bad input.
    """
    answer = planned(given)
    return Told(page(answer), answer.fits)
