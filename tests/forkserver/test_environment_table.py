"""The table of what C code reads at import: stale when the installed torch reads more.

getenv is interposed by a small library that is compiled here; without a C compiler there is no
way to see the reads, and the test is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.forkserver.renew import C_READS, C_READS_OF_NO_INTEREST, REREAD
from tests.forkserver.driver import LIMIT, plain_environment

SHIM = r"""
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
extern char **environ;
static char *lookup(const char *name) {
    size_t length = strlen(name);
    for (char **each = environ; each && *each; each++)
        if (!strncmp(*each, name, length) && (*each)[length] == '=') return *each + length + 1;
    return 0;
}
static char *seen(const char *name) {
    char *path = lookup("SHIM_OUT"), line[300];
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (fd >= 0) {
        int size = snprintf(line, sizeof line, "%s\n", name);
        if (write(fd, line, size) < 0) _exit(9);
        close(fd);
    }
    return lookup(name);
}
char *getenv(const char *name) { return seen(name); }
char *secure_getenv(const char *name) { return seen(name); }
"""


def names_read_by(shim: Path, code: str, out: Path) -> set[str]:
    environ = plain_environment(LD_PRELOAD=str(shim), SHIM_OUT=str(out))
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=LIMIT)
    return set(out.read_text().split("\n")) - {""}


@pytest.mark.slow
def test_the_table_names_all_that_the_installed_torch_reads(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to interpose getenv with")
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, source], check=True, timeout=LIMIT)
    plain = names_read_by(shim, "import ctypes", tmp_path / "plain")
    read = names_read_by(shim, "import torch", tmp_path / "torch") - plain
    assert "OMP_PROC_BIND" in read, "the interposer sees nothing"
    known = set().union(*C_READS.values(), os.environ.keys() & {"LD_PRELOAD"}) | REREAD.keys()
    new = {name for name in read - known if not name.startswith(C_READS_OF_NO_INTEREST)}
    assert new == set(), "C_READS is stale: these are read at import and not compared"
