"""How many threads the processes of a run use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from executor.coordination.cluster import Reservation
from executor.coordination.worker import THREADS, Worker, WorkerIdentity


@pytest.mark.parametrize(("slots", "threads"), [(None, "1"), (8, "12"), (96, "1"), (200, "1")])
def test_a_process_has_the_cores_of_its_slot(
    slots: int | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THREADS, "1")  # as Ray does
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    Worker(WorkerIdentity(pool="all", rank=0, ranks=1, slots=slots))
    assert os.environ[THREADS] == threads


def test_slots_of_the_same_node_share_its_cores_unless_the_settings_say_how_many() -> None:
    bundles = {(0, 0): 0, (0, 1): 1, (1, 0): 0}
    reservation = Reservation(resource="GPU", groups={}, bundles=bundles)
    assert [reservation.slots(place, {}) for place in bundles] == [2, 2, 1]
    assert reservation.slots((0, 0), {THREADS: "4"}) is None


def test_a_worker_sets_its_threads_before_torch_reads_them() -> None:
    code = "import sys, executor.coordination.worker, executor.coordination.replica; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
