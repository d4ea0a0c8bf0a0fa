"""`python -m lab.device_branches [TEST...]`: runs tests and says which places for a GPU they ran.

Without arguments: the fast tests of the executor that ask for a device, vLLM's own weight transfer over a fake of
CUDA, and the engines on the rehearsal device. The last lines are the share, and every place that no test ran.
`--list` shows the places.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from lab.device_branches.places import ROOT, all_places
from lab.device_branches.seen import FOLDER

FAST = (
    *("check_machine", "deepspeed_config", "desk_review", "device", "device_branches", "devices", "dry_run"),
    *("engine_memory", "gpu_rehearsal", "measure", "native", "one_table", "states", "transport_packing"),
    *("vllm", "weight_route"),
)
"""Tests of tests/executor that ask for a device, but for real engines."""
TESTS = (
    (tuple(f"tests/executor/test_{name}.py" for name in FAST), "not slow and not long"),
    (("tests/executor/test_native.py", "tests/executor/test_engine_memory.py"), "slow"),
    (("tests/rehearsal",), "long or not long"),
)
"""Files and markers of a run without arguments."""
START = "from lab.device_branches import seen\nseen.begin()\n"


def _run(folder: Path, tests: list[str]) -> None:
    """The tests, with a start-up module that every Python process under them imports."""
    (folder / "start").mkdir()
    (folder / "start" / "sitecustomize.py").write_text(START, encoding="utf-8")
    (folder / "seen").mkdir()
    path = os.pathsep.join([str(folder / "start"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, FOLDER: str(folder / "seen")}
    for files, markers in [(tests, "long or not long")] if tests else TESTS:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers, *files]
        subprocess.run(command, cwd=ROOT, env=environment, check=False)


def _seen(folder: Path) -> dict[str, set[str]]:
    """Place -> tests."""
    seen = defaultdict[str, set[str]](set)
    for file in (folder / "seen").iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, test = line.partition("\t")
            seen[name].add(test)
    return seen


def main(words: list[str]) -> None:
    """Print every place with a test that runs it, then the share and the rest."""
    places = all_places()
    if words == ["--list"]:
        print("\n".join(f"{place.name}  {place.text}" for place in places))
        return
    with tempfile.TemporaryDirectory() as folder:
        _run(Path(folder), words)
        seen = _seen(Path(folder))
    for place in places:
        if tests := seen.get(place.name):
            print(f"{place.name}  {min(tests)}  ({len(tests)} in all)")
    missed = [place for place in places if place.name not in seen]
    print(f"\n{len(places) - len(missed)} of {len(places)} places ran ({1 - len(missed) / len(places):.1%})")
    for place in missed:
        print(f"never ran: {place.name}  {place.text}")


if __name__ == "__main__":
    main(sys.argv[1:])
