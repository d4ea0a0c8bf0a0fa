"""What a failure is called: who, how, doing what; and what is worth another attempt."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from executor.coordination import failures
from executor.coordination.failures import PartFailed, collect, died
from executor.coordination.out_of_memory import is_out_of_memory
from rlhfsim.errors import RlhfsimError

PROCESS = """The actor died unexpectedly before finishing this task.
\tclass_name: Worker
\tpid: 4711
\tip: 10.0.0.2
The actor is dead because its worker process has died. Worker exit detail: Worker unexpectedly exits with a connection error code 2. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage."""
NODE = """The actor died unexpectedly before finishing this task.
\tpid: 4711
\tip: 10.0.0.2
The actor died because its node has died. Node Id: 0123456789abcdef"""


class _Ray:
    """Stands for Ray: refs are results, errors, or None for calls that go on."""

    def is_initialized(self) -> bool:
        return True

    looks = 0

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        self.looks += 1
        done = [ref for ref in refs if ref[1] is not None][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Any, timeout: float) -> Any:
        if isinstance(ref, list):
            return [self.get(one, timeout) for one in ref]
        if isinstance(ref[1], Exception):
            raise ref[1]
        return ref[1]


@pytest.fixture(autouse=True)
def ray_stub(monkeypatch: pytest.MonkeyPatch) -> _Ray:
    stand_in = _Ray()
    monkeypatch.setattr(failures, "ray", stand_in)
    return stand_in


def _raised(error: Exception) -> RayTaskError:
    return RayTaskError("train", "Traceback\n  line\nValueError: no", error)


def test_results_come_in_the_order_of_the_calls() -> None:
    assert collect([("a", 1), ("b", 2)], ["rank 0", "rank 1"], "train", 1.0) == [1, 2]


def test_one_look_takes_the_results_of_hundreds_of_calls(ray_stub: _Ray) -> None:
    refs = [(str(i), i) for i in range(512)]
    assert collect(refs, [f"rank {i}" for i in range(512)], "train", 60.0) == list(range(512))
    assert ray_stub.looks == 1


def test_dead_process_is_named_with_its_host_and_is_not_taken_for_out_of_memory() -> None:
    error = RayActorError(error_msg=PROCESS)
    with pytest.raises(
        PartFailed, match=r"rank 1 died in train: its process 4711 on 10.0.0.2 ended"
    ) as failure:
        collect([("a", None), ("b", error)], ["rank 0", "rank 1"], "train", 5.0)
    assert not is_out_of_memory(failure.value)


def test_lost_node_is_named() -> None:
    failure = died("rank 1", RayActorError(error_msg=NODE))
    assert str(failure) == "rank 1 died: its Ray node 01234567 on 10.0.0.2 is gone"


def test_all_parts_that_are_late_are_named() -> None:
    with pytest.raises(PartFailed, match=r"rank 0, rank 1 timed out in train: train took longer than 0 s"):
        collect([("a", None), ("b", None)], ["rank 0", "rank 1"], "train", 0.0)


def test_refused_input_stops_a_run_and_a_lost_partner_ends_only_a_life() -> None:
    refused = RlhfsimError("request-too-long", "too long")
    with pytest.raises(RlhfsimError, match="too long"):
        collect([("a", _raised(refused))], ["rank 0"], "train", 1.0)
    lost = RlhfsimError("weight-sync-failed", "connection lost")
    with pytest.raises(PartFailed, match="rank 0 raised in send: connection lost"):
        collect([("a", _raised(lost))], ["rank 0"], "send", 1.0)
