"""What is put in the place of a file, and how its refusal is measured.

What is measured, or may end in a signal, runs in a process of its own.
"""

import os
import stat
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megakit.errors import UserError
from tests.scripts import output_of

MEGABYTE = 1 << 20


def problems(function: Callable[..., object], *arguments: object, **options: object) -> list[str]:
    """The problems with which a call is refused, each one printable line."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    for problem in caught.value.problems:
        assert len(problem.splitlines()) == 1
        assert problem.isprintable()
    return caught.value.problems


def problem(function: Callable[..., object], *arguments: object, **options: object) -> str:
    (only,) = problems(function, *arguments, **options)
    return only


def bomb(size: int) -> bytes:
    """Gzip of so many zeros, some thousandth of their number, made without holding them."""
    packer = zlib.compressobj(1, wbits=31)
    parts = [packer.compress(bytes(MEGABYTE)) for _ in range(size // MEGABYTE)]
    return b"".join([*parts, packer.flush()])


def run_apart(code: str, *arguments: object) -> str:
    """Runs code in a process that ends well within a minute and with 6 GB of addresses."""
    bounded = "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\n"
    return output_of(bounded + code, *arguments, timeout=60)


def refused_within(megabytes: int, call: str, path: Path) -> str:
    """What a call with a path refuses; it takes no more memory than that beyond its imports."""
    code = f"""
import sys
from pathlib import Path
import numpy, PIL.Image, PIL.ImageOps, PIL.PngImagePlugin, PIL.JpegImagePlugin, PIL.ImageChops
from mnist import files as mnist_files, own_pictures
from megakit.errors import UserError
from megakit.reporting.console import Console
from megakit.job.script import Run

def peak():  # of this program alone, unlike ru_maxrss
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

path, before = Path(sys.argv[1]), peak()
try:
    {call}
except UserError as error:
    print((peak() - before) // 1024)
    print(error)
"""
    taken, said = run_apart(code, path).split("\n", 1)
    assert len(said.splitlines()) == 1
    assert int(taken) <= megabytes, said
    return said


def no_file(path: Path, kind: str) -> None:
    """Puts something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        os.mknod(path, stat.S_IFSOCK)


KINDS = ("fifo", "device", "folder", "socket", "loop")
