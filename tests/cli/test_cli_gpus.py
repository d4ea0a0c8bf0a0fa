from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from rlhfsim.cli.gpus import gpus
from rlhfsim.cli.prices import prices
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.hardware.profiles import profile_names


def run(*arguments: str, columns: int = 100) -> str:
    result = CliRunner().invoke(gpus, arguments, catch_exceptions=False, env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return result.output


def data(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(*arguments, "--json"))["gpus"]
    return found


def test_every_profile_has_a_line_and_an_entry() -> None:
    text = run()
    assert [g["name"] for g in data()] == list(profile_names())
    for name in profile_names():
        assert any(line.startswith(name) for line in text.splitlines())


@pytest.mark.parametrize("columns", [100, 80])
@pytest.mark.parametrize("arguments", [(), ("h100",), ("h20",)])
def test_output_stays_within_the_terminal(arguments: tuple[str, ...], columns: int) -> None:
    assert max(map(len, run(*arguments, columns=columns).splitlines())) <= columns


def test_a_borrowed_profile_names_the_lender() -> None:
    entry = next(g for g in data() if g["name"] == "h20_sxm")
    assert entry["curves"] == "from h200_sxm"
    assert "from h200_sxm" in run()
    assert "h200_sxm" in run("h20")


def test_one_profile_shows_the_source_of_every_number() -> None:
    (entry,) = data("h100")
    assert all(fact["source"] for fact in entry["datasheet"].values())
    assert all(c["source"] and c["low"] <= c["value"] <= c["high"] for c in entry["coefficients"].values())
    text = run("h100")
    assert all(label in text for label in entry["datasheet"])


def test_an_unknown_name_suggests_a_known_one() -> None:
    with pytest.raises(RlhfsimError, match="h1000") as caught:
        run("h1000")
    assert "h100" in (caught.value.help or "")
    assert caught.value.place is not None


@pytest.mark.parametrize("columns", [100, 80, 40])
def test_no_price_is_cut(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = CliRunner().invoke(prices, []).output
    assert "\u2026" not in shown
    assert max(map(len, shown.splitlines())) <= max(60, columns)
    for gpu, markets in json.loads(CliRunner().invoke(prices, ["--json"]).output)["prices"].items():
        assert gpu in shown
        for price in markets.values():
            assert f"({price['low']:g}-{price['high']:g})" in shown
