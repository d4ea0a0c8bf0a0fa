"""The certificate: sums, and what it says about a proof."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.search.certificate import Certificate

ONE = Certificate(space=100, infeasible=40, dominated=30, bounded=25, simulated=5)


def test_a_search_that_ran_to_its_end_is_proven() -> None:
    assert ONE.proven
    assert ONE.gap == 0.0


def test_plans_that_nobody_looked_at_leave_the_optimum_unproven() -> None:
    stopped = replace(ONE, bounded=15, unexplored=10, gap=0.02)
    assert not stopped.proven


def test_two_disjoint_spaces_add_up_line_by_line_and_keep_the_larger_gap() -> None:
    other = replace(ONE, space=10, infeasible=1, dominated=2, bounded=3, simulated=1, unexplored=3, gap=0.1)
    both = ONE.plus(other)
    assert both == Certificate(
        space=110, infeasible=41, dominated=32, bounded=28, simulated=6, unexplored=3, gap=0.1
    )
    parts = both.infeasible, both.dominated, both.bounded, both.simulated, both.unexplored
    assert sum(parts) == both.space
    assert other.plus(ONE) == both
