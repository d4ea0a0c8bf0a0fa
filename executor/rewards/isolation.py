"""Isolation: what the Linux kernel offers, by ctypes: namespaces, a private root, landlock, capabilities.

Standard library only: the sandbox's worker imports it in a fresh interpreter. Each function either works or
raises OSError; the worker reports what is in force and the caller decides whether that is enough.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

LIBC = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the interpreter lock: clone must not lose it

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV = 0x1000, 0x4000, 1 << 18, 2, 4
_DETACH = 2
_ATTR_READ_ONLY, _ATTR_NOSUID = 1, 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_SIGCHLD = 17
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_CAPABILITY_VERSION_3, _NUM_CAPABILITIES = 0x20080522, 41
_ARM = platform.machine() == "aarch64"
_SYS_CLONE = 220 if _ARM else 56
_SYS_PIVOT_ROOT = 41 if _ARM else 155
_SYS_CAPSET = 91 if _ARM else 126
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446

_FS_EXECUTE, _FS_READ_FILE, _FS_READ_DIR, _FS_WRITE, _FS_TRUNCATE = 1, 4, 8, 2, 1 << 14
_FS_READ = _FS_EXECUTE | _FS_READ_FILE | _FS_READ_DIR
_FS_FILE = _FS_EXECUTE | _FS_READ_FILE | _FS_WRITE | _FS_TRUNCATE  # rights that make sense on a file
_NET_TCP = 3  # bind and connect
_SCOPES = 3  # abstract Unix sockets and signals end at the domain's border

NOBODY = 65534
SCRATCH_BYTES = 16 * 2**20
UNCOUNTED_BYTES = 2 * SCRATCH_BYTES
"""Most that a program can hold outside its address space: the scratch folder, buffers of 64 descriptors."""
PIPES_BYTES = 2 * 2**20
"""The same of each of several processes, which get pipes of 64 KiB and no pairs of sockets."""
_SCRATCH_FILES = 256  # below Python's recursion limit: a deepest possible tree can be removed


def readable(more: Sequence[str] = ()) -> list[str]:
    """What untrusted code may read: the system's libraries and programs, Python's own, and `more`."""
    python = [sys.base_prefix, str(Path(os.path.realpath(sys.executable)).parent)]
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero"]
    paths = [p for p in dict.fromkeys((*system, "/dev/urandom", *python, *more)) if os.path.exists(p)]
    return [p for p in paths if not any(p != q and p.startswith(q + "/") for q in paths)]


def enter_namespaces(scratch: str, paths: Sequence[str]) -> None:
    """New mount, network, IPC, UTS and cgroup namespaces; a private root of `paths`, and `scratch` to write.

    A normal user gets a user namespace first, in which it stays itself (as nobody).
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = _NEWNS | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP
    if uid != 0:
        own_user_namespace(uid, gid, extra=flags)
    else:
        _check(LIBC.unshare(flags), "unshare")
    _private_root(scratch, paths)


def own_user_namespace(uid: int, gid: int, *, extra: int = 0) -> None:
    """A user namespace (and `extra` ones) in which the caller is nobody with all capabilities."""
    _check(LIBC.unshare(_NEWUSER | extra), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")


def _private_root(scratch: str, paths: Sequence[str]) -> None:
    """Replace / by an empty tmpfs with `paths` bound into it and a small tmpfs at `scratch`."""
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", scratch, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
    for path in paths:
        _bind(path, scratch + path)
    inner, options = scratch + scratch, f"mode=700,size={SCRATCH_BYTES},nr_inodes={_SCRATCH_FILES}"
    os.makedirs(inner, exist_ok=True)
    _mount("tmpfs", inner, "tmpfs", _NOSUID | _NODEV, options)
    os.chdir(scratch)
    _check(LIBC.syscall(_SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(LIBC.umount2(b".", _DETACH), "umount")
    os.chdir("/")
    attributes = struct.pack("QQQQ", _ATTR_READ_ONLY | _ATTR_NOSUID, 0, 0, 0)
    for path in paths:
        _set_attributes(path, attributes, recursive=True)
    _set_attributes("/", attributes, recursive=False)


def _bind(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        Path(target).touch()
    _mount(source, target, None, _BIND | _REC)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    name = kind.encode() if kind else None
    done = LIBC.mount(source.encode(), target.encode(), name, flags, options.encode() or None)
    _check(done, f"mount {target}")


def _set_attributes(path: str, attributes: bytes, *, recursive: bool) -> None:
    if os.path.islink(path):
        return
    flags = _AT_RECURSIVE if recursive else 0
    done = LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, len(attributes))
    _check(done, f"mount_setattr {path}")


def clone(*, own_pids: bool) -> int:
    """fork, with `own_pids` as process 1 of a new pid namespace: killing it then ends all its descendants."""
    pid = LIBC.syscall(_SYS_CLONE, _SIGCHLD | (_NEWPID if own_pids else 0), 0, 0, 0, 0)
    return int(_check(pid, "clone"))


def landlock_version() -> int:
    """Version of the kernel's landlock interface; 0: none."""
    return max(0, int(LIBC.syscall(_SYS_LANDLOCK_CREATE, None, 0, 1)))


def landlock(scratch: str, paths: Sequence[str]) -> int:
    """A ruleset (descriptor): read `paths`, anything in `scratch`, no TCP, no signals to outsiders."""
    version = landlock_version()
    rights = (1 << {0: 0, 1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    wanted = (rights, _NET_TCP, _SCOPES)[: size // 8]
    ruleset = LIBC.syscall(_SYS_LANDLOCK_CREATE, struct.pack(f"{len(wanted)}Q", *wanted), size, 0)
    _check(ruleset, "landlock_create_ruleset")
    for path in paths:
        device = path.startswith("/dev/")
        allowed = _FS_READ_FILE | _FS_WRITE if device else _FS_READ
        _landlock_allow(ruleset, path, allowed & (rights if os.path.isdir(path) else _FS_FILE))
    _landlock_allow(ruleset, scratch, rights)
    return int(ruleset)


def _landlock_allow(ruleset: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights, parent)
    done = LIBC.syscall(_SYS_LANDLOCK_ADD, ruleset, 1, rule, 0)
    os.close(parent)
    _check(done, f"landlock_add_rule {path}")


def restrict(ruleset: int) -> None:
    """Put the caller under a landlock ruleset for good (no_new_privs must be set)."""
    _check(LIBC.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")


def renounce() -> None:
    """Neither the caller nor its children can gain capabilities by exec any more."""
    for capability in range(_NUM_CAPABILITIES):
        LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _check(LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def drop_privileges(uid: int | None) -> None:
    """Become `uid` (None: stay), without groups or capabilities; die with the parent."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header, nothing = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _check(LIBC.syscall(_SYS_CAPSET, header, nothing), "capset")
    LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)  # setresuid clears it, so after it


def hide() -> None:
    """Make the caller's memory unreadable to processes of the same user."""
    LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def address_space(memory_bytes: int, processes: int) -> int:
    """Bytes that each of a program's processes may map, so that all of them keep to `memory_bytes`.

    Where the program gets less than 256 MiB, an eighth is kept for what is not mapped, which may be more.
    """
    held = UNCOUNTED_BYTES if processes == 1 else SCRATCH_BYTES + processes * PIPES_BYTES
    return (memory_bytes - min(held, memory_bytes // (8 if processes == 1 else 2))) // processes


def in_memory(folder: str) -> bool:
    """Whether files in the folder take memory: its file system is a tmpfs."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    real = os.path.realpath(folder) + "/"
    around = [m for m in mounts if real.startswith(m[1].rstrip("/") + "/")]
    return max(around, key=lambda m: len(m[1]))[2] in ("tmpfs", "ramfs") if around else False


def limit(*, memory: int, cpu_s: int, tasks: int) -> None:
    """Kernel limits of the caller and its children: address space, CPU seconds, tasks, files."""
    for resource_limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NPROC, tasks),
        (resource.RLIMIT_FSIZE, SCRATCH_BYTES),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_SIGPENDING, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(resource_limit, (value, value))


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
