"""Workers of a run on CPUs are forks of one process that has imported their libraries."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private import node, ray_constants

from executor.coordination import forks

LOADED = "import sys; print('wave' in sys.modules, sys.argv[1:])"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    address = str(tmp_path / "socket")
    with forks.start(address, ["wave", "no_such_module"]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield address
        process.communicate()


def set_up(address: str, program: Path) -> subprocess.CompletedProcess[str]:
    """What Ray starts to set a worker up."""
    context = json.dumps({"env_vars": {"GIVEN": "yes"}})
    own = ["--serialized-runtime-env-context", context, "--language=PYTHON"]
    command = [sys.executable, forks.__file__, *own, str(program), "--worker", "1"]
    environment = os.environ | {forks.VARIABLE: address}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def worker(folder: Path, last: str = "") -> Path:
    program = folder / "worker.py"
    program.write_text(f"import os\n{LOADED}\nprint(os.environ['GIVEN'], flush=True)\n{last}")
    return program


def test_a_worker_is_a_fork_with_its_arguments_environment_and_exit_code(server: str, tmp_path: Path) -> None:
    ended = set_up(server, worker(tmp_path, "sys.exit(7)"))
    assert (ended.returncode, ended.stdout.split("\n")[:2]) == (7, ["True ['--worker', '1']", "yes"])


@pytest.mark.parametrize("there", [True, False])
def test_where_no_server_answers_the_worker_starts_anew(there: bool, tmp_path: Path) -> None:
    address = tmp_path / "socket"
    if there:  # it ended without a word
        with forks.start(str(address), ["wave"]) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.kill()
        assert address.exists()
    ended = set_up(str(address), worker(tmp_path))
    assert (ended.returncode, ended.stdout.split("\n")[:2]) == (0, ["False ['--worker', '1']", "yes"])


@pytest.mark.parametrize("compiled", [True, False])
def test_what_only_compilers_need_is_left_to_the_forks(compiled: bool, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(
        "try:\n    import scipy.signal\n    there = True\nexcept ImportError:\n    there = False\n"
    )
    program = worker(tmp_path, "import engine, scipy.signal\nprint(engine.there, scipy.signal.__name__)")
    variables = os.environ | {"PYTHONPATH": str(tmp_path), "TORCHDYNAMO_DISABLE": str(int(not compiled))}
    address = str(tmp_path / "socket")
    with forks.start(address, ["engine"], environment=variables) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert set_up(address, program).stdout.split("\n")[2] == f"{compiled} scipy.signal"
        process.communicate()


def test_a_fork_ends_with_whoever_asked_for_it(server: str, tmp_path: Path) -> None:
    program = worker(tmp_path, "import time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)")
    read, write = os.pipe()
    with forks.ask(server, [str(program)], {"GIVEN": "yes"}, (write, write), tmp_path) as connection:
        os.close(write)
        assert connection.recv(1) == forks.FORKED
        with os.fdopen(read) as printed:
            assert [printed.readline(), printed.readline()][1] == "yes\n"
            connection.close()
            assert printed.read() == ""  # its end of the pipe is closed: it has ended


def test_ray_sets_workers_up_by_it_while_a_server_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(forks.VARIABLE, raising=False)
    usual = ray_constants.SETUP_WORKER_FILENAME
    assert "ray_constants.SETUP_WORKER_FILENAME" in inspect.getsource(node.Node)
    with forks.in_place_of_new_workers():
        assert usual == ray_constants.SETUP_WORKER_FILENAME
    with forks.of_run(["wave"], {"GIVEN": "yes"}, tmp_path / "log"):
        address = os.environ[forks.VARIABLE]
        with forks.in_place_of_new_workers():
            assert os.path.join("folder", ray_constants.SETUP_WORKER_FILENAME) == forks.__file__
        with forks.of_run(["wave"], {}, tmp_path / "log"):  # one is enough
            assert os.environ[forks.VARIABLE] == address
        assert Path(address).parent.stat().st_mode & 0o077 == 0  # nobody else asks it for a process
    assert usual == ray_constants.SETUP_WORKER_FILENAME
    assert forks.VARIABLE not in os.environ
    assert not Path(address).parent.exists()


SPAWNS = """
import multiprocessing, sys
def answer(pipe):
    pipe.send("wave" in sys.modules)
    assert pipe.recv() == "end"
    sys.exit(5)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    child = context.Process(target=answer, args=(other,))
    child.start()
    print(mine.recv(), flush=True)
    if sys.argv[1] == "end":
        mine.send("end")
    else:
        child.terminate()
    child.join()
    print(child.exitcode)
"""


@pytest.mark.parametrize(("word", "code"), [("end", 5), ("terminate", -signal.SIGTERM)])
@pytest.mark.parametrize("there", [True, False])
def test_what_a_fork_spawns_is_a_fork_with_its_pipes_and_exit_code(
    word: str, code: int, there: bool, server: str, tmp_path: Path
) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    environment = os.environ | {forks.VARIABLE: server if there else str(tmp_path / "nobody")}
    read, write = os.pipe()
    with forks.ask(server, [str(tmp_path / "spawns.py"), word], environment, (write, write)) as connection:
        os.close(write)
        assert forks.exit_code(connection) == 0
    with os.fdopen(read) as printed:  # all of it: the child has ended too
        assert printed.read().split()[:2] == [str(there), str(code)]


def test_a_fork_without_a_server_spawns_anew(server: str, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text(SPAWNS)
    environment = {name: value for name, value in os.environ.items() if name != forks.VARIABLE}
    read, write = os.pipe()
    with forks.ask(server, [str(tmp_path / "spawns.py"), "end"], environment, (write, write)) as connection:
        os.close(write)
        assert forks.exit_code(connection) == 0
    with os.fdopen(read) as printed:
        assert printed.read().split() == ["False", "5"]
