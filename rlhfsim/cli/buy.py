"""`rlhfsim buy`: which GPUs to buy, reserve and rent for a mix of jobs, how many, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rlhfsim.cli.constraints import confidence_option
from rlhfsim.cli.params import FILE, Output, Told, command, detail_option, json_option, option
from rlhfsim.outputs import cache_folder
from rlhfsim.present.answers.buy import purchase_page
from rlhfsim.what_if.purchase.answer import Decision, decided, priced_options
from rlhfsim.what_if.purchase.document import profiles_of, read_portfolio, terms_of
from rlhfsim.what_if.purchase.supply import JobMix
from rlhfsim.what_if.scenarios.designs import Designs, Store
from rlhfsim.what_if.scenarios.workers import local

EPILOG = """\b
Examples:
  rlhfsim buy portfolio.yaml
  rlhfsim buy portfolio.yaml --page board.html --confidence 90%
"""


@command(EPILOG)
@click.argument("portfolio", type=FILE)
@confidence_option
@option(
    "--page",
    Output("page"),
    "The answer also as a page that works offline, two sides for a board and appendices.",
)
@detail_option
@json_option
def buy(portfolio: Path, confidence: float, **_: Any) -> Told:
    """Find which GPUs to buy, reserve and rent over three years, how many and when.

    PORTFOLIO is a file of jobs, kinds of GPU and supplies (docs/budget.md).

    Exit codes: 0 the deadlines are kept, 1 they are not, 2 bad input.
    """
    answer = bought(portfolio, confidence)
    return Told(purchase_page(answer), answer.meets)


def bought(portfolio: Path, confidence: float) -> Decision:
    """What to buy for the portfolio of a file.

    Raises:
        RlhfsimError: the first thing wrong in it, with its place.
    """
    asked = read_portfolio(portfolio)
    profiles = profiles_of(asked)
    terms, designs = terms_of(asked, profiles), Designs(local(), Store(cache_folder("designs")))
    options = priced_options(asked, profiles, designs)
    return decided(JobMix(portfolio=asked, terms=terms, profiles=profiles, options=options), confidence)
