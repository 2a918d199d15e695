"""Steps a forked child from system call to system call: kill it there, make the call fail, or write
down what it did.

Linux on x86-64; `available()` says why not elsewhere. The child is forked, so that it starts with
everything imported.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvbridge.errors import KVBridgeError

TRACEME, SYSCALL, GETREGS, SETREGS, SETOPTIONS = 0, 24, 12, 13, 0x4200
SYSGOOD, EXITKILL = 0x1, 0x100000
CALLS = {
    0: "read",
    1: "write",
    3: "close",
    4: "stat",
    5: "fstat",
    6: "lstat",
    8: "lseek",
    17: "pread64",
    18: "pwrite64",
    20: "writev",
    72: "fcntl",
    73: "flock",
    74: "fsync",
    75: "fdatasync",
    76: "truncate",
    77: "ftruncate",
    82: "rename",
    83: "mkdir",
    84: "rmdir",
    86: "link",
    87: "unlink",
    90: "chmod",
    217: "getdents64",
    257: "openat",
    258: "mkdirat",
    262: "newfstatat",
    263: "unlinkat",
    264: "renameat",
    285: "fallocate",
    316: "renameat2",
    332: "statx",
}
NAMES = (
    "r15",
    "r14",
    "r13",
    "r12",
    "rbp",
    "rbx",
    "r11",
    "r10",
    "r9",
    "r8",
    "rax",
    "rcx",
    "rdx",
    "rsi",
    "rdi",
    "orig_rax",
    "rip",
    "cs",
    "eflags",
    "rsp",
    "ss",
    "fs",
    "gs",
    "ds",
    "es",
    "fs_base",
    "gs_base",
)


class Registers(ctypes.Structure):
    """struct user_regs_struct."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in NAMES]


@dataclass(frozen=True)
class Call:
    """One system call of the child: name, arguments, result, and for writes the bytes, for paths
    the strings."""

    name: str
    args: tuple[int, ...]
    result: int | None = None
    data: bytes = b""
    paths: tuple[str, ...] = ()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


def available() -> str | None:
    """Why tracing does not work here; None where it does."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "needs Linux on x86-64"
    try:
        assert stops(lambda: os.getppid()) > 1
    except OSError as error:
        return f"ptrace is refused: {error.strerror}"
    return None


def _ptrace(request: int, pid: int, data: object = 0) -> None:
    if _libc.ptrace(request, pid, None, data) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def start(act: Callable[[], object]) -> int:
    """Forks a child that runs `act`, stopped before its first call. It exits with 0, 3 for a
    KVBridgeError, else 1."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _ptrace(TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            act()
            code = 0
        except KVBridgeError:
            code = 3
        except BaseException:  # noqa: BLE001 - whatever it is, it is a finding: exit code 1
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSTOPPED(status):
        raise OSError(1, "the child could not be traced")
    _ptrace(SETOPTIONS, pid, SYSGOOD | EXITKILL)
    return pid


def step(pid: int) -> int | None:
    """Lets the child run to its next stop at a system call; its exit code when it ended instead, -1
    for a stop."""
    deliver = 0
    while True:
        _ptrace(SYSCALL, pid, deliver)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)
        if os.WSTOPSIG(status) == signal.SIGTRAP | 0x80:
            return -1
        deliver = os.WSTOPSIG(status)


def kill(pid: int) -> None:
    """Ends the child where it stands."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def stops(act: Callable[[], object]) -> int:
    """How many stops (entry and return of every call) an untouched run has."""
    pid, count = start(act), 0
    while step(pid) == -1:
        count += 1
    return count


def kill_at(act: Callable[[], object], stop: int) -> int | None:
    """Kills the child at its n-th stop; its exit code if it ended before, None if it was killed."""
    pid = start(act)
    for _ in range(stop + 1):
        code = step(pid)
        if code != -1:
            return code
    kill(pid)
    return None


def calls(act: Callable[[], object], fail: tuple[int, int] | None = None) -> Iterator[Call | int]:
    """Every call of a run as it returns, then the exit code. `fail` (n, errno) makes the n-th call
    fail undone."""
    pid, index = start(act), 0
    registers = Registers()
    while (code := step(pid)) == -1:
        _ptrace(GETREGS, pid, ctypes.byref(registers))
        call = _read(pid, registers)
        failing = fail is not None and fail[0] == index
        if failing:
            registers.orig_rax = (1 << 64) - 1
            _ptrace(SETREGS, pid, ctypes.byref(registers))
        code = step(pid)
        if code != -1:
            break
        _ptrace(GETREGS, pid, ctypes.byref(registers))
        if failing and fail is not None:
            registers.rax = (1 << 64) - fail[1]
            _ptrace(SETREGS, pid, ctypes.byref(registers))
        yield replace(call, result=ctypes.c_longlong(registers.rax).value)
        index += 1
    yield int(code or 0)


def _read(pid: int, registers: Registers) -> Call:
    name = CALLS.get(registers.orig_rax, str(registers.orig_rax))
    raw = (registers.rdi, registers.rsi, registers.rdx, registers.r10)
    args = tuple(ctypes.c_longlong(a).value for a in raw)
    where = {
        "openat": (1,),
        "mkdirat": (1,),
        "unlinkat": (1,),
        "newfstatat": (1,),
        "renameat": (1, 3),
        "renameat2": (1, 3),
    }
    where |= {name: (0,) for name in ("mkdir", "rmdir", "unlink", "stat", "lstat", "truncate")} | {
        "rename": (0, 1),
        "link": (0, 1),
    }
    paths = tuple(_string(pid, args[i]) for i in where.get(name, ()))
    data = _memory(pid, args[1], args[2]) if name in ("write", "pwrite64") else b""
    return Call(name, args, None, data, paths)


def _memory(pid: int, address: int, count: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(count)


def _string(pid: int, address: int) -> str:
    text = b""
    while b"\0" not in text and len(text) < 4096:
        text += _memory(pid, address + len(text), 64 - (address + len(text)) % 64)
    return os.fsdecode(text.partition(b"\0")[0])
