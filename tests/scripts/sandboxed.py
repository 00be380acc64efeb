"""Run a command in which system calls fail: `sandboxed.py clone3=ENOSYS,kill=EPERM -- COMMAND...`.

A seccomp filter, as a container's runtime installs one. `NAME/N=ERRNO` fails only where the second
argument is N. Exits with 77 where this machine cannot do that.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

NUMBERS = {
    "x86_64": {"kill": 62, "memfd_create": 319, "prlimit64": 302, "setrlimit": 160},
    "aarch64": {"kill": 129, "memfd_create": 279, "prlimit64": 261, "setrlimit": 164},
}
ANYWHERE = {"clone3": 435, "pidfd_open": 434, "pidfd_send_signal": 424}

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
SECOND_ARGUMENT = 24  # offset of its lower half in struct seccomp_data


def program(rules: str) -> bytes:
    numbers = {**NUMBERS[platform.machine()], **ANYWHERE}
    filters = b""
    for rule in rules.split(","):
        name, _, error = rule.partition("=")
        name, _, only = name.partition("/")
        number = getattr(errno, error)
        fails = (RETURN, 0, 0, ERRNO | number)
        steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 3 if only else 1, numbers[name])]
        if only:
            steps += [(LOAD, 0, 0, SECOND_ARGUMENT), (EQUAL, 0, 1, int(only))]
        filters += b"".join(struct.pack("HBBI", *step) for step in (*steps, fails))
    return filters + struct.pack("HBBI", RETURN, 0, 0, ALLOW)


def main() -> None:
    rules, _, *command = sys.argv[1:]
    filters = program(rules)
    libc = ctypes.CDLL(None, use_errno=True)
    kept = ctypes.create_string_buffer(filters)
    packed = struct.pack("HxxxxxxP", len(filters) // 8, ctypes.addressof(kept))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, MODE_FILTER, ctypes.c_char_p(packed), 0, 0
    ):
        sys.exit(77)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
