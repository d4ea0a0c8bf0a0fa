"""Where the experts of a token are."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from rlhfsim.kernels.routing import Routing, routing_of
from rlhfsim.specs.model.presets import preset

DEEPSEEK = Routing(top_k=8, groups=8, token_groups=4)


def test_two_free_choices_among_four_parts_hit_one_and_three_quarters() -> None:
    pairs = list(product(range(4), repeat=2))
    assert Routing(top_k=2).copies(4) == pytest.approx(sum(len(set(p)) for p in pairs) / len(pairs))


def test_one_part_holds_all_experts() -> None:
    for routing in (Routing(top_k=8), DEEPSEEK):
        assert routing.copies(1) == pytest.approx(1)


def test_deepseek_reaches_four_of_eight_nodes() -> None:
    """4 (1 - (3/4)^8) = 3.60 of them, where a free choice hits 5.25."""
    assert DEEPSEEK.copies(8) == pytest.approx(4 * (1 - 0.75**8))
    assert Routing(top_k=8).copies(8) == pytest.approx(8 * (1 - 0.875**8))
    assert DEEPSEEK.copies(64) == pytest.approx(32 * (1 - (31 / 32) ** 8))


def test_parts_of_two_groups_are_reached_as_counted() -> None:
    """Four nodes of two groups each: 70 ways to draw four groups, of which a node is missed by 15."""
    drawn = list(combinations(range(8), 4))
    reached = sum(len({group // 2 for group in groups}) for groups in drawn) / len(drawn)
    assert reached == pytest.approx(4 * 55 / 70)
    assert DEEPSEEK.copies(4) == pytest.approx(reached * (1 - (1 - 1 / reached) ** 8))


def test_parts_that_cut_a_group_unevenly_are_chosen_freely() -> None:
    assert DEEPSEEK.copies(3) == Routing(top_k=8).copies(3)


def test_a_model_says_its_groups() -> None:
    moe = preset("deepseek-v3").moe
    assert moe is not None
    assert routing_of(moe) == DEEPSEEK
    qwen = preset("qwen3-30b-a3b").moe
    assert qwen is not None
    assert routing_of(qwen) == Routing(top_k=8)
