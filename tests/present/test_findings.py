"""Titles say what planted numbers say."""

from __future__ import annotations

import pytest

from rlhfsim.present import findings, words


def test_the_longest_call_and_what_binds_it_stand_in_the_title() -> None:
    told = findings.timeline({"actor.generate": 58.0, "actor.train": 42.0}, {"actor.generate": "hbm"}, 100.0)
    assert told == "Generation takes 58 % of the 1 min 40 s step and is bound by GPU memory bandwidth"
    waits = findings.timeline({"waiting": 6.0, "actor.train": 4.0}, {}, 10.0)
    assert waits == "Waiting takes 60 % of the 10 s step"


def test_hidden_work_is_told_only_where_there_is_some() -> None:
    assert findings.overlap(100.0, 100.5) == ""
    assert findings.overlap(110.0, 100.0) == "; 10 s of other work is hidden behind the step"


def test_the_two_largest_resources_stand_in_the_title() -> None:
    assert (
        findings.resources({"hbm": 30.0, "compute": 60.0, "tail": 10.0})
        == "Arithmetic takes 60 % of the step, GPU memory bandwidth 30 %"
    )


def test_a_pool_that_overflows_says_so() -> None:
    told = findings.memory("train", 90e9, 80e9, "actor.train", "activations")
    assert (
        told == "GPUs of pool train would need 90 GB of 80 GB during training of the policy: it does not fit"
    )
    fits = findings.memory(None, 60e9, 80e9, "start", "optimizer")
    assert fits == "GPUs are fullest before the step: 75 % of 80 GB, mostly optimizer states"


def test_sizes_are_held_against_the_chosen_one() -> None:
    mine = (64, 100.0, 10.0)
    both = findings.sizes(mine, [(128, 55.0, 11.0), (32, 190.0, 9.5)], "cost")
    assert (
        both
        == "128 GPUs would be faster but dearer (-45 % time, +10 % cost); 32 GPUs would be cheaper but slower (+90 % time, -5 % cost)"
    )
    assert (
        findings.sizes(mine, [(128, 50.0, 9.0)], "cost")
        == "128 GPUs would be faster and cheaper: -50 % time, -10 % cost"
    )
    assert (
        findings.sizes(mine, [(32, 210.0, 10.5)], "cost")
        == "No other size that was tried beats 64 GPUs in time or cost"
    )


def test_the_rival_loses_where_it_takes_most_more() -> None:
    told = findings.rival("naive, roles split", 12.0, 100.0, {"actor.train": 20.0, "critic.train": -8.0})
    assert told == "Naive, roles split would take 12 % longer: training of the policy alone 20 s more"


def test_the_nearest_break_even_is_told() -> None:
    assert (
        findings.break_evens("response length", 2.5, "async")
        == "The choice turns over first with response length: at 2.5 times today's, async wins"
    )
    assert findings.break_evens(None, 1.0, "") == "Nothing that was tried makes another kind of plan the best"


def test_the_doubt_names_its_largest_source() -> None:
    assert (
        findings.sensitivity(["RL call overhead"], [0.75], 20.0, 100.0)
        == "RL call overhead makes 75 % of the doubt about the step, which is 20 % either way"
    )


@pytest.mark.parametrize(
    ("ratio", "inside", "told"),
    [
        (1.12, True, "12 % longer than predicted, inside the predicted P10 to P90"),
        (0.5, False, "50 % less than predicted, outside the predicted P10 to P90"),
        (1.004, None, "as long as predicted"),
    ],
)
def test_measured_over_predicted_in_words(ratio: float, inside: bool | None, told: str) -> None:
    assert findings.against(ratio, inside) == told


def test_the_phase_furthest_from_its_prediction_is_named_whichever_side() -> None:
    told = findings.phases({"actor.train": 1.1, "actor.generate": 0.4, "actor.sync": 1.9})
    assert told == "1 of 3 phases lie within 25 % of the prediction; generation is furthest (0.4 times)"


def test_the_longest_call_of_both_sides_is_named() -> None:
    predicted, measured = (
        {"actor.train": 5.0, "actor.generate": 3.0},
        {"actor.train": 4.0, "actor.generate": 1.0},
    )
    assert (
        findings.sides(predicted, measured)
        == "Training of the policy is the longest call on both sides: 4 s measured, 5 s predicted"
    )
    other = findings.sides({"actor.generate": 6.0, "actor.train": 1.0}, measured)
    assert other == "Training of the policy takes longest (4 s); generation was predicted to (6 s)"


def test_the_gap_names_causes_of_its_own_sign() -> None:
    told = findings.gap({"lengths": 3.0, "overhead": 1.0, "hbm": -1.0, "order": 0.0}, 10.0, 13.0)
    assert (
        told
        == "The mean step is 3 s longer than predicted, mostly from other lengths than planned (+3 s) and launches and framework (+1 s)"
    )
    assert findings.gap({"order": 0.01}, 10.0, 10.01) == "The mean step is as predicted within 1 %"


def test_points_that_win_twice_are_told_first() -> None:
    base = ("base", 10.0, 100.0)
    assert (
        findings.points(base, [("H200", 8.0, 90.0), ("more", 5.0, 120.0)], "cost")
        == "H200 is both faster and cheaper: -20 % time, -10 % cost"
    )
    told = findings.points(base, [("more", 5.0, 120.0), ("fewer", 20.0, 80.0)], "cost")
    assert (
        told
        == 'The fastest point is "more" (-50 % time, +20 % cost), the cheapest is "fewer" (+100 % time, -20 % cost)'
    )
    assert (
        findings.points(base, [("worse", 11.0, 110.0), ("none", None, None)], "cost")
        == "No point beats base in time or cost"
    )


def test_a_tornado_says_where_nothing_fits() -> None:
    assert (
        findings.tornado("time", "workload.samples", -12.34, None)
        == "Time depends most on workload.samples: -12.3 % at its low value, nothing fits at its high value"
    )


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.252, "252 ms"),
        (37.24, "37.2 s"),
        (174.3, "2 min 54 s"),
        (3599.7, "1 h"),
        (11_090.0, "3 h 5 min"),
        (180_000.0, "2.08 days"),
        (120.0, "2 min"),
    ],
)
def test_seconds_as_people_say_them(value: float, told: str) -> None:
    assert words.seconds(value) == told


@pytest.mark.parametrize(
    ("usd", "told"), [(9.29, "$9.29"), (9294.6, "$9,295"), (2.5e6, "$2.5 million"), (0.0123, "$0.012")]
)
def test_money_as_people_say_it(usd: float, told: str) -> None:
    assert words.money(usd) == told


def test_large_counts_have_names() -> None:
    assert [words.count(n) for n in (7, 2_400_000, 1_624_441_830_912_000, 1_200_000_000_000_000_000_000)] == [
        "7",
        "2.4 million",
        "1.6 quadrillion",
        "1.2e+21",
    ]


def test_numbers_stay_with_their_units() -> None:
    assert words.tied("20 % of 85 GB in 2 min 54 s") == "20\u00a0% of 85\u00a0GB in 2\u00a0min 54\u00a0s"
