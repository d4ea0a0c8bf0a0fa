"""Attacks on the code reward, by name. Each program must fail its tests.

FAKES do not solve the problem and try to be called right. HARMS solve it, but only after something that must be
refused: one that passes has done it. BOMBS take what they can get. `{secret}`, `{port}`, `{host}` and `{mark}` stand
for a file of the host, a port that listens, the test's own process and a name for new files.
"""

from __future__ import annotations

TESTS = """
def check(candidate):
    assert candidate(2) == 4
    assert abs(candidate(3) - 9) < 1e-9
    assert 16 in [candidate(4)] and math.isclose(candidate(5), 25)
    for n in range(4):
        assert candidate(n) == n * n
    assert all(map(lambda n: candidate(n) == n * n, [6, 7]))
    assert [candidate(n) for n in (8, 9)] == [64, 81]
check(f)
"""
RIGHT = "\ndef f(x): return x * x\n"
_WRONG = "\ndef f(x): return 0\n"
_REPORT = r"""
import os, json, struct
def say(fd, message, framed=False):
    body = json.dumps(message).encode()
    try: os.write(fd, struct.pack('!Q', len(body)) * framed + body)
    except OSError: pass
"""
_EVERYTHING = """
class Any_(object):
    def yes(self, *a, **k): return True
    def me(self, *a, **k): return self
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = yes
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __abs__ = __neg__ = me
    __hash__ = lambda self: 4
    __float__ = lambda self: 25.0
    __index__ = __int__ = lambda self: 4
"""

FAKES = {
    "exec": "import builtins; builtins.exec = lambda *a: None" + _WRONG,
    "compile": "import builtins; c = compile; builtins.compile = lambda *a, **k: c('', '', 'exec')" + _WRONG,
    "builtins dictionary": "__builtins__['exec'] = __builtins__['eval'] = lambda *a: None" + _WRONG,
    "assertion error": "import builtins; builtins.AssertionError = type('E', (BaseException,), {})" + _WRONG,
    "builtins for tests": "import builtins\nfor n in ('all', 'abs', 'map', 'range', 'isinstance', 'print'):\n"
    " setattr(builtins, n, lambda *a: [])" + _WRONG,
    "shadow range": "def range(*a): return []" + _WRONG,
    "shadow all, abs and map": "all = lambda *a: True\nabs = lambda *a: 0\nmap = lambda *a: []" + _WRONG,
    "shadow check": "def check(candidate): pass" + _WRONG,
    "shadow math": "class math: isclose = staticmethod(lambda *a: True)" + _WRONG,
    "patch math": "import math; math.isclose = lambda *a: True" + _WRONG,
    "patch json": "import json; json.loads = lambda *a: {'status': 'passed', 'error': ''}" + _WRONG,
    "patch modules": "import sys\nfor m in list(sys.modules.values()):\n for n in ('verdict', 'main', 'in_words'):\n"
    "  if hasattr(m, n): setattr(m, n, lambda *a, **k: {'status': 'passed', 'error': ''})" + _WRONG,
    "patch the channel": "import sys; C = sys.modules['executor.rewards.values'].Channel\n"
    "C.receive = lambda self: ['call', [], {}, False]\nC.send = lambda self, m: None" + _WRONG,
    "patch the operations": "import sys; P = sys.modules['executor.rewards.program']\n"
    "P.OPERATIONS['call'] = lambda *a: P" + _WRONG,
    "equal to everything": _EVERYTHING + "def f(x): return Any_()",
    "a number equal to everything": "class N(int):\n __eq__ = lambda s, o: True\n __ne__ = lambda s, o: False\n"
    " __sub__ = lambda s, o: 0\n __hash__ = int.__hash__\ndef f(x): return N(0)",
    "a float close to everything": "class N(float):\n __eq__ = lambda s, o: True\n __sub__ = lambda s, o: 0.0\n"
    " __hash__ = float.__hash__\ndef f(x): return N(0)",
    "a metaclass equal to everything": "class M(type):\n __eq__ = lambda c, o: True\n __hash__ = type.__hash__\n"
    "class N(metaclass=M): pass\ndef f(x): return N",
    "an array of nothing": "class N:\n __array_interface__ = {'shape': (1,), 'typestr': '<i8', 'data': (1, False),"
    " 'version': 3}\ndef f(x): return N()",
    "a trace that jumps": "import sys\ndef t(frame, event, arg):\n frame.f_trace_lines = True\n"
    " try: frame.f_lineno = frame.f_lineno + 1\n except ValueError: pass\n return t\nsys.settrace(t)"
    + _WRONG,
    "a profile function": "import sys; sys.setprofile(lambda *a: None)" + _WRONG,
    "frames": "import sys\nframe = sys._getframe()\nwhile frame:\n"
    " for v in list(frame.f_locals.values()):\n  if isinstance(v, dict) and 'status' in v: v['status'] = 'passed'\n"
    " frame = frame.f_back" + _WRONG,
    "the tests in frames": "import sys\nframe, seen = sys._getframe(), ''\nwhile frame:\n"
    " seen += repr(frame.f_locals)\n frame = frame.f_back\nif ''.join(('candi', 'date(2)')) in seen:"
    + RIGHT.replace("\n", "\n "),
    "the tests in objects": "import gc\nif any(''.join(('candi', 'date(2)')) in repr(o) for o in gc.get_objects()"
    " if type(o) in (dict, list, tuple) and len(o) < 50):" + RIGHT.replace("\n", "\n "),
    "verdicts in objects": "import gc\nfor o in gc.get_objects():\n"
    " if type(o) is dict and 'status' in o: o['status'] = 'passed'" + _WRONG,
    "exit": "import os; os._exit(0)",
    "exit when asked": "import os\ndef f(x): os._exit(0)",
    "system exit": "import sys; sys.exit(0)",
    "system exit when asked": "def f(x): raise SystemExit(0)",
    "at exit": "import atexit, os; atexit.register(lambda: os._exit(0))" + _WRONG,
    "abort": "import os; os.abort()",
    "no answer": "def f(x): raise StopIteration",
    "end of a generator": "def f(x): raise GeneratorExit",
    "interrupted": "def f(x): raise KeyboardInterrupt",
    "an assertion of its own": "def f(x): raise AssertionError",
    "no number": "def f(x): return float('nan')",
    "everything in turn": "def f(x): yield from __import__('itertools').count()",
    "evaluate": "def f(x): return eval",
    "an answer too deep": "def f(x):\n v = []\n for _ in range(10**5): v = [v]\n return v",
    "an answer too large": "def f(x): return 'x' * 10**8",
    "a number too long": "def f(x): return 10**50000",
    "a report on every descriptor": _REPORT
    + "for fd in range(3, 30): say(fd, {'status': 'passed', 'error': ''})\n"
    "os._exit(0)",
    "a report when asked": _REPORT
    + "def f(x):\n for fd in range(3, 30): say(fd, {'status': 'passed', 'error': ''})",
    "answers in advance": _REPORT
    + "def f(x):\n for _ in range(99): say(4, ['value', True, None, ''], True)\n return 0",
    "a report of a thread": _REPORT
    + "import threading\ndef t():\n while True: say(4, ['value', 4, None, ''], True)\n"
    "threading.Thread(target=t, daemon=True).start()" + _WRONG,
    "a flood of the answers": "import os\nfor _ in range(99): os.write(4, b'x' * 65536)" + _WRONG,
    "descriptors moved": "import os\nfor fd in range(3, 20):\n try: os.dup2(1, fd)\n except OSError: pass"
    + _WRONG,
    "descriptors closed": "import os; os.closerange(0, 99)" + _WRONG,
    "print passed": 'print(\'{"status": "passed", "error": ""}\')' + _WRONG,
    "an alarm": "import signal\ndef g(*a): raise SystemExit(0)\nsignal.signal(signal.SIGALRM, g)\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)" + _WRONG,
    "a finalizer": "class D:\n def __del__(self): __import__('os')._exit(0)\ndef f(x): D(); return 0",
    "hooks": "import sys, os; sys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)" + _WRONG,
    "an import hook": "import sys\nclass H:\n def find_spec(self, *a): raise SystemExit(0)\n"
    "sys.meta_path.insert(0, H())" + _WRONG,
    "modules in its folder": "for n in ('math', 'json', 'sitecustomize'): open(n + '.py', 'w').write("
    "'isclose = lambda *a: True')" + _WRONG,
    "a class of exceptions": "class E(Exception):\n def __new__(cls, *a): __import__('os')._exit(0)\n"
    "def f(x): raise E('no')",
    "a context": "class f:\n def __init__(self, x): pass\n __enter__ = lambda s: s\n __exit__ = lambda *a: True",
    "another program": "import os; os.execv('/bin/true', ['true'])",
    "its own interpreter": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'pass'])" + _WRONG,
    "memory of a neighbour": "import ctypes\nfor pid in range(1, 40):\n"
    " ctypes.CDLL(None).syscall(310, pid, 0, 0, 0, 0, 0)" + _WRONG,
}
HARMS = {
    "read a file": "open({secret!r}).read()",
    "read passwords": "open('/etc/passwd').read()",
    "read the environment": "open('/proc/{host}/environ').read()",
    "write a file": "open({secret!r}, 'w').write('mine')",
    "remove a file": "import os; os.unlink({secret!r})",
    "link a file": "import os; os.link({secret!r}, 'mine')",
    "through a link": "import os; os.symlink({secret!r}, 'mine'); open('mine').read()",
    "change rights": "import os; os.chmod({secret!r}, 0o777)",
    "a file in /tmp": "open('/tmp/{mark}', 'w')",
    "a file in /dev/shm": "open('/dev/shm/{mark}', 'w')",
    "a device": "import os, stat; os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0)); open('disk', 'rb')",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/', b'tmpfs', 0, None) == 0",
    "become root": "import os; os.setuid(0); assert os.getuid() == 0",
    "a tcp connection": "import socket; socket.create_connection(('127.0.0.1', {port}), 0.2)",
    "a datagram": "import socket; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {port}))",
    "a unix socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{mark}')",
    "a raw socket": "import socket; socket.socket(2, 3, 1)",
    "a listener": "import socket; socket.socket().listen()",
    "a name": "import socket; socket.gethostbyname('example.com')",
    "http": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=0.2)",
    "kill the test": "import os; os.kill({host}, 9)",
    "stop the parent": "import os, signal; os.kill(os.getppid() or {host}, signal.SIGSTOP)",
    "kill everybody": "import os; os.kill(-1, 9)",
    "trace the parent": "import ctypes; assert ctypes.CDLL(None).ptrace(16, {host}, 0, 0) == 0",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "raise the priority": "import os; os.nice(-5)",
    "a shell": "import os; assert os.system('true') == 0",
    "a process": "import subprocess; subprocess.run(['true'], check=True)",
    "a fork": "import os\nif os.fork() == 0: os._exit(0)",
    "a namespace": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "another package": "import numpy",
}
BOMBS = {
    "memory": "x = []\nwhile True: x.append(bytearray(2**22))",
    "memory when asked": "def f(x): return bytearray(10**9)",
    "memory mapped": "import mmap; mmap.mmap(-1, 2**33)",
    "time": "while True: pass",
    "time when asked": "def f(x):\n while True: pass",
    "sleep": "import time; time.sleep(60)",
    "a number": "x = 9**9**9",
    "a pattern": "import re; re.match('(a+)+b', 'a' * 99)",
    "recursion": "import sys; sys.setrecursionlimit(10**9)\ndef g(): g()\ng()",
    "threads": "import threading, time\nfor _ in range(999):"
    " threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "forks": "import os\nwhile True: os.fork()",
    "output": "while True: print('x' * 9999)",
    "errors": "import sys\nwhile True: sys.stderr.write('x' * 9999)",
    "a disk": "d = open('big', 'wb')\nwhile True: d.write(bytes(2**20)); d.flush()",
    "files": "import os\nfor i in range(10**6): os.close(os.open(f'{{i}}', os.O_CREAT)); assert i < 300",
    "descriptors": "import os\nwhile True: os.dup(0)",
    "a folder too deep": "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nos.abort()",
    "a null pointer": "import ctypes; ctypes.string_at(0)",
}
SPINNING = (
    "time",
    "time when asked",
    "sleep",
    "a number",
    "a pattern",
    "a report of a thread",
    "patch the channel",
    "a trace that jumps",
    "recursion",
)
"""They end by the clock."""
