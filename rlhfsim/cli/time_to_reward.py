"""`rlhfsim design --objective time-to-reward --learning FILE`: schedules by when a reward is reached."""

from __future__ import annotations

from rlhfsim.cli.params import Given, Output, Told, bad_option, check_output
from rlhfsim.plan import write_plan
from rlhfsim.present.answers.time_to_reward import reward_page
from rlhfsim.search import clock
from rlhfsim.search.request import Request
from rlhfsim.what_if.time_to_reward import TimeToReward, read_learning, time_to_reward

OBJECTIVE = "time-to-reward"
LEFT_OUT = ("run", "steps", "why_not", "gains", "pareto", "fastest", "require", "deadline", "budget")
"""Options of `design` that ask about one step or a given number of them."""


def planned_reward(request: Request, given: Given) -> Told:
    """The answer, written.

    Raises:
        RlhfsimError: no file, one that cannot be read, or options that ask something else.
    """
    if given["learning"] is None:
        raise bad_option(
            f"--objective {OBJECTIVE} needs a learning curve", "give --learning FILE (docs/budget.md)"
        )
    for name in LEFT_OUT:
        if given.get(name):
            raise bad_option(
                f"--{name.replace('_', '-')} asks about steps, --objective {OBJECTIVE} about a reward",
                "drop one of the two",
            )
    answer = rewarded(request, given)
    if answer.reached:
        check_output(given["out"], Output("plan"))
        write_plan(given["out"], answer.reached[0].plan)
    return Told(reward_page(answer), bool(answer.reached))


def rewarded(request: Request, given: Given) -> TimeToReward:
    """The answer to the file of `--learning`.

    Raises:
        RlhfsimError: a file that cannot be read.
    """
    learning, samples = read_learning(given["learning"])
    with clock.within(request.time_limit):
        return time_to_reward(request, learning, samples)
