"""Commands without a reader, a disk, a folder, a home or patience: one line, and the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.outputs import cache_folder

MODULE = (sys.executable, "-m", "rlhfsim")
STOPPED = """
import os, signal, sys
import rlhfsim.__main__ as entry

class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts with `&`
sys.meta_path.insert(0, Pressed())
entry.main()
"""


def ended(shell: str, folder: Path, **env: str) -> tuple[int, list[str]]:
    """Exit code and lines of standard error."""
    found = subprocess.run(["bash", "-c", shell], cwd=folder, env={**os.environ, **env}, capture_output=True)
    return found.returncode, found.stderr.decode().splitlines()


def test_a_reader_that_leaves_is_no_failure(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    for words in (["models"], ["models", "--json"]):  # Rich and click have answers of their own: exit code 1
        found = subprocess.run([*MODULE, *words], cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE)
        assert (found.returncode, found.stderr) == (0, b"")
    os.close(writing)


@pytest.mark.parametrize(
    ("shell", "said"),
    [
        ("{} models > /dev/full", "error[system]: no space left on device"),
        ("{} models >&-", "error[closed-output]: standard output is closed"),
        ("mkdir gone && cd gone && rmdir ../gone && {} models", "error[no-working-folder]: "),
    ],
)
def test_what_is_full_closed_or_gone_is_one_line(shell: str, said: str, tmp_path: Path) -> None:
    code, lines = ended(shell.format(" ".join(MODULE)), tmp_path)
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(said)


def test_a_narrow_terminal_without_unicode_home_or_errors_is_enough(tmp_path: Path) -> None:
    poor = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "40"}
    shell = f"unset HOME; {' '.join(MODULE)} estimate verl 2>&- <&-"
    assert ended(shell, tmp_path, **poor) == (0, [])


def test_without_a_home_the_store_of_designs_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(RlhfsimError) as error:
        cache_folder("designs")
    assert "--cache" in str(error.value.help)


@pytest.mark.parametrize("module", ["rlhfsim.cli.main", "rlhfsim.present.answers.simulate"])
def test_an_interrupt_while_modules_are_imported_is_one_line(module: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", STOPPED, "simulate", module], capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (130, "interrupted\n")
