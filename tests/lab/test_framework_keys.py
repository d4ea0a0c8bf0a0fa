"""Tables of keys: one row as long as a key has the same default, a new one where it changes or comes back."""

from __future__ import annotations

import json
from pathlib import Path

from lab.framework_keys import collected, rows, table


def test_rows_follow_releases_and_trainers(tmp_path: Path) -> None:
    for name, keys in {
        "verl_0.4.1_dp": {"a": 1, "b": 2},
        "verl_0.4.1_megatron": {"a": 1, "b": 3},
        "verl_0.10.0_dp": {"a": 1, "c-d": None},
        "verl_0.9.1_dp": {"a": 2},
        "verl_0.11.0.dev@1dda039_dp": {"not": "released"},
        "openrlhf_0.11.2": {"--x.y": {"default": 8}},
        "trl_1.16.0_grpo": {"beta": "0.0"},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(keys))
    found = collected(tmp_path)
    head, *lines = map(json.loads, table("verl", found["verl"], "2026-11-22").splitlines())
    assert head["releases"] == ["0.4.1", "0.9.1", "0.10.0"]
    listed = [line for line in lines if line[0] == "engine.strategy"]
    assert listed == [["engine.strategy", 1, 1, ["fsdp"]]], (
        "of the list with releases, where a schema has them"
    )
    assert [line for line in lines if line[0] in ("a", "b", "c_d")] == [
        ["a", 0, 0, [1]],
        ["a", 1, 1, [2]],
        ["a", 2, 2, [1]],
        ["b", 0, 0, [2, 3]],
        ["c_d", 2, 2, [None]],
    ]
    assert list(rows(found["openrlhf"], ["0.11.2"])) == [["x.y", 0, 0, [8]]]
    assert "dataset_name" in found["trl"].releases["1.16.0"]
    assert len(found["slime"].releases["624b824"]) > 1000
