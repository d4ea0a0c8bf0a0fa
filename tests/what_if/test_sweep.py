"""Scenarios of many points: a table that grows, the same after a kill, and memory that does not grow with it."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_scenarios import small

from rlhfsim.errors import RlhfsimError
from rlhfsim.search.request import Request
from rlhfsim.what_if.scenarios import answer as module
from rlhfsim.what_if.scenarios import designs, points, sweep
from rlhfsim.what_if.scenarios.answer import whatif
from rlhfsim.what_if.scenarios.designs import DesignResult, Designs, Runner, Store

Planted = Callable[[Callable[[Request], float | None]], Runner]
GRID: dict[str, Any] = {
    "workload.prompts": [8, 16, 32],
    "cluster.node_groups.0.gpus": [1, 2],
    "cluster.node_groups.0.price": ["1 USD/h", "2 USD/h", "3 USD/h", "4 USD/h"],
}
COUNT = 25
"""Points of the grid, and a named one."""


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many points are more than three, in batches of four."""
    for name in (module, points):
        monkeypatch.setattr(name, "MAX_POINTS", 3)
    monkeypatch.setattr(sweep, "BATCH", 4)
    monkeypatch.setattr(sweep, "KEPT", 2)


def scenario() -> dict[str, Any]:
    return small(grid=GRID, points=[{"name": "405B", "set": {"workload.model": "405b"}}])


def seconds(request: Request) -> float | None:
    """Fits but for one model; more prompts take longer, more GPUs less long."""
    work = request.workload
    return None if work.model == "405b" else work.prompts / request.cluster.gpus**0.5


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_points_are_in_the_table_and_the_best_in_the_answer(planted: Planted, tmp_path: Path) -> None:
    table, heard = tmp_path / "points.csv", list[tuple[int, int]]()
    found = whatif(scenario(), runner=planted(seconds), table=table, progress=lambda *at: heard.append(at))
    written = rows(table)
    assert found.written == COUNT
    assert len(written) == COUNT + 1
    assert written[0]["name"] == "base"
    assert len({row["name"] for row in written}) == COUNT + 1
    assert [row["shortage"] for row in written if row["name"] == "405B"] == ["too large"]
    last = written[-1]
    assert (last["workload.prompts"], last["gpus"], last["cluster.node_groups.0.price"]) == ("32", "2", "4.0")
    assert float(last["step_s"]) == pytest.approx(32 / 2**0.5)
    assert "on_front" not in last
    # of the base's 16 prompts: one GPU at 1 USD/h is cheapest, two are faster
    best = [[p.changes[f"cluster.node_groups.0.{name}"] for name in ("gpus", "price")] for p in found.points]
    assert best == [[1, 1.0], [2, 1.0]]
    assert "25 points, 24 with a plan that fits, 16 of other work" in found.notes[0]
    assert heard[-1] == (COUNT, COUNT)
    assert [p.name for p in tmp_path.iterdir()] == ["points.csv"]


def test_a_killed_sweep_leaves_what_came_and_the_next_writes_the_same_bytes(
    planted: Planted, tmp_path: Path
) -> None:
    class Killed(BaseException):
        pass

    def killed_at(done: int, _: int) -> None:
        if done >= 12:
            raise Killed

    whole, table, store = tmp_path / "whole.csv", tmp_path / "points.csv", Store(tmp_path / "designs")
    whatif(scenario(), runner=planted(seconds), table=whole)
    with pytest.raises(Killed):
        whatif(scenario(), runner=planted(seconds), table=table, store=store, progress=killed_at)
    assert not table.exists()
    part = tmp_path / "points.csv.part"
    assert part.read_text().splitlines() == whole.read_text().splitlines()[: 2 + 12]
    asked = list[Request]()

    def counted(requests: Sequence[Request]) -> Iterator[tuple[int, DesignResult] | None]:
        asked.extend(requests)
        yield from planted(seconds)(requests)

    found = whatif(scenario(), runner=counted, table=table, store=store)
    assert table.read_bytes() == whole.read_bytes()
    assert not part.exists()
    assert found.provenance.from_cache > 0
    assert len(asked) < 7  # of eight designs


def test_designs_in_memory_do_not_grow_with_the_points(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, ensure = 0, Designs.ensure

    def watched(self: Designs, requests: Sequence[Request]) -> None:
        nonlocal most
        ensure(self, requests)
        most = max(most, len(self.known))

    monkeypatch.setattr(designs.Designs, "ensure", watched)
    grid = {"workload.prompts": list(range(2, 200, 2))}
    whatif(small(grid=grid), runner=planted(seconds), table=tmp_path / "points.csv")
    assert most <= sweep.KEPT + sweep.BATCH + sweep.SAMPLE + 1


@pytest.mark.parametrize(
    ("more", "options", "reason"),
    [
        ({}, {"table": None}, "must be written as they come"),
        ({}, {"only": ["405B"]}, "not chosen by --only"),
        ({"tornado": {"vary": {"run.steps": [1, 2]}}}, {}, "without break_even and tornado"),
    ],
)
def test_what_many_points_cannot_have_is_refused_before_a_search(
    more: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    def never(requests: Sequence[Request]) -> Iterator[tuple[int, DesignResult] | None]:
        raise AssertionError(requests)

    options = {"table": tmp_path / "points.csv", **options}
    with pytest.raises(RlhfsimError, match=reason) as caught:
        whatif({**scenario(), **more}, runner=never, **options)
    assert caught.value.code == "many-points"
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_takes_long_is_asked_about_before_it_is_written(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(requests: Sequence[Request]) -> Iterator[tuple[int, DesignResult] | None]:
        for each in planted(seconds)(requests):
            assert each is not None
            yield each[0], DesignResult(plan=each[1].plan, seconds=60.0)

    with pytest.raises(RlhfsimError, match="25 designs are left to search, about 1,500 s"):
        whatif(scenario(), runner=slow, table=tmp_path / "points.csv", most_s=900.0)
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_somebody_else_is_not_written_over(planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "points.csv.part").write_text("my,own\n1,2\n")
    with pytest.raises(RlhfsimError, match="not written over"):
        whatif(scenario(), runner=planted(seconds), table=tmp_path / "points.csv")
    assert (tmp_path / "points.csv.part").read_text() == "my,own\n1,2\n"
