"""Units: read at the edge, written at the edge, and nothing else accepted."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfsim import units
from rlhfsim.errors import Place, RlhfsimError, unknown_name


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("3.35 TB/s", "byte/s", 3.35e12),
        ("400 Gbit/s", "byte/s", 50e9),
        ("400 Gbps", "byte/s", 50e9),
        ("80 GiB", "byte", 80 * 2**30),
        ("80GB", "byte", 80e9),
        ("512 KiB", "byte", 2**19),
        ("989 TFLOP/s", "flop/s", 989e12),
        ("1.979 Pflop/s", "flop/s", 1.979e15),
        ("12 us", "s", 12e-6),
        ("2 d", "s", 172800),
        ("1.5 h", "s", 5400),
        ("2.5 $/h", "usd/h", 2.5),
        ("10.2 kW", "W", 10200),
        ("1 kWh", "J", 3.6e6),
        ("8k", "token", 8192),
        ("85 %", "1", 0.85),
        ("0.85", "1", 0.85),
        (" 1e3 ", "1", 1000),
        (".5", "1", 0.5),
        ("-1", "1", -1),
    ],
)
def test_a_quantity_is_read_in_base_units(text, dimension, value):
    assert units.parse(text, dimension) == pytest.approx(value, rel=1e-15)


def test_small_units_do_not_round():
    assert units.parse("10 us", "s") == 1e-5
    assert units.parse("60 us", "s") == 6e-5
    assert units.parse("7 %", "1") == 0.07


@pytest.mark.parametrize(
    ("given_value", "dimension"),
    [
        ("3 TB", "byte/s"),
        ("3 tb/s", "byte/s"),
        ("3 s", "byte"),
        ("", "1"),
        ("fast", "1"),
        ("1 2", "1"),
        ("1,5", "1"),
        ("nan", "1"),
        ("inf", "1"),
        ("1e999", "1"),
        (math.nan, "s"),
        (math.inf, "s"),
        (10**400, "s"),
        (True, "1"),
        (None, "1"),
        ([1], "1"),
        ({}, "byte"),
    ],
)
def test_what_is_no_quantity_is_refused_with_a_hint(given_value, dimension):
    with pytest.raises(RlhfsimError) as caught:
        units.parse(given_value, dimension)
    assert caught.value.code in ("bad-quantity", "unknown-unit")
    assert (caught.value.help or "").startswith("write it like")
    assert len(str(caught.value)) < 300


@given(
    st.text(max_size=12),
    st.sampled_from(["byte", "byte/s", "flop/s", "s", "usd", "usd/h", "W", "J", "token", "1"]),
)
def test_any_text_gives_a_number_or_an_error_for_people(text, dimension):
    with suppress(RlhfsimError):
        assert math.isfinite(units.parse(text, dimension))


@pytest.mark.parametrize(
    ("text", "value", "dimension"),
    [
        ("10 us", 1e-5, "s"),
        ("10 GB/s", 1e10, "byte/s"),
        ("1 GiB", 2**30, "byte"),
        ("700 W", 700, "W"),
        ("0.3", 0.3, "1"),
        ("30 %", 0.3, "1"),
    ],
)
def test_the_unit_tells_the_dimension(text, value, dimension):
    number, found = units.parse_any(text)
    assert number == pytest.approx(value)
    assert found == dimension


@pytest.mark.parametrize("text", ["3 parsec", "", "x", "1e999", "8k"])
def test_a_unit_that_no_dimension_knows_is_refused(text):
    with pytest.raises(RlhfsimError):
        units.parse_any(text)


@pytest.mark.parametrize(
    ("value", "dimension", "text"),
    [
        (3.35e12, "byte/s", "3.35 TB/s"),
        (79.15e9, "byte", "79.2 GB"),
        (0.0123, "s", "12.3 ms"),
        (90, "s", "90 s"),
        (7200, "s", "2 h"),
        (999.9e9, "byte", "1 TB"),
        (0, "byte", "0 B"),
        (0, "1", "0"),
        (0.123456, "1", "0.123"),
        (1234567, "usd", "1,234,567 USD"),
        (-2e9, "byte", "-2 GB"),
        (3.6e6, "J", "1 kWh"),
        (4.2e-7, "s", "420 ns"),
        (1024, "token", "1,024 tokens"),
    ],
)
def test_a_quantity_is_written_for_people(value, dimension, text):
    assert units.format(value, dimension) == text


@given(st.floats(1e-8, 1e19), st.sampled_from(["byte", "byte/s", "flop/s", "s", "W", "J"]), st.integers(3, 9))
def test_what_is_written_reads_back_within_its_digits(value, dimension, digits):
    text = units.format(value, dimension, digits=digits)
    smallest = 1 if dimension != "s" else 1e-9
    if value >= smallest:
        assert units.parse(text.replace(",", ""), dimension) == pytest.approx(value, rel=10 ** (1 - digits))


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0, 3, "0"),
        (1234.5, 3, "1,234"),
        (0.00012345, 2, "0.00012"),
        (9.999, 3, "10"),
        (100, 3, "100"),
        (-math.inf, 3, "-inf"),
    ],
)
def test_significant_digits(value, digits, text):
    assert units.significant(value, digits) == text


def test_an_error_shows_file_line_and_remedy():
    place = Place(file="plan.yaml", line=14, column=7, text="  tp: 16")
    error = RlhfsimError("tp-too-wide", "tensor parallelism 16 exceeds 8", help="use 8").at(place)
    assert str(error) == (
        "error[tp-too-wide]: tensor parallelism 16 exceeds 8\n  --> plan.yaml:14:7\n"
        "14 |   tp: 16\n          ^\nhelp: use 8".replace("          ^", " " * 11 + "^")
    )
    assert error.at(Place(file="other")).place == place


def test_an_unknown_name_lists_near_ones_or_all():
    assert unknown_name("gpu", "h10", ["h100", "l4"]).help == "did you mean h100"
    assert unknown_name("gpu", "zzzzzz", ["h100", "l4"]).help == "known: h100, l4"
