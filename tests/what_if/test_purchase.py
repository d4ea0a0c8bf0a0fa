"""A purchase over three years: three cases worked by hand, deadlines in draws, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.units import DAY, HOUR
from rlhfsim.what_if.purchase.answer import Decision, decided
from rlhfsim.what_if.purchase.deadlines import _Pool
from rlhfsim.what_if.purchase.document import (
    Portfolio,
    PortfolioJob,
    profiles_of,
    read_portfolio,
    resale_share,
    shipped,
    terms_of,
)
from rlhfsim.what_if.purchase.supply import JobMix, RunOption, purchase
from rlhfsim.what_if.risk.step import DRAWS

WORK = Workload(algorithm="grpo", model="0.5b", reward=Reward(rules=Rules()))


def sure(value: float) -> Coefficient:
    return Coefficient(value=value, low=value, high=value, source="this test")


FIGURES = {
    "network": sure(4000),  # USD a GPU
    "power": sure(0.1),  # USD a kWh
    "pue": sure(1.2),
    "colocation": sure(150),  # USD a kW and month
    "salary": sure(200_000),
    "nodes_per_engineer": sure(100),
    "lead_time": sure(0),
}


def portfolio(runs: float, *supply: Any, growth: float = 0.0, **more: Any) -> Portfolio:
    job = PortfolioJob(
        name="chat", workload=WORK, steps=100, runs_per_year=runs, growth=sure(growth), deadline=30 * DAY
    )
    prices = {"h100": {"bought": sure(40_000), "reserved": sure(2), "on-demand": sure(3), "spot": sure(1)}}
    return Portfolio(
        jobs=(job,),
        gpus=("h100",),
        sizes=(8,),
        supply=supply or ("bought", "reserved", "on-demand", "spot"),
        engineers=1,
        maintenance=0.05,
        storage=1000,
        spot_goodput=0.5,
        figures=FIGURES,
        prices=prices,
        **more,
    )


def option(hours: float, gpus: int = 8, spread: float = 0.0) -> RunOption:
    drawn = hours * np.exp(spread * np.linspace(-2, 2, DRAWS))
    return RunOption(job="chat", gpu="h100_sxm", gpus=gpus, hours=hours, in_time=1.0, drawn_h=drawn)


def mix(asked: Portfolio, options: tuple[RunOption, ...]) -> JobMix:
    profiles = profiles_of(asked)
    return JobMix(portfolio=asked, terms=terms_of(asked, profiles), profiles=profiles, options=options)


def solved(asked: Portfolio, *options: RunOption, **more: Any) -> Any:
    return purchase(mix(asked, options), **more)


# --- three cases by hand ------------------------------------------------------------------------------


def test_a_cluster_that_is_always_busy_is_bought_as_worked_out_by_hand() -> None:
    # A run takes 1,000 h on a node of 8, so a node does 2.1915 runs a quarter (365.25 x 24 / 4 = 2,191.5 h).
    # 35 runs a year are 8.75 a quarter: 8.75 / 2.1915 = 3.99, so 4 nodes, bought in the first quarter.
    # On demand the same 105 runs x 8,000 GPU-hours x 3 USD would be 2,520,000 USD.
    found = solved(portfolio(35, "bought", "on-demand"), option(1000))
    assert found.bought == {"h100_sxm": (4, *[0] * 11)}
    servers = 4 * 8 * 40_000  # 1,280,000 USD
    network = 4 * 8 * 4_000  # 128,000
    resale = -0.30 * servers  # after three years: -384,000
    # draw: 8 x 700 W x 0.8 + 4,600 W of the server = 9.08 kW; with PUE 1.2 and 26,298 h at 0.1 USD/kWh
    power = 4 * 9.08 * 1.2 * 26_298 * 0.1  # 114,617
    # space for the most that a node draws: 8 x 700 W + 4,600 W = 10.2 kW, 36 months at 150 USD
    colocation = 4 * 10.2 * 36 * 150  # 220,320
    maintenance = 0.05 * 3 * servers  # 192,000
    staff = 3 * 200_000 * (1 + 4 / 100)  # one engineer, and a hundredth a node: 624,000
    storage = 36 * 1_000  # 36,000
    by_hand = servers + network + resale + power + colocation + maintenance + staff + storage
    assert by_hand == pytest.approx(2_210_937, rel=1e-3)
    assert found.usd == pytest.approx(by_hand, rel=0.01)
    assert found.by_item["power"] == pytest.approx(power, rel=0.01)
    assert found.by_item["colocation"] == pytest.approx(colocation, rel=0.01)


def test_a_few_runs_are_rented_as_worked_out_by_hand() -> None:
    # 4 runs a year of 100 h on 8 GPUs: 12 runs in three years, 9,600 GPU-hours.
    # On demand: 9,600 x 3 = 28,800 USD. Spot makes progress half of the time: 9,600 / 0.5 x 1 = 19,200 USD.
    # A node reserved for a year costs 8 x 8,766 h x 2 = 140,256 USD, a node alone 320,000. So spot.
    # Storage: 36 months at 1,000 USD.
    found = solved(portfolio(4), option(100))
    assert (found.bought, found.reserved) == ({}, {})
    assert found.usd == pytest.approx(19_200 + 36_000, rel=0.01)
    without = solved(portfolio(4, "bought", "reserved", "on-demand"), option(100))
    assert without.usd == pytest.approx(28_800 + 36_000, rel=0.01)


def test_growth_is_met_with_reservations_as_worked_out_by_hand() -> None:
    # 8 runs in the first year, each 1,000 h on 8 GPUs: 2 a quarter, 2,000 of 2,191.5 h of one node.
    # They double every year: 4 and 8 runs a quarter, 1.83 and 3.65 nodes. A node reserved for a year costs
    # 8 x 8,766 h x 2 USD = 140,256 USD, for a quarter 35,064.
    # Third year: three nodes do 3 x 2,191.5 = 6,574.5 of 8,000 h; the other 1,425.5 h of 8 GPUs on demand cost
    # 1,425.5 x 8 x 3 = 34,212 USD a quarter, less than a fourth node.
    # Second year: one node and 4,000 - 2,191.5 = 1,808.5 h would cost 43,404 a quarter, so two nodes.
    found = solved(portfolio(8, "reserved", "on-demand", growth=1.0), option(1000))
    assert [found.nodes("h100_sxm", q) for q in (0, 3, 4, 7, 8, 11)] == [1, 1, 2, 2, 3, 3]
    assert found.by_item["reserved"] == pytest.approx((1 + 2 + 3) * 140_256, rel=0.01)
    assert found.by_item["on-demand"] == pytest.approx(4 * 34_212, rel=0.01)
    assert found.usd == pytest.approx(841_536 + 136_848 + 36_000, rel=0.01)


# --- more -----------------------------------------------------------------------------------------------


def test_nothing_arrives_before_its_lead_time() -> None:
    slow = {**FIGURES, "lead_time": sure(200 * DAY)}
    found = solved(replace(portfolio(35, "bought", "on-demand"), figures=slow), option(1000))
    assert found.bought["h100_sxm"][:3] == (0, 0, 0)
    assert sum(found.bought["h100_sxm"]) == 4


def test_a_run_needs_all_its_gpus_at_once() -> None:
    found = solved(portfolio(1, "bought"), option(100, gpus=24))
    assert sum(found.bought["h100_sxm"]) == 3


def test_without_any_supply_that_could_serve_there_is_no_purchase() -> None:
    slow = {**FIGURES, "lead_time": sure(200 * DAY)}
    assert solved(replace(portfolio(35, "bought"), figures=slow), option(1000)) is None


def test_a_resale_lies_between_whole_years() -> None:
    terms = terms_of(asked := portfolio(1), profiles_of(asked))
    assert resale_share(terms, 0) == 1
    assert resale_share(terms, 3) == pytest.approx(0.30)
    assert 0.45 < resale_share(terms, 1.5) < 0.65


def test_every_shipped_figure_has_a_range_and_a_source() -> None:
    table = shipped()
    for known in (*table.purchase.values(), *table.resale.values(), *table.figures.values()):
        assert known.low < known.value < known.high or known.low < known.high
        assert len(known.source) > 20


YAML = """
jobs:
  - {name: chat, workload: {model: 0.5b, algorithm: grpo, reward: {rules: {}}}, steps: 100, runs_per_year: 4, deadline: 7 d}
gpus: [h100]
sizes: [8]
storage: 0 USD
"""


def test_what_no_source_says_must_be_given(tmp_path: Path) -> None:
    path = tmp_path / "portfolio.yaml"
    path.write_text(YAML)
    with pytest.raises(RlhfsimError, match="engineers"):
        read_portfolio(path)
    path.write_text(YAML + "supply: [reserved, on-demand]\n")
    assert read_portfolio(path).jobs[0].deadline == 7 * 24 * HOUR


def test_an_unknown_figure_is_refused_with_the_known_ones() -> None:
    asked = replace(portfolio(1), figures={"electricity": sure(1)})
    with pytest.raises(RlhfsimError, match="electricity"):
        terms_of(asked, profiles_of(asked))


# --- deadlines ------------------------------------------------------------------------------------------


def decision(asked: Portfolio, *options: RunOption) -> Decision:
    return decided(mix(asked, options), 0.8)


def test_runs_that_fit_one_after_the_other_are_all_in_time() -> None:
    found = decision(portfolio(4, "reserved"), option(100))  # a run a quarter, 100 of 2,191 h
    assert found.punctual is not None
    assert found.punctual.all_in_time == 1
    assert found.meets


def test_runs_that_wait_past_their_deadline_are_late_and_more_gpus_are_reserved() -> None:
    # 16 runs a year of 500 h are 4 a quarter, 2,000 of 2,191 h: one node would do, but a run of 690 h in a
    # bad draw makes the next ones wait beyond their 30 days (720 h)
    found = decision(portfolio(16, "reserved"), option(500, spread=0.16))
    assert found.chosen is not None
    assert found.chosen.nodes("h100_sxm", 0) > 1
    assert found.meets


def test_a_job_that_no_size_finishes_in_time_is_named() -> None:
    found = decision(portfolio(4), replace(option(2000), in_time=0.1))
    assert (found.unserved, found.chosen, found.meets) == (("chat",), None, False)


def test_buying_is_compared_only_where_something_would_be_bought() -> None:
    few = decision(portfolio(4, "bought", "reserved", "on-demand"), option(100))  # renting costs least
    assert set(few.instead) == {"all reserved", "all on demand"}
    many = decision(portfolio(400, "bought", "reserved", "on-demand"), option(100))
    assert many.instead["all bought"].bought


def test_the_widest_swing_comes_first_and_makes_the_cost_as_wide() -> None:
    wide = Coefficient(value=2, low=1, high=4, source="this test")
    asked = portfolio(8, "reserved")
    asked = replace(asked, prices={"h100": {"reserved": wide}})
    found = decision(asked, option(100))
    assert found.swings[0].name == "h100_sxm reserved"
    low, middle, high = found.usd
    rent = 3 * 140_256  # one node for three years at 2 USD
    assert middle == pytest.approx(rent + 36_000, rel=0.01)
    assert (low, high) == (
        pytest.approx(rent / 2 + 36_000, rel=0.01),
        pytest.approx(2 * rent + 36_000, rel=0.01),
    )


def test_a_pool_serves_in_order_and_waits_for_gpus() -> None:
    pool = _Pool([8] * 4)
    pool.run(pool.start(0, 8), 100, 8)
    assert pool.start(10, 4) == 100
    pool.run(100, 50, 4)
    assert pool.start(110, 4) == 110
    assert pool.start(110, 8) == 150
    assert pool.start(0, 16) == float("inf")
