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
    found = whatif(
        scenario(), Designs(planted(seconds), progress=lambda *at: heard.append(at)), tables=[table]
    )
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
    whatif(scenario(), Designs(planted(seconds)), tables=[whole])
    with pytest.raises(Killed):
        whatif(scenario(), Designs(planted(seconds), store=store, progress=killed_at), tables=[table])
    assert not table.exists()
    part = tmp_path / "points.csv.part"
    assert part.read_text().splitlines() == whole.read_text().splitlines()[: 2 + 12]
    asked = list[Request]()

    def counted(requests: Sequence[Request]) -> Iterator[tuple[int, DesignResult] | None]:
        asked.extend(requests)
        yield from planted(seconds)(requests)

    found = whatif(scenario(), Designs(counted, store=store), tables=[table])
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
    grid = {"workload.prompts": list(range(2, 60, 2))}
    whatif(small(grid=grid), Designs(planted(seconds)), tables=[tmp_path / "points.csv"])
    assert most <= sweep.KEPT + sweep.BATCH + sweep.SAMPLE + 1


def never(requests: Sequence[Request]) -> Iterator[tuple[int, DesignResult] | None]:
    raise AssertionError("a search")


def test_many_points_without_a_table_are_refused_before_a_search() -> None:
    with pytest.raises(RlhfsimError, match="25 points must be written as they come") as caught:
        whatif(scenario(), Designs(never))
    assert caught.value.code == "many-points"


def test_of_many_points_those_of_a_name_are_asked_alone(planted: Planted, tmp_path: Path) -> None:
    few = whatif(scenario(), Designs(planted(seconds)), only=["405B", "*prompts 8, gpus 1, price 1 USD/h"])
    assert [p.name for p in few.points] == ["405B", "prompts 8, gpus 1, price 1 USD/h"]
    table = tmp_path / "points.csv"
    found = whatif(scenario(), Designs(planted(seconds)), only=["*gpus 2*"], tables=[table])
    assert found.written == 12
    assert {row["cluster.node_groups.0.gpus"] for row in rows(table)[1:]} == {"2"}
    with pytest.raises(RlhfsimError, match="'406B'") as caught:
        whatif(scenario(), Designs(never), only=["*gpus*", "406B"])
    assert "405B" in str(caught.value.help)


def test_tornado_and_break_evens_are_answered_next_to_a_table(planted: Planted, tmp_path: Path) -> None:
    question = {"vary": "workload.prompts", "between": [4, 64], "of": "step_time", "target": 20}
    more = {"break_even": [question], "tornado": {"vary": {"workload.prompts": ["0.5x", "2x"]}}}
    found = whatif({**scenario(), **more}, Designs(planted(seconds)), tables=[tmp_path / "points.csv"])
    alone = {key: value for key, value in scenario().items() if key not in ("grid", "points")}
    few = whatif({**alone, **more}, Designs(planted(seconds)))
    assert (found.break_evens, found.tornado) == (few.break_evens, few.tornado)
    assert found.written == COUNT


def test_a_table_as_parquet_has_the_cells_of_the_csv(planted: Planted, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    plain, packed, alone = (tmp_path / name for name in ("points.csv", "points.parquet", "alone.parquet"))
    whatif(scenario(), Designs(planted(seconds)), tables=[packed, plain])
    whatif(scenario(), Designs(planted(seconds)), tables=[alone])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone.parquet", "points.csv", "points.parquet"]
    table = pandas.read_parquet(packed)
    assert alone.read_bytes() == packed.read_bytes()
    assert table["gpus"].dtype == "float64"  # of a point that does not fit there is none
    assert table["workload.prompts"].dtype == "float64"
    read = pandas.read_csv(plain)
    assert list(table) == list(read)
    for name in table:
        assert table[name].isna().equals(read[name].isna()), name
        assert list(table[name].dropna()) == list(read[name].dropna()), name


def test_a_sweep_that_takes_long_is_asked_about_before_it_is_written(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(requests: Sequence[Request]) -> Iterator[tuple[int, DesignResult] | None]:
        for each in planted(seconds)(requests):
            assert each is not None
            yield each[0], DesignResult(plan=each[1].plan, seconds=60.0)

    with pytest.raises(RlhfsimError, match="25 designs are left to search, about 1,500 s"):
        whatif(scenario(), Designs(slow, most_s=900.0), tables=[tmp_path / "points.csv"])
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_somebody_else_is_not_written_over(planted: Planted, tmp_path: Path) -> None:
    (tmp_path / "points.csv.part").write_text("my,own\n1,2\n")
    with pytest.raises(RlhfsimError, match="not written over"):
        whatif(scenario(), Designs(planted(seconds)), tables=[tmp_path / "points.csv"])
    assert (tmp_path / "points.csv.part").read_text() == "my,own\n1,2\n"
