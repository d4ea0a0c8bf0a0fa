from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.coordination import checkpoints, manifest
from executor.coordination.checkpoints import (
    Checkpoint,
    RunIdentity,
    RunProgress,
    begin,
    check_resumable,
    differences,
    identity,
    newest,
)
from rlhfsim.api import estimate_file
from rlhfsim.errors import RlhfsimError

WHOSE = RunIdentity(
    plan_hash="aaaa",
    settings_hash="s",
    world={"actor": {"ranks": 2, "dp": 2, "zero": 2}},
    inputs={"workload": {"prompts": 8}},
)


def progress(iteration: int) -> RunProgress:
    return RunProgress(
        iteration=iteration,
        weight_version=iteration,
        data_position={"epoch": 0, "next": 8 * iteration},
        rng={"data": np.random.default_rng(iteration).bit_generator.state},
        metrics=tuple({"step": float(i), "reward/mean": 0.5} for i in range(min(iteration, 9))),
    )


def two_ranks(folder: Path, size: int = 1000) -> None:
    for rank in range(2):
        (folder / "actor" / f"rank-{rank}.bin").write_bytes(os.urandom(size))


def save(*asked: Any) -> Checkpoint:
    """Begun and finished."""
    return begin(*asked)()


def saved(root: Path, *iterations: int, keep: int = 9) -> None:
    for iteration in iterations:
        save(root, progress(iteration), WHOSE, two_ranks, keep)


def loaded(root: Path) -> Checkpoint:
    found = newest(root)
    assert found is not None
    return found


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved(tmp_path, 12)
    found = loaded(tmp_path)
    assert found.folder == tmp_path / "step-000012"
    assert (found.progress, found.identity) == (progress(12), WHOSE)


def test_the_random_stream_goes_on_where_it_stood(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rng.random(100)
    state = replace(progress(1), rng={"data": rng.bit_generator.state})
    save(tmp_path, state, WHOSE, two_ranks, 1)
    found = loaded(tmp_path)
    again = np.random.default_rng(0)
    again.bit_generator.state = found.progress.rng["data"]
    assert again.random(5).tolist() == rng.random(5).tolist()


def test_the_newest_counts_by_number_and_not_by_name(tmp_path: Path) -> None:
    saved(tmp_path, 999_999, 1_000_000)
    assert loaded(tmp_path).progress.iteration == 1_000_000


def test_nothing_saved_is_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None


def test_only_the_newest_ones_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def test_a_broken_one_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-000002" / "manifest.json").unlink()
    saved(tmp_path, 3, keep=2)
    assert (tmp_path / "step-000001").is_dir()
    saved(tmp_path, 4, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000003", "step-000004"]


def _shorten(folder: Path) -> None:
    (folder / "actor" / "rank-1.bin").write_bytes(b"x")


def _break_even(folder: Path) -> None:
    path = folder / "actor" / "rank-0.bin"
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


def _spoil_state(folder: Path) -> None:
    (folder / "state.json").write_text("{}")
    manifest.write_manifest(folder)


ENDLESS = '{"files": {"state.json": {"bytes": 1e999, "sha256": "x"}}}'


def _pipe(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def _state_of_words(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    state["progress"]["iteration"] = "many"
    (folder / "state.json").write_text(json.dumps(state))
    manifest.write_manifest(folder)


def _metrics_of_words(folder: Path) -> None:
    state = json.loads((folder / "state.json").read_text())
    state["progress"]["metrics"] = [{"reward/mean": "0.5"}]
    (folder / "state.json").write_text(json.dumps(state))
    manifest.write_manifest(folder)


def _deep_state(folder: Path) -> None:
    (folder / "state.json").write_text("[" * 100_000)
    manifest.write_manifest(folder)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: (f / "manifest.json").write_text('{"files": {'), "manifest.json cannot be read"),
        (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
        (lambda f: (f / "actor" / "rank-0.bin").unlink(), "actor/rank-0.bin is missing"),
        (lambda f: (f / "state.json").unlink(), "state.json is missing"),
        (_shorten, "actor/rank-1.bin has 1 bytes, not 1,000"),
        (_break_even, "actor/rank-0.bin has another checksum"),
        (_spoil_state, "state.json cannot be read"),
        (lambda f: (f / "manifest.json").write_text("[" * 100_000), "manifest.json cannot be read"),
        (lambda f: (f / "manifest.json").write_text(ENDLESS), "manifest.json cannot be read"),
        (_pipe, "manifest.json: cannot read the file: not a regular file"),
        (_state_of_words, "state.json: 'iteration'"),
        (_metrics_of_words, "state.json cannot be read: TypeError a metric is not a number"),
        (_deep_state, "state.json cannot be read: RecursionError"),
    ],
)
def test_a_broken_checkpoint_is_skipped_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil, words: str
) -> None:
    saved(tmp_path, 1, 2)
    spoil(tmp_path / "step-000002")
    with caplog.at_level(logging.WARNING):
        found = loaded(tmp_path)
    assert found.progress.iteration == 1
    assert "step-000002" in caplog.text
    assert words in caplog.text


def test_a_save_takes_the_place_of_a_broken_one(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    _break_even(tmp_path / "step-000002")
    saved(tmp_path, 2)
    assert loaded(tmp_path).progress.iteration == 2


def test_a_whole_one_of_the_same_iteration_is_not_written_again(tmp_path: Path) -> None:
    saved(tmp_path, 2)

    def never(folder: Path) -> None:
        raise AssertionError

    assert save(tmp_path, progress(2), WHOSE, never, 1).progress == progress(2)


def test_numpy_numbers_in_the_state_become_plain(tmp_path: Path) -> None:
    state = replace(progress(1), data_position={"next": np.int64(4), "order": np.arange(3)})
    save(tmp_path, state, WHOSE, two_ranks, 1)
    assert loaded(tmp_path).progress.data_position == {"next": 4, "order": [0, 1, 2]}


def test_a_full_disk_is_said_and_the_older_checkpoint_remains(tmp_path: Path) -> None:
    saved(tmp_path, 1)

    def full(folder: Path) -> None:
        two_ranks(folder)
        with Path("/dev/full").open("wb") as file:
            file.write(b"x" * 100_000)

    with pytest.raises(RlhfsimError, match="iteration 2: no space left on device") as caught:
        save(tmp_path, progress(2), WHOSE, full, 1)
    assert caught.value.code == "checkpoint-not-written"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert newest(tmp_path) is not None


def test_a_full_disk_of_a_worker_is_recognised_by_its_message(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise RuntimeError("actor rank 1 raised: OSError: [Errno 28] No space left on device")

    with pytest.raises(RlhfsimError, match="no space left"):
        save(tmp_path, progress(2), WHOSE, full, 1)


def test_torch_on_a_full_disk_is_recognised(tmp_path: Path) -> None:
    import torch

    def full(folder: Path) -> None:
        (folder / "actor" / "rank-0.pt").symlink_to("/dev/full")
        torch.save({"weights": torch.zeros(10**5)}, folder / "actor" / "rank-0.pt")

    with pytest.raises(RlhfsimError, match="could not be written whole"):
        save(tmp_path, progress(2), WHOSE, full, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_failing_worker_leaves_nothing_and_its_error_goes_on(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        two_ranks(folder)
        raise KeyError("worker")

    with pytest.raises(KeyError):
        save(tmp_path, progress(2), WHOSE, fail, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_wrote_nothing_is_noticed(tmp_path: Path) -> None:
    def one(folder: Path) -> None:
        (folder / "actor" / "rank-0.bin").write_bytes(b"x")

    with pytest.raises(RlhfsimError, match="actor wrote 1 files for 2 ranks"):
        save(tmp_path, progress(2), WHOSE, one, 1)


# --- kill -------------------------------------------------------------------------------------------


def _save_for_ever(root: Path, first: int) -> None:
    for iteration in range(first, first + 10_000):
        save(root, progress(iteration), WHOSE, lambda f: two_ranks(f, 200_000), 2)
        (root / "confirmed").write_text(str(iteration))


def test_a_kill_at_any_moment_loses_at_most_the_checkpoint_being_written(tmp_path: Path) -> None:
    rng = random.Random(7)
    context = multiprocessing.get_context("fork")
    latest, leftovers = 0, 0
    for _ in range(60):
        process = context.Process(target=_save_for_ever, args=(tmp_path, latest + 1))
        process.start()
        time.sleep(rng.uniform(0.0, 0.08))
        process.kill()
        process.join()
        leftovers += sum(p.name.startswith(checkpoints.LEFTOVER) for p in tmp_path.iterdir())
        note = tmp_path / "confirmed"
        confirmed = int(note.read_text() or 0) if note.exists() else 0
        found = newest(tmp_path)
        reached = found.progress.iteration if found else 0
        assert reached >= confirmed
        latest = max(latest, reached)
    assert latest > 0
    assert leftovers > 0, "no kill hit a save"
    save(tmp_path, progress(10**6), WHOSE, two_ranks, 2)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(checkpoints.LEFTOVER)]
    assert len(list(tmp_path.glob("step-*"))) == 2


# --- whose ------------------------------------------------------------------------------------------


def test_a_checkpoint_of_the_same_run_is_taken(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    check_resumable(loaded(tmp_path), WHOSE)


def test_another_plan_is_refused_by_what_differs(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    found = loaded(tmp_path)
    other = replace(WHOSE, plan_hash="bbbb", inputs={"workload": {"prompts": 16}})
    with pytest.raises(RlhfsimError, match=r"other inputs of the plan: workload\.prompts was 8, is 16"):
        check_resumable(found, other)


def test_other_ranks_are_refused_by_what_differs(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    found = loaded(tmp_path)
    other = replace(WHOSE, world={"actor": {"ranks": 4, "dp": 2, "tp": 2, "zero": 2}})
    with pytest.raises(RlhfsimError, match=r"other ranks: actor\.ranks was 2, is 4; actor\.tp was"):
        check_resumable(found, other, other_plan=True)


def test_other_data_parallel_ranks_fit_where_nothing_else_is_split(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    found = loaded(tmp_path)
    check_resumable(found, replace(WHOSE, world={"actor": {"ranks": 4, "dp": 4, "zero": 2}}), other_plan=True)
    with pytest.raises(RlhfsimError, match=r"other ranks: actor\.zero was 2, is 3"):
        check_resumable(found, replace(WHOSE, world={"actor": {"ranks": 2, "dp": 2, "zero": 3}}))


def test_other_settings_are_only_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 1)
    found = loaded(tmp_path)
    with caplog.at_level(logging.WARNING):
        check_resumable(found, replace(WHOSE, settings_hash="t"))
    assert "settings differ" in caplog.text


def test_many_differences_are_counted() -> None:
    found = differences({str(i): i for i in range(9)}, {str(i): -i for i in range(9)})
    assert (found[0], found[-1], len(found)) == ("1 was 1, is -1", "3 more", 6)


def test_the_identity_of_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = estimate_file("xtuner-rlhf")
    whose = identity(plan, "s")
    assert whose.world["actor"]["ranks"] == plan.placement.actor.layout.gpus

    def write(folder: Path) -> None:
        for role, shape in whose.world.items():
            for rank in range(shape["ranks"]):
                (folder / role / f"rank-{rank}.bin").write_bytes(b"x")

    save(tmp_path, progress(1), whose, write, 1)
    check_resumable(loaded(tmp_path), identity(plan, "s"))
