"""A seccomp filter for untrusted code: which system calls it may not make (x86-64 and aarch64).

A deny list: no new network sockets, no tracing, mounting, namespaces, kernel modules, io_uring, shared System
V memory or changes to other processes; new processes only where asked for; no pages that a limit on address
space does not count (memory files, spliced pages, sockets within sockets, wide pipes). Refused calls fail
with EPERM. Two filters: one that the worker and all its children share, and a small one for each execution,
because compiling the large one took a fifth of an execution. Standard library only: the sandbox's worker
imports it. The aarch64 numbers have not been run.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_CALLS = {  # name: (x86-64, aarch64); None: does not exist there
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "iopl": (172, None),
    "ioperm": (173, None),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
_NEW_PROCESS = {
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setsid": (112, 157),
    "pidfd_open": (434, 434),
}
_HIDDEN_MEMORY = {  # pages that no limit on address space counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "landlock_create_ruleset": (444, 444),
}
_SHARED_OUT = {"socketpair": (53, 199)}
"""Refused where there are several processes: each could hold 14 MB in the buffers of its sockets."""
_SIGNALS_TO_OTHERS = {
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}
_KILL, _TGKILL = (62, 129), (234, 131)
_CLONE, _CLONE3 = (56, 220), (435, 435)
_PRLIMIT, _FCNTL = (302, 261), (72, 25)
_SET_PIPE_SIZE = 1031
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM = _ERRNO | errno.EPERM
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020000  # user, pid, net, ipc, uts, cgroup, mount
_X32 = 0x40000000
_ARGUMENT_0, _ARGUMENT_1 = 16, 24  # offsets of the low words of arguments in struct seccomp_data
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2


def available() -> bool:
    """Whether the table knows this processor; the kernel is asked when the filter is installed."""
    return platform.machine() in _ARCHITECTURES


def lasting() -> bytes:
    """The filter for the worker and all its children, as an array of struct sock_filter."""
    column = _ARCHITECTURES[platform.machine()][0]
    refused = [number for numbers in _CALLS.values() if (number := numbers[column]) is not None]
    return b"".join([*_head(), *_refuse(refused), _step(_RETURN, _ALLOW)])


def executing(pid: int | None, *, processes: bool) -> bytes:
    """The filter on top of it for one execution.

    `processes`: it may fork and exec. `pid`: it may signal this process only; None: it is alone in a pid
    namespace and may signal whom it likes there.
    """
    column = _ARCHITECTURES[platform.machine()][0]
    names = _HIDDEN_MEMORY | (_SHARED_OUT if processes else _NEW_PROCESS)
    names |= {} if pid is None else _SIGNALS_TO_OTHERS
    refused = [number for numbers in names.values() if (number := numbers[column]) is not None]
    rules = [*_head(), *_refuse(refused)]
    rules += [_step(_EQUAL, _CLONE3[column], 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    rules += _if_argument(_PRLIMIT[column], _step(_EQUAL, 0, 0, 1), yes=_ALLOW, no=_EPERM)
    widens = _step(_EQUAL, _SET_PIPE_SIZE, 0, 1)
    rules += _if_argument(_FCNTL[column], widens, yes=_EPERM, no=_ALLOW, offset=_ARGUMENT_1)
    for call in (_KILL, _TGKILL) if pid is not None else ():
        is_itself = _step(_EQUAL, pid or 0, 0, 1)
        rules += _if_argument(call[column], is_itself, yes=_ALLOW, no=_EPERM)
    rules += _clone(_CLONE[column], processes)
    return b"".join([*rules, _step(_RETURN, _ALLOW)])


def _head() -> list[bytes]:
    """Load the number of the call; kill on a foreign architecture, refuse the x32 numbers of x86-64."""
    return [
        _step(_LOAD, 4),
        _step(_EQUAL, _ARCHITECTURES[platform.machine()][1], 1, 0),
        _step(_RETURN, _KILL_PROCESS),
        _step(_LOAD, 0),
        _step(_AT_LEAST, _X32, 0, 1),
        _step(_RETURN, _EPERM),
    ]


def _refuse(numbers: list[int]) -> list[bytes]:
    return [step for n in numbers for step in (_step(_EQUAL, n, 0, 1), _step(_RETURN, _EPERM))]


def _if_argument(number: int, test: bytes, *, yes: int, no: int, offset: int = _ARGUMENT_0) -> list[bytes]:
    """Call `number`: decide by a test of the low word of one argument."""
    load = _step(_LOAD, offset)
    return [_step(_EQUAL, number, 0, 4), load, test, _step(_RETURN, yes), _step(_RETURN, no)]


def _clone(number: int, processes: bool) -> list[bytes]:
    """clone: never new namespaces; without `processes` only threads. (clone3 hides its flags in memory.)"""
    return [
        _step(_EQUAL, number, 0, 6),
        _step(_LOAD, _ARGUMENT_0),
        _step(_ANY_BIT, _CLONE_NEW, 0, 1),
        _step(_RETURN, _EPERM),
        _step(_ANY_BIT, _CLONE_THREAD, 0, 1),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _ALLOW if processes else _EPERM),
    ]


def install(libc: ctypes.CDLL, steps: bytes) -> bool:
    """Put the filter on the calling process for good (no_new_privs must be set); False: refused."""
    buffer = ctypes.create_string_buffer(steps, len(steps))
    header = struct.pack("HxxxxxxP", len(steps) // 8, ctypes.addressof(buffer))
    return int(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0)) == 0


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)
