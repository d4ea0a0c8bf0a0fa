"""What of the executor runs on a GPU only, and how it is seen to have run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.device_branches import places, seen
from lab.device_branches.places import Place, all_places

SOURCE = """
def host(job):
    if not device.available():
        return 0
    moved = job.move()
    return moved

def arms(job, tensor):
    kind = "bf16" if job.gpu else "fp32"
    if tensor.device.type != "cpu":
        for part in tensor:
            part.free()
    else:
        tensor.drop()
    if job.device == "cpu" or not job.gpu:
        return "host"
    return kind

def anywhere(job):
    return job.name if job.name else None
"""
EXPECTED = ["moved = job.move()", "return moved", "'bf16'", "tensor", "part.free()", "return kind"]


def test_places_are_the_branches_that_a_gpu_takes() -> None:
    assert [place.text for place in places.places(SOURCE, "made.py")] == EXPECTED


def test_the_executor_has_places_in_the_modules_that_know_the_device() -> None:
    found = {place.path for place in all_places()}
    assert {"engines/device.py", "engines/states.py", "engines/memory.py", "run.py"} <= found


@pytest.mark.parametrize(("gpu", "ran"), [(True, ["'bf16'"]), (False, [])])
def test_an_arm_of_a_conditional_expression_counts_where_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, ran: list[str]
) -> None:
    file = tmp_path / "executor" / "made.py"
    file.parent.mkdir()
    file.write_text('def precision(gpu):\n    return "bf16" if gpu else "fp32"\n')
    made: list[Place] = places.places(file.read_text(), "made.py")
    monkeypatch.setattr(seen, "ROOT", tmp_path)
    monkeypatch.setattr(seen, "all_places", lambda: made)
    recorder, names = seen.Recorder(tmp_path), dict[str, object]()
    exec(compile(file.read_text(), str(file), "exec"), names)
    before = sys.gettrace()
    sys.settrace(recorder.call)
    try:
        names["precision"](gpu)  # type: ignore[operator]
    finally:
        sys.settrace(before)
    records = [
        line for path in tmp_path.iterdir() if path.is_file() for line in path.read_text().splitlines()
    ]
    assert [record.partition("\t")[0] for record in records] == [
        place.name for place in made if place.text in ran
    ]
