"""`rlhfsim buy`: what is printed and written; runs are priced by the test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from rlhfsim.cli import buy as command
from rlhfsim.errors import RlhfsimError
from rlhfsim.what_if.purchase.supply import RunOption
from rlhfsim.what_if.risk.step import DRAWS

PORTFOLIO = """
title: a small portfolio
jobs:
  - name: chat
    workload: {model: 0.5b, algorithm: grpo, reward: {rules: {}}}
    steps: 100
    runs_per_year: 4
    deadline: 7 d
gpus: [h100]
sizes: [8]
supply: [reserved, on-demand]
storage: 1000 USD
years: 1
"""


@pytest.fixture(autouse=True)
def _priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("portfolio.yaml").write_text(PORTFOLIO)
    known = RunOption(job="chat", gpu="h100_sxm", gpus=8, hours=20, in_time=1.0, drawn_h=np.full(DRAWS, 20.0))
    monkeypatch.setattr(command, "priced_options", lambda *asked: (known,))


def ask(*words: str) -> Result:
    return CliRunner().invoke(command.buy, ["portfolio.yaml", *words])


def test_the_answer_is_printed_and_written_as_a_page_for_a_board() -> None:
    result = ask("--page", "board.html")
    assert result.exit_code == 0, result.output
    assert "Rent on-demand" in result.output
    assert "Every figure with its source".lower() in result.output
    page = Path("board.html").read_text()
    assert "a small portfolio" in page
    assert 'id="cash-plot"' in page
    assert 'id="tornado-plot"' in page


def test_the_same_is_there_for_machines() -> None:
    data = json.loads(ask("--json").output)
    # 4 runs of 20 h on 8 GPUs at the listed price of H100 on demand, and 12 months of storage
    rent = data["figures"]["h100_sxm on-demand"]["value"]
    assert data["usd"]["value"] == pytest.approx(4 * 20 * 8 * rent + 12_000)
    assert data["all_in_time"] == 1
    assert len(data["cash"]) == 4
    assert all(known["source"] for known in data["figures"].values())


def test_a_portfolio_that_leaves_out_what_must_be_given_is_refused() -> None:
    Path("portfolio.yaml").write_text(PORTFOLIO.replace("storage: 1000 USD\n", ""))
    error = ask().exception
    assert isinstance(error, RlhfsimError)
    assert error.code == "missing-key"
    assert "storage" in error.message
