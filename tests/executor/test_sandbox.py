"""Attacks on the sandbox, in every mode that this machine offers. All end by themselves and touch loopback
only."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.rewards import isolation
from executor.rewards.sandbox import CodeOutcome, CodeRun, Sandbox, strength
from rlhfsim.errors import RlhfsimError

QUICK_S = 0.4
MARK = "rlhfsim-sandbox-attack"


def _modes() -> list[str]:
    """Modes to attack: landlock with seccomp everywhere, the others where namespaces can be had."""
    names = ["kernel"]
    if shutil.which("unshare") is None:
        return names
    probe = subprocess.run(["unshare", "-U", "-r", "-n", "true"], capture_output=True, check=False)
    if probe.returncode == 0:
        names.append("namespaces")
        if shutil.which("bwrap"):
            names.append("bubblewrap")
    return names


@pytest.fixture(scope="module", params=_modes())
def shared(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with Sandbox(mode=request.param) as made:
        yield made


@pytest.fixture
def sandbox(shared: Sandbox) -> Iterator[Sandbox]:
    """A warm sandbox; after the attack no process and no file is left, and the next execution works."""
    before = _descendants(), _scratch_files()
    yield shared
    assert _passes(shared)
    assert (_descendants(), _scratch_files()) == before


def _descendants() -> set[str]:
    """Processes below this one, by pid: workers included, so that a replaced worker shows too."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[stat.parent.name] = fields[1]
    below = {str(os.getpid())}
    while True:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        if not more:
            return below
        below |= more


def _scratch_files() -> list[str]:
    """What lies in the scratch folders that the host can see; another test's may be nested a thousand deep."""
    top = Path(tempfile.gettempdir())
    files = (f for inner in ("*", "*/*", "*/*/*") for f in top.glob(f"rlhfsim-sandbox-*/{inner}"))
    return sorted(str(f) for f in files if MARK in f.name)


def _passes(sandbox: Sandbox) -> bool:
    return _run(sandbox, "def f(x): return x + 1", tests="assert f(1) == 2").status == "passed"


def _run(sandbox: Sandbox, code: str, **changes: object) -> CodeOutcome:
    return sandbox.run(CodeRun(code=code, **changes))  # type: ignore[arg-type]


def test_right_code_passes_and_wrong_code_fails(sandbox: Sandbox) -> None:
    assert _passes(sandbox)
    wrong = _run(sandbox, "def f(x): return x", tests="assert f(1) == 2, 'off by one'")
    assert (wrong.status, wrong.error) == ("failed", "AssertionError: off by one")
    assert _run(sandbox, "def f(x:", tests="assert True").status == "error"


def test_a_program_reads_stdin_and_writes_stdout(sandbox: Sandbox) -> None:
    outcome = _run(sandbox, "print(int(input()) * 2)", stdin="21\n")
    assert (outcome.status, outcome.output) == ("passed", "42\n")


def test_an_endless_loop_that_ignores_signals_is_killed_in_time(sandbox: Sandbox) -> None:
    code = """
import signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
while True:
    try:
        while True: pass
    except BaseException: pass
"""
    start = time.monotonic()
    assert _run(sandbox, code, wall_s=QUICK_S).status == "timeout"
    assert time.monotonic() - start < QUICK_S + 2


def test_sleeping_for_ever_is_killed_in_time(sandbox: Sandbox) -> None:
    assert _run(sandbox, "import time; time.sleep(60)", wall_s=QUICK_S).status == "timeout"


def test_a_memory_bomb_is_stopped_at_its_limit(sandbox: Sandbox) -> None:
    code = "held = []\nwhile True: held.append(bytearray(2**20))"
    assert _run(sandbox, code, memory_bytes=64 * 2**20).status == "memory"
    allowed = "held = bytearray(48 * 2**20)"
    assert _run(sandbox, allowed, memory_bytes=64 * 2**20).status == "passed"


def _skip_without_modules(outcome: CodeOutcome) -> None:
    if "No module named" in outcome.error:
        pytest.skip("another user cannot read this Python, so that only what is preloaded can be imported")


HIDING = {
    "memory files": "hold = os.memfd_create('x'); size = sum(os.write(hold, bytes(2**20)) for _ in range(15))",
    "unlinked files": "hold = os.open('x', os.O_RDWR | os.O_CREAT); os.unlink('x')\n"
    "    size = sum(os.write(hold, bytes(2**20)) for _ in range(15))",
    "wide pipes": "hold = os.pipe(); fcntl.fcntl(hold[1], 1031, 2**20); os.set_blocking(hold[1], False)\n"
    "    size = os.write(hold[1], bytes(2**20))",
    "wide sockets": "hold = socket.socketpair()\n"
    "    hold[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22); hold[0].setblocking(False)\n"
    "    size = hold[0].send(bytes(2**17))",
    "sockets in sockets": "a, b = socket.socketpair(); hold = socket.socketpair(); a.setblocking(False)\n"
    "    size = a.send(bytes(2**17)); socket.send_fds(hold[0], [b'x'], [b.fileno()]); size += 2**17",
    "spliced pages": "hold = os.pipe(); page = mmap.mmap(-1, 2**16)\n"
    "    size = libc.vmsplice(hold[1], ctypes.byref(Vector(addressed(page), 2**16)), 1, 2)\n"
    "    if size < 0: raise OSError",
}


@pytest.mark.parametrize("way", HIDING)
def test_memory_outside_the_address_space_is_refused_or_small(sandbox: Sandbox, way: str) -> None:
    if way == "unlinked files" and sandbox.mode == "kernel":
        pytest.skip("its scratch folder is on a disk")
    code = f"""
import ctypes, fcntl, mmap, os, socket
libc = ctypes.CDLL(None)
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
def addressed(page): return ctypes.addressof(ctypes.c_char.from_buffer(page))
held, total = [], 0
try:
  while total < 2**27:
    {HIDING[way]}
    held.append(hold); total += size
except (OSError, PermissionError): pass
print(total)
"""
    outcome = _run(sandbox, code, memory_bytes=2**26)
    _skip_without_modules(outcome)
    assert (outcome.status, outcome.error) == ("passed", "")
    assert int(outcome.output) <= isolation.UNCOUNTED_BYTES // 2


def test_programs_may_use_asyncio_and_files(sandbox: Sandbox) -> None:
    code = (
        "import asyncio\nasync def f(): await asyncio.sleep(0)\nasyncio.run(f()); open('x', 'w').write('y')"
    )
    outcome = _run(sandbox, code)
    _skip_without_modules(outcome)
    assert outcome.status == "passed"


def test_several_processes_share_one_limit_of_memory() -> None:
    whole = isolation.address_space(256 * 2**20, 1)
    assert whole + isolation.UNCOUNTED_BYTES == 256 * 2**20
    shared = 256 * 2**20 - isolation.SCRATCH_BYTES - 4 * isolation.PIPES_BYTES
    assert isolation.address_space(256 * 2**20, 4) == shared // 4


@pytest.mark.parametrize("pair", ["socket.socketpair()", "os.pipe()"])
def test_buffers_of_many_processes_keep_to_the_limit_together(sandbox: Sandbox, pair: str) -> None:
    if not sandbox.facts["pids"]:
        pytest.skip("it starts no processes here")
    code = f"""
import os, socket
go, gone = os.pipe()
for _ in range(6):
  if os.fork() == 0:
    held, total = [], 0
    try:
      while True:
        ends = {pair}
        for end in ends:
          number = end if isinstance(end, int) else end.fileno()
          os.set_blocking(number, False)
          try:
            while True: total += os.write(number, bytes(4096))
          except OSError: pass
        held.append(ends)
    except OSError: pass
    os.write(1, f"{{total}}\\n".encode())
    os.close(gone)
    os.read(go, 1)  # all hold it at once
    os._exit(0)
os.close(gone)
for _ in range(6): os.wait()
"""
    outcome = _run(sandbox, code, processes=8, wall_s=10.0)
    totals = [int(line) for line in outcome.output.split()]
    assert len(totals) == 6, outcome.errors
    assert sum(totals) <= 8 * isolation.PIPES_BYTES


def test_scratch_files_that_would_take_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isolation.in_memory("/proc") is False
    monkeypatch.setattr(isolation, "in_memory", lambda folder: True)
    with pytest.raises(RlhfsimError, match="set TMPDIR to a folder on a disk"):
        Sandbox(mode="kernel")


@pytest.mark.parametrize("processes", [1, 6])
def test_a_fork_bomb_ends_with_its_execution(sandbox: Sandbox, processes: int) -> None:
    code = """
import os, time
started = 0
for _ in range(200):
    try:
        if os.fork() == 0:
            while True:
                try: os.fork()
                except OSError: time.sleep(0.01)
        started += 1
    except OSError:
        pass
print(started)
while True: time.sleep(1)
"""
    outcome = _run(sandbox, code, wall_s=QUICK_S, processes=processes)
    assert outcome.status == "timeout"
    allowed = processes - 1 if sandbox.facts["pids"] else 0
    assert int(outcome.output or 0) <= allowed


def test_a_double_fork_into_a_new_session_does_not_escape(sandbox: Sandbox) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)
os.wait()
print("escaped")
"""
    outcome = _run(sandbox, code, processes=6)
    assert outcome.output == ("escaped\n" if sandbox.facts["pids"] else "")


def test_threads_are_counted(sandbox: Sandbox) -> None:
    code = """
import threading, time
for started in range(500):
    try: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    except RuntimeError: break
print(started)
"""
    outcome = _run(sandbox, code, wall_s=2.0, memory_bytes=2**34)
    assert 0 < int(outcome.output) < 40


def test_the_parent_cannot_be_killed_stopped_or_traced(sandbox: Sandbox) -> None:
    code = f"""
import os, signal
for pid in (os.getppid(), {os.getpid()}, -1, 0, {os.getpid()} - 1):
    for number in (signal.SIGSTOP, signal.SIGKILL):
        if pid in (0, -1) and os.getpid() == 1: continue  # only itself in its pid namespace
        try: os.kill(pid, number)
        except OSError: pass
print("done")
"""
    outcome = _run(sandbox, code)
    assert outcome.status in ("passed", "killed")


def test_files_of_others_cannot_be_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    tmp_path.chmod(0o755)
    secret.chmod(0o644)
    places = ["/etc/shadow", "/etc/passwd", str(Path.home()), str(secret), "/proc/self/environ"]
    places += [f"/proc/{os.getpid()}/environ", "/dev/sda", "/dev/mem", "/sys/kernel", "/var/log"]
    code = f"""
import os
for place in {places!r}:
    try: print(place, os.listdir(place) if os.path.isdir(place) else open(place, "rb").read(10))
    except OSError: pass
"""
    outcome = _run(sandbox, code)
    assert outcome.status == "passed"
    # a private root has the way to Python's own files, with nothing else beside it
    way = {
        f"{folder} [{Path(sys.base_prefix).relative_to(folder).parts[0]!r}]"
        for folder in Path(sys.base_prefix).parents
    }
    assert set(outcome.output.splitlines()) <= way


def test_only_the_scratch_folder_can_be_written(sandbox: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    target = tmp_path / "target"
    target.write_text("untouched")
    target.chmod(0o666)
    code = f"""
import os
folders = ["/", "/tmp", "/dev/shm", "/var/tmp", "/usr", "/etc", {str(tmp_path)!r}, {str(Path.home())!r}]
for folder in folders:
    try:
        open(os.path.join(folder, {MARK!r}), "w").write("x")
        print("wrote in", folder)
    except OSError: pass
for change in (lambda: open({str(target)!r}, "w"), lambda: os.unlink({str(target)!r}),
               lambda: os.truncate({str(target)!r}, 0), lambda: os.link({str(target)!r}, "hard")):
    try: change(); print("changed")
    except OSError: pass
open("here", "w").write("x")
print(os.listdir("."))
"""
    outcome = _run(sandbox, code)
    assert outcome.output == "['here']\n"
    assert target.read_text() == "untouched"
    assert _run(sandbox, "import os; print(os.listdir('.'))").output == "[]\n"


def test_scratch_files_are_bounded_and_removed_whatever_they_look_like(sandbox: Sandbox) -> None:
    big = "data = open('big', 'wb')\nwhile True: data.write(bytes(2**20)); data.flush()"
    assert _run(sandbox, big, wall_s=3.0).status in ("error", "killed")
    odd = """
import os
os.makedirs("a/b/c"); open("a/b/c/x", "w").write("x")
os.symlink("/", "a/root"); os.chmod("a/b/c", 0); os.chmod("a/b", 0); os.chmod("a", 0)
os.chmod(".", 0o500)
"""
    assert _run(sandbox, odd).status == "passed"
    assert _run(sandbox, "import os; print(os.listdir('.'))").output == "[]\n"


@pytest.mark.parametrize("family", ["tcp", "udp", "unix"])
def test_nothing_can_be_reached_by_network(sandbox: Sandbox, family: str, tmp_path: Path) -> None:
    kinds = {
        "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        "unix": (socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{MARK}{os.getpid()}"),
    }
    where, kind, address = kinds[family]
    with socket.socket(where, kind) as listener:
        listener.bind(address)
        listener.settimeout(0.2)
        if family == "tcp":
            listener.listen()
        code = f"""
import _socket
s = _socket.socket({int(where)}, {int(kind)})
s.connect({listener.getsockname()!r})
s.send(b"hello")
"""
        assert _run(sandbox, code, wall_s=2.0).status == "error"
        with pytest.raises(TimeoutError):
            listener.accept() if family == "tcp" else listener.recv(10)


@pytest.mark.parametrize("stream", [1, 2])
def test_an_output_flood_is_cut_off(sandbox: Sandbox, stream: int) -> None:
    code = f"import os\nwhile True: os.write({stream}, b'x' * 65536)"
    outcome = _run(sandbox, code, output_bytes=1000)
    assert outcome.status == "output"
    assert len(outcome.output) + len(outcome.errors) == 1000


def test_dangerous_system_calls_are_refused(sandbox: Sandbox) -> None:
    calls = {"unshare": (272, 0x10000000), "mount": (165, 0), "ptrace": (101, 0), "bpf": (321, 0)}
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, (number, argument) in {calls!r}.items():
    print(name, libc.syscall(number, argument, 0, 0, 0, 0), ctypes.get_errno())
"""
    outcome = _run(sandbox, code)
    assert outcome.output.splitlines() == [f"{name} -1 1" for name in calls]


def test_it_runs_without_privileges(sandbox: Sandbox) -> None:
    code = """
import ctypes, os
try: os.setuid(0); print("became root")
except OSError: pass
print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0), os.getuid() != 0, [k for k in os.environ])
"""
    output = _run(sandbox, code).output
    assert output == "1 True ['HOME', 'TMPDIR', 'PATH']\n"


def test_one_execution_leaves_nothing_to_the_next(sandbox: Sandbox) -> None:
    _run(sandbox, "import math, builtins; math.pi = 3; builtins.leak = 1; open('x', 'w')")
    outcome = _run(
        sandbox, "import math, os; print(math.pi > 3, 'leak' in dir(__builtins__), os.listdir('.'))"
    )
    assert outcome.output == "True False []\n"


def test_a_lost_worker_is_replaced(sandbox: Sandbox) -> None:
    with Sandbox(mode=sandbox.mode) as own:
        worker = own._workers[0]
        os.killpg(worker._process.pid, 9)
        worker._process.wait(5)
        assert _passes(own)


def test_workers_run_side_by_side(sandbox: Sandbox) -> None:
    program = CodeRun(code="import time; time.sleep(0.4)")
    with Sandbox(2, mode=sandbox.mode) as two:
        start = time.monotonic()
        assert [outcome.status for outcome in two.map([program, program])] == ["passed"] * 2
        assert time.monotonic() - start < 0.78


def test_threads_may_share_a_sandbox(sandbox: Sandbox) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(_run(sandbox, "pass").status)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == ["passed"] * 4


def test_strength_says_what_is_in_force(sandbox: Sandbox) -> None:
    text = sandbox.strength()
    assert ("pid namespace" in text) == sandbox.facts["pids"]
    assert "seccomp" in text
    assert ("landlock version" in text) == (isolation.landlock_version() > 0)


def test_the_strongest_mode_is_taken_without_being_asked() -> None:
    assert {"bubblewrap": "bubblewrap", "namespaces": "own namespaces"}.get(
        _modes()[-1], "no namespaces"
    ) in strength()


def test_nothing_runs_where_nothing_confines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RlhfsimError, match="bwrap is not installed"):
        Sandbox(mode="bubblewrap")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("mode", _modes())
def test_it_works_as_a_normal_user_too(mode: str, tmp_path: Path) -> None:
    python = "/usr/bin/python3"
    if not os.path.exists(python) or sys.version_info[:2] != (3, 11):
        pytest.skip("no Python that a normal user can read")
    package = tmp_path / "package"
    source = Path(isolation.__file__).resolve().parents[2]
    for name in ("executor/rewards", "rlhfsim"):
        (package / name).mkdir(parents=True)
    for name in ("executor/__init__.py", "executor/rewards/*.py", "rlhfsim/errors.py", "rlhfsim/frozen.py"):
        for path in source.glob(name):
            shutil.copy(path, package / path.relative_to(source))
    (package / "rlhfsim/__init__.py").touch()
    code = f"""
import os, sys, tempfile
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
sys.path.insert(0, {str(package)!r})
from executor.rewards.sandbox import CodeRun, Sandbox
with Sandbox(mode={mode!r}) as sandbox:
    for code in ("x = 1", "open('/etc/passwd')", "import os; os.kill(os.getppid(), 9)"):
        print(sandbox.run(CodeRun(code=code, tests="assert x == 1")).status)
"""
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    command = [python, "-B", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.split()
    assert lines[:2] == ["passed", "error"], done.stderr
    assert lines[2] in ("error", "failed")
