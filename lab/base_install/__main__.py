"""The walk; see the package."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import click

from executor.coordination.forks import ask, ended
from lab.base_install.commands import documented, on_page, shown
from lab.base_install.inputs import overlaid, prepare
from rlhfsim.extras import EXTRAS
from tests.executor.fork_server import COMMANDS, serving

FIRST = "design --gpus 64 --model 70b"
"""The first command of the README, as it is."""
PLACES = ("README.md", "rlhfsim/", "executor/")
NEED_EXTRAS = (
    "import-run events --framework verl --config launch.sh --gpu h100 --out new",
    "whatif my-scenario.yaml --parquet points.parquet",
    "whatif my-scenario.yaml --ray",
)
"""What nothing recommends without saying that it needs an extra."""
HELP = """
import click
from rlhfsim.cli.main import cli, COMMANDS
for name in COMMANDS:
    command = cli.get_command(click.Context(cli), name)
    for one in (command, *getattr(command, "commands", {}).values()):
        print(one.get_help(click.Context(one)))
"""
SKIPPED = {
    "launch plan.json --dry-run --address auto": "a running Ray cluster",
    **dict.fromkeys(
        (
            "watch job.log",
            "watch job.log --plan plan.json --fail-on 'step-ratio>1.5' --fail-on 'quiet-s>1800'",
            "watch job.log --gpu h100 --steps 500 --fail-on 'oom-risk>0.5'",
            "watch outputs/2026-08-20/ --gpu h100 --steps 500 --fail-on 'oom-risk>0.5'",
        ),
        "a job that runs",
    ),
}
"""Command -> what it needs that is not here."""
_EXTRA = re.compile(r"pip install 'rlhfsim\[([\w-]+)\]'")
LIMIT_S = 300
COSTLIEST = 10
SEEN_WARNINGS = ("UserWarning", "FutureWarning", "RuntimeWarning", "SyntaxWarning")
"""What Python would print above an answer."""
DEPTH = 2
"""An answer's commands run, and those that their answers recommend."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    command: str
    code: int
    output: str
    error: str
    cpu_s: float

    @property
    def fault(self) -> str | None:
        """What it must not do; None where it is right."""
        if "Traceback" in self.error or self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        extras = _EXTRA.findall(self.error)
        if self.code == 2 and not (len(extras) == 1 and extras[0] in EXTRAS):
            return "exit code 2 without the one line of pip that is missing"
        return None


class Walk:
    """Commands of one install, each text once."""

    def __init__(self, program: Path, scratch: Path, server: str, environment: Mapping[str, str]) -> None:
        """`program`: the script `rlhfsim`, run as a fork of `server`; `scratch`: an empty folder."""
        self._program, self._scratch = program, scratch
        self._server, self._environment = server, environment
        self._inputs = scratch / "inputs"
        self._inputs.mkdir()
        self.ended: dict[str, Ended | None] = dict.fromkeys(SKIPPED)

    def run(self, command: str, folder: Path) -> Ended:
        """The command there."""
        words = [str(self._program), *expanded(command, folder)]
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as error:
            outputs = (output.fileno(), error.fileno())
            with ask(self._server, words, self._environment, outputs, folder) as connection:
                connection.settimeout(LIMIT_S)
                code, cpu_s = ended(connection)
            texts = [(file.seek(0), file.read())[1] for file in (output, error)]
        self.ended[command] = Ended(command, code, *texts, cpu_s=cpu_s)
        return self.ended[command]

    def prepare(self) -> None:
        """Write the files that commands name."""
        (self._scratch / "seeds").mkdir()
        prepare(self._inputs, self._scratch / "seeds", self.run)

    def follow(self, command: str) -> None:
        """The command in a copy of the inputs, then what its answer recommends, there."""
        if command in self.ended:
            return
        self.ended[command] = None  # another thread leaves it out
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        shutil.copytree(self._inputs, folder, dirs_exist_ok=True)
        overlaid(command, folder)
        answers = [self.run(command, folder)]
        for _ in range(DEPTH):
            texts = [f"{answer.output}\n{answer.error}" for answer in answers]
            texts += [on_page(page.read_text()) for page in folder.glob("*.html")]
            answers = [
                self.run(other, folder) for other in self._unseen(line for t in texts for line in shown(t))
            ]

    def _unseen(self, commands: Iterable[str]) -> list[str]:
        new = [command for command in dict.fromkeys(commands) if command not in self.ended]
        self.ended |= dict.fromkeys(new)
        return new


def expanded(command: str, folder: Path) -> Iterator[str]:
    """The words of a command, names with a star as the shell gives them."""
    for word in shlex.split(command):
        yield from sorted(glob(word, root_dir=folder)) or [word] if "*" in word else [word]


def helps(python: Path) -> int:
    """Exit code of a process that shows the help of every command."""
    return subprocess.run([python, "-c", HELP], stdout=subprocess.DEVNULL).returncode


@click.command()
@click.option("--venv", type=click.Path(path_type=Path, exists=True), required=True)
def main(venv: Path) -> None:
    """Exit code 1 where a command ends as it must not."""
    python, program = (venv.resolve() / "bin" / name for name in ("python", "rlhfsim"))
    with tempfile.TemporaryDirectory(prefix="base-") as folder, tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "COLUMNS": "200", "PATH": os.environ["PATH"]}
        environment["PYTHONWARNINGS"] = ",".join(f"error::{kind}" for kind in SEEN_WARNINGS)
        with (
            serving(f"{home}/socket", *COMMANDS, python=str(python), environment=environment) as server,
            ThreadPoolExecutor(2) as pool,
        ):
            walk = Walk(program, Path(folder), server, environment)
            walk.prepare()
            list(pool.map(walk.follow, [FIRST, *documented(*PLACES), *NEED_EXTRAS]))
    answers = [found for found in walk.ended.values() if found is not None]
    faults = [found for found in answers if found.fault is not None]
    for found in faults:
        print(f"rlhfsim {found.command}\n  {found.fault}\n{found.error[-1500:]}")
    for found in answers:
        if found.code == 2 and found.fault is None:
            print(f"needs {_EXTRA.search(found.error)[1]}: rlhfsim {found.command}")
    for found in sorted(answers, key=lambda found: -found.cpu_s)[:COSTLIEST]:
        print(f"{found.cpu_s:6.1f} s  rlhfsim {found.command}")
    cpu_s = sum(found.cpu_s for found in answers)
    codes = {code: sum(found.code == code for found in answers) for code in (0, 1, 2)}
    print(f"{len(answers)} commands, exit codes {codes}, {len(faults)} faults, {cpu_s:.0f} s of CPU")
    sys.exit(1 if faults or helps(python) else 0)


if __name__ == "__main__":
    main()
