"""No program of the table of attacks passes its tests, and none does any harm."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import attacks
import forgeries
import pytest
from test_sandbox import MARK, _descendants, _modes, _scratch_files

from executor.rewards.sandbox import CodeRun, Sandbox

QUICK_S = 0.2


def _programs(secret: Path, port: int) -> dict[str, CodeRun]:
    """What to run, by name."""
    names = {"secret": str(secret), "port": port, "host": os.getpid(), "mark": MARK}
    harms = {name: code.format(**names) + attacks.RIGHT for name, code in attacks.HARMS.items()}
    bombs = {name: code.replace("{{i}}", "{i}") for name, code in attacks.BOMBS.items()}
    forged = forgeries.NAMES | forgeries.TEXTS | forgeries.REPLIES
    tables = (attacks.FAKES, harms, bombs, forged)
    assert len({name for table in tables for name in table}) == sum(map(len, tables)) >= 160
    return {
        name: CodeRun(code=code, tests=tests, prefix=prefix, entry_point=entry_point, wall_s=3.0)
        for name, (code, tests, prefix, entry_point) in forged.items()
    } | {
        name: CodeRun(
            code=code,
            tests=attacks.TESTS,
            wall_s=QUICK_S if name in attacks.SPINNING else 3.0,
            memory_bytes=2**26,
        )
        for name, code in (attacks.FAKES | harms | bombs).items()
    }


def _left(before: int) -> tuple[int, list[str]]:
    """Processes and files that are left, once a worker that was killed last is gone and replaced."""
    deadline = time.monotonic() + 30
    while (left := (len(_descendants()), _scratch_files())) != (before, []) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.parametrize("mode", _modes())
def test_no_attack_passes_and_none_does_harm(mode: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("untouched")
    secret.chmod(0o644)
    tmp_path.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as listener, Sandbox(2, mode=mode) as sandbox:  # type: ignore[arg-type]
        programs = _programs(secret, listener.getsockname()[1])
        before = len(_descendants())
        outcomes = dict(zip(programs, sandbox.map(list(programs.values())), strict=True))
        assert [name for name, outcome in outcomes.items() if outcome.status == "passed"] == []
        forged = forgeries.NAMES | forgeries.TEXTS | forgeries.REPLIES
        assert [name for name in forged if outcomes[name].status == "error"] == [], "the attack itself ran"
        right = sandbox.run(CodeRun(code=attacks.RIGHT, tests=attacks.TESTS))
        assert (right.status, right.error) == ("passed", "")
        assert _left(before) == (before, [])
        listener.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("untouched", 0o644)
    assert not any(Path(folder, MARK).exists() for folder in ("/tmp", "/dev/shm"))
