"""README's two commands on systems that are not ours: made, used by an ordinary user, removed.

    python benchmarks/platforms.py [NAME...] [--data-dir PATH] [--work DIR] [--write]

A system gets a clone of HEAD, and neither packages nor a cache of ours. What a machine can't make
is a row that says so; Debian's roots, the container, aarch64 and Slurm need root and the programs
mmdebstrap, buildah, qemu-user-static, slurm-wlm and munge. `--write` puts the rows into RESULTS.md.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platform_rows as rows
from platform_rows import Bench, Done
from report import REPOSITORY, RESULTS, machine, write_section
from systems import Cannot, call, owned

HEADER = [
    "| system | Python | what was run | seconds | outcome |",
    "|---|---|---|---|---|",
]


@dataclass
class Row:
    """A line of the table: what it is of, how it is made; `cheap` is part of the tests' --all."""

    system: str
    ran: str
    make: Callable[[Bench, Path], Done]
    cheap: bool = False


TWO = "README's two commands"
TWO_JOBS = "examples/slurm, once stopped by its time limit, once uninterrupted"
ROWS = {
    "debian12": Row("Debian 12, its own Python", TWO, rows.fresh_debian("bookworm"), cheap=True),
    "debian13": Row("Debian 13, its own Python", TWO, rows.fresh_debian("trixie")),
    "python3.11": Row("this machine, Python 3.11", TWO, rows.python_here("3.11"), cheap=True),
    "python3.12": Row("this machine, Python 3.12", TWO, rows.python_here("3.12"), cheap=True),
    "python3.13": Row("this machine, Python 3.13", TWO, rows.python_here("3.13"), cheap=True),
    "closed-home": Row("a home folder without write permission", TWO, rows.closed_home, cheap=True),
    "path-with-spaces": Row("a path with spaces", TWO, rows.spaces, cheap=True),
    "numpy2": Row(
        "packages of another environment, with numpy 2",
        "`setup --venv`, the tutorial, two processes",
        rows.numpy_2,
        cheap=True,
    ),
    "container": Row(
        "the Dockerfile on Debian 12: an unknown user id, no network, /dev/shm of 64 MB",
        "the tutorial",
        rows.container,
    ),
    "aarch64": Row("aarch64, emulated: Debian 12", "20 steps of each script, digits", rows.aarch64),
    "slurm": Row("Slurm on this machine", TWO_JOBS, rows.slurm_job),
}


@dataclass
class Result:
    """How a row ended: `state` is passed, failed, or cannot, for a machine without the means."""

    row: Row
    state: str
    done: Done

    def __str__(self) -> str:
        seconds = f"{self.done.seconds:.0f}" if self.state == "passed" else ""
        told = " ".join(self.done.told.replace("|", "/").split())
        told = {"passed": "", "failed": "**failed**: ", "cannot": "not here: "}[self.state] + told
        return f"| {self.row.system} | {self.done.python} | {self.row.ran} | {seconds} | {told} |"


def run_row(bench: Bench, name: str) -> Result:
    """Makes a row; whatever goes wrong is told in it."""
    folder = bench.work / name
    folder.mkdir()
    row = ROWS[name]
    try:
        bench.need_network()
        return Result(row, "passed", row.make(bench, folder))
    except Cannot as error:
        return Result(row, "cannot", Done("", 0, str(error)))
    except Exception as error:  # a table, not a crash
        return Result(row, "failed", Done("", 0, f"{type(error).__name__}: {error}"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def bench_in(work: Path | None, data_dir: Path) -> Iterator[Bench]:
    """The folder of all rows with what they start from, removed at the end."""
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="platforms-", dir=work)).resolve()
    folder.chmod(0o755)
    files = folder / "files"
    try:
        call("git", "clone", "-q", "--bare", REPOSITORY, files / "repository")
        data = ""
        if (data_dir / "MNIST/raw").is_dir():
            shutil.copytree(data_dir / "MNIST/raw", files / "data/MNIST/raw")
            data = "data"
        yield Bench(folder, owned(files), data)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kept_lines(results: dict[str, Result]) -> list[str]:
    """The table's lines: new ones, and of systems that did not run now, those in RESULTS.md."""
    written = RESULTS.read_text().splitlines()
    lines = []
    for name, row in ROWS.items():
        if name in results:
            lines.append(str(results[name]))
        else:
            lines += [line for line in written if line.startswith(f"| {row.system} |")]
    return lines


def main() -> int:
    listed = [f"  {name:16} {row.system}: {row.ran}" for name, row in ROWS.items()]
    parser = argparse.ArgumentParser(
        description="README's two commands on foreign systems; by default all of these:\n"
        + "\n".join(listed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--work", type=Path, help="where the temporary folder is made: some 20 GB")
    parser.add_argument("--write", action="store_true", help="put the rows into RESULTS.md")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in ROWS]:
        parser.error(f"no system {', '.join(unknown)}; there are {', '.join(ROWS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes what was made
    results = {}
    with bench_in(options.work, options.data_dir) as bench:
        for name in options.names or ROWS:
            began = time.monotonic()
            results[name] = run_row(bench, name)
            took = time.monotonic() - began
            print(f"{name}, {took:.0f} s in all: {results[name]}", file=sys.stderr, flush=True)
    lines = kept_lines(results) if options.write else list(map(str, results.values()))
    caption = machine().replace("; median, lowest to highest", "")
    caption += " Each system has a clone, network access and no cache of packages. Only the rows of"
    caption += " this machine share one cache."
    text = "\n".join(["## Foreign systems", "", caption, "", *HEADER, *lines])
    print(text)
    if options.write:
        write_section("platforms", text)
    return int(any(result.state == "failed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
