"""Weights between a trainer and a vLLM engine on a CUDA device of the host's memory, and what breaks them."""

from __future__ import annotations

import json
from typing import Any

import programs
import pytest

pytestmark = pytest.mark.long
EXACT, SEEN = 1e-5, 0.1


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sync")
    program = str(programs.HERE / "sync.py")
    programs.run_started(program, "engine", str(folder), REHEARSAL_GPUS=f"{folder}/gpu-")
    found: dict[str, Any] = json.loads((folder / "sync.json").read_text())
    return found


@pytest.mark.parametrize(
    ("transport", "native"), [("ipc", "ipc"), ("broadcast", "nccl"), ("host", None), ("disk", None)]
)
def test_weights_reach_an_engine_that_slept(seen: Any, transport: str, native: str | None) -> None:
    found = seen[transport]
    assert found["native"] == native
    assert min(found["stale"]) > SEEN
    assert max(found["synced"]) < EXACT
    assert all(found["agree"])
    assert max(found["left"]) == 0, "the trainer has its memory back"


def test_adapters_reach_an_engine_by_ipc(seen: Any) -> None:
    assert seen["adapters"]["synced"] < EXACT
    assert 0 < seen["adapters"]["bytes"] < 10_000


def test_a_buffer_that_is_shown_before_its_bytes_are_there_is_noticed(seen: Any) -> None:
    [told] = {text.partition(":")[0] for text in seen["not waited for"].values()}
    assert told == "weight-sync-checksum"


def test_memory_that_its_owner_took_back_ends_both_ends_with_cause_and_remedy(seen: Any) -> None:
    for part in ("actor rank 0", "rollout replica 0"):
        assert seen["taken back"][part].startswith("ipc-handle-freed: ")
        assert f"{part} in actor.sync" in seen["taken back"][part]
        assert "take another weight path" in seen["taken back"][part]


def test_a_trainer_that_is_killed_in_a_sync_ends_the_engine_s_wait(seen: Any) -> None:
    assert "connection to the sender's store lost" in seen["killed"]["rollout replica 0"]


def test_an_engine_that_keeps_its_cache_asleep_is_stopped_by_its_own_readings(seen: Any) -> None:
    assert seen["keeps"].startswith("engine-keeps-memory: rollout replica 0 keeps ")
    assert "in actor.generate.unload" in seen["keeps"]
    assert "sleep level 2" in seen["keeps"]
