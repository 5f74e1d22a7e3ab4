"""How many of N small changes to the code the short test suite notices.

    python benchmarks/mutants.py [--mutants N] [--seed N] [--jobs N] [--no-suite] [--again]
                                 [--table] [--write]

A mutant is one change by one operator (mutant_operators.py). The seed draws them, the same number
for each line that can change in each folder; a larger N keeps the mutants of a smaller one.

First, each mutant is run against the test file that mirrors its file, or else against the test
files that name its module. The survivors are run against the whole short suite, several in
different files at once: if that fails, each of them is run against the failed test files alone. A
failed test kills a mutant, and so does the time limit, which is three times the time of the same
tests without a mutant plus 30 s. Those tests have to pass, else the study ends.

Each result is added to mutants.jsonl, so the same command resumes an interrupted study. A result
counts until the line of its mutant changes. `--again` runs the survivors again, `--no-suite` leaves
the whole suite out, `--table` only prints the results. mutants_equivalent.json lists the survivors
that no test could notice: file, source, operator, new (as in mutants.jsonl) and the reason.
`--write` puts the table into RESULTS.md and docs/reliability.md.

The tests run in copies of the working tree. A copy has no .venv, because a mutant of `run` could
empty it: the tests use the Python that runs this study.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from mutant_operators import Mutant, mutants_of
from report import REPOSITORY, machine, write_section

LIBRARY = ("data", "checkpoints", "runtime", "training", "job", "models")
FOLDERS = {
    **{f"megakit/{name}": f"megakit/{name}/*.py" for name in LIBRARY},
    **{"mnist": "mnist/*.py", "scripts": "model_*.py", "run": "run"},
}
SUITE = ["tests"]
TOGETHER = 12  # mutants that are run against the whole suite at once
STAMPS = itertools.count(1_000_000_000)
Key = tuple[object, ...]


def key_of(one: Mutant) -> Key:
    """Identifies a mutant while its line stays the same, wherever that line moves."""
    return one.file, one.source, one.nth, one.column, one.operator, one.new


def draw(root: Path, number: int, seed: int) -> list[Mutant]:
    """Draws at least so many mutants, at most one for each line."""

    def rank(*parts: object) -> str:
        return hashlib.sha256(repr((seed, *parts)).encode()).hexdigest()

    lines: dict[str, dict[str, list[Mutant]]] = {folder: defaultdict(list) for folder in FOLDERS}
    for folder, pattern in FOLDERS.items():
        for path in root.glob(pattern):
            for one in mutants_of(path.relative_to(root).as_posix(), root):
                lines[folder][rank(one.file, one.source, one.nth)].append(one)
    total = sum(map(len, lines.values()))
    drawn: list[Mutant] = []
    for of_folder in lines.values():
        in_order = (
            sorted(of_folder[line], key=lambda m: rank(key_of(m))) for line in sorted(of_folder)
        )
        valid = (
            [m for m in line if m.is_valid((root / m.file).read_bytes())][:1] for line in in_order
        )
        share = math.ceil(number * len(of_folder) / total)
        drawn += itertools.islice(itertools.chain.from_iterable(valid), share)
    return drawn


def tests_of(file: str, root: Path) -> list[str]:
    """Returns the test file that mirrors a file, or those that name its module, or its folder."""
    path = Path(file)
    package, name, folder = ".".join(path.parent.parts), path.stem, f"tests/{path.parent}"
    tests = sorted(root.glob("tests/**/test_*.py" if package else "tests/test_*.py"))
    named = rf"\b{package}\.{name}\b|from {package} import .*\b{name}\b" if package else name
    found = [root / folder / f"test_{name}.py"]
    if not found[0].exists():
        found = [test for test in tests if re.search(named, test.read_text())]
    return [test.relative_to(root).as_posix() for test in found] or [folder]


class Ended(NamedTuple):
    """How a run of tests ended: what failed, '' if nothing did, and the files that failed."""

    by: str
    failed: list[str]
    seconds: float


class Copy:
    """A copy of the working tree, in which one run of tests takes place at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.tmp, self.stopped = folder / "project", folder / "tmp", False
        self.root.mkdir(parents=True)

        def git(*command: str, tree: Path = self.root) -> str:
            places = (f"--git-dir={self.root}/.git", f"--work-tree={tree}")
            return subprocess.check_output(["git", *places, *command], cwd=tree, text=True)

        git("init", "--quiet")
        git("add", "--all", tree=root)  # the files that git does not ignore, as they are now
        git("checkout-index", "--all")
        self.digest = git("write-tree").strip()
        if (root.parent / "shared").is_dir():  # where tests find MNIST
            shutil.copytree(root.parent / "shared", folder / "shared", symlinks=True)

    def run(self, tests: Sequence[str], limit: float, mutants: Sequence[Mutant] = ()) -> Ended:
        """Runs tests with some mutants, and ends every process that they leave behind."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        self.tmp.mkdir()
        ours = ("VENV", "PYTHON", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        environment |= {"TMPDIR": str(self.tmp), "MUTANTS_COPY": str(self.root)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        originals = {one.file: (self.root / one.file).read_bytes() for one in mutants}
        began, by = time.monotonic(), ""
        try:
            for one in mutants:
                self._write(one.file, one.apply(originals[one.file]))
            with (self.root.parent / "output").open("w+") as output:
                process = subprocess.Popen(
                    command + ["-x"] * (len(mutants) == 1),
                    cwd=self.root,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
                try:
                    status = process.wait(0 if self.stopped else limit)
                    by = f"status {status}" if status else ""
                except subprocess.TimeoutExpired:
                    by = "time limit"
                self.end_processes()
                process.wait()
                output.seek(0)
                failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?\.py)", output.read(), re.M)
        finally:
            for name, text in originals.items():
                self._write(name, text)
        if self.stopped:
            raise KeyboardInterrupt
        return Ended(
            by and (" ".join(failed[:1]) or by), sorted({*failed}), time.monotonic() - began
        )

    def _write(self, name: str, text: bytes) -> None:
        """Writes a file with a time of its own, by which Python knows that its bytecode is old."""
        (self.root / name).write_bytes(text)
        os.utime(self.root / name, (stamp := next(STAMPS), stamp))

    def end_processes(self) -> None:
        """Kills all processes that have this copy in their environment, in whatever session."""
        mark, found = f"MUTANTS_COPY={self.root}".encode(), True
        while found:
            found = False
            for path in Path("/proc").glob("[0-9]*/environ"):
                try:
                    if mark in path.read_bytes().split(b"\0"):
                        os.kill(int(path.parent.name), signal.SIGKILL)
                        found = True
                except OSError:  # it has ended, or is another user's
                    continue


class Study:
    """Runs mutants in copies of a tree, and records the results."""

    def __init__(self, root: Path, results: Path, folder: Path, jobs: int) -> None:
        self.results = results
        self.copies = [Copy(root, folder / str(number)) for number in range(jobs)]

    def run(self, mutants: list[Mutant], again: bool = False, suite: bool = True) -> None:
        """Runs the mutants that have no result yet, and the survivors again if told to."""
        before, root = known(self.results), self.copies[0].root
        due = [m for m in mutants if again or key_of(m) not in before]
        due = [m for m in due if not before.get(key_of(m), {}).get("by")]
        self._each([(tests_of(one.file, root), [one]) for one in due])
        together: dict[int, list[Mutant]] = defaultdict(list)  # no two of one file
        files: Counter[str] = Counter()
        now = known(self.results)
        for one in mutants if suite else []:
            if not now[key_of(one)]["by"] and now[key_of(one)]["tests"] != SUITE:
                together[files[one.file]].append(one)
                files[one.file] += 1
        parts = [
            m[at : at + TOGETHER] for m in together.values() for at in range(0, len(m), TOGETHER)
        ]
        self._each([(SUITE, part) for part in parts])

    def _each(self, work: list[tuple[list[str], list[Mutant]]]) -> None:
        """Runs mutants against tests, one piece of work in each copy at a time."""
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in self.copies:
            free.put(copy)

        def do(tests: list[str], mutants: list[Mutant]) -> None:
            copy = free.get()
            try:
                self._judge(copy, tests, mutants)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(len(self.copies)) as pool:
            try:
                for future in as_completed([pool.submit(do, *piece) for piece in work]):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in self.copies:
                    copy.stopped = True
                    copy.end_processes()
                raise

    def _judge(self, copy: Copy, tests: list[str], mutants: list[Mutant]) -> None:
        limit = 3 * self._seconds(copy, tests) + 30
        ended = copy.run(tests, limit, mutants)
        if ended.by and len(mutants) > 1 and not ended.failed:  # not even a test was reached
            self._judge(copy, tests, mutants[::2])
            self._judge(copy, tests, mutants[1::2])
            return
        for one in mutants:
            is_clear = not ended.by or len(mutants) == 1
            own = ended if is_clear else copy.run(ended.failed, limit, [one])
            self._record(**asdict(one), tests=tests, by=own.by, took=round(own.seconds, 1))
            verdict = f"killed by {own.by}" if own.by else f"survived {' '.join(tests)}"
            print(f"{own.seconds:6.1f} s {one}: {verdict}", flush=True)

    def _seconds(self, copy: Copy, tests: list[str]) -> float:
        """Returns the time of tests without a mutant, measured once for each state of the tree."""
        state = {"digest": copy.digest, "tests": tests}
        for line in read(self.results):
            if state.items() <= line.items():
                return float(line["took"])
        ended = copy.run(tests, 3600)
        if ended.by:
            sys.exit(f"Without a mutant, {' '.join(tests)} failed: {ended.by}")
        self._record(**state, took=ended.seconds)
        return ended.seconds

    def _record(self, **what: Any) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps(what) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def known(results: Path) -> dict[Key, dict[str, Any]]:
    """Returns the last result of each mutant."""
    names = ("file", "source", "nth", "column", "operator", "new")
    return {tuple(map(line.get, names)): line for line in read(results) if "by" in line}


def table(mutants: list[Mutant], results: Path) -> list[str]:
    """Counts the results by folder, and lists the mutants that survived."""
    path, judged = results.with_name("mutants_equivalent.json"), known(results)
    names = ("file", "source", "operator", "new")
    equivalent = {
        tuple(map(each.get, names)): each["reason"]
        for each in (json.loads(path.read_text()) if path.exists() else [])
    }
    counts: dict[str, Counter[str]] = {name: Counter() for name in [*FOLDERS, "all"]}
    survivors = []
    for one in mutants:
        if result := judged.get(key_of(one)):
            reason = equivalent.get(tuple(getattr(one, name) for name in names))
            verdict = "killed" if result["by"] else "equivalent" if reason else "survived"
            if verdict != "killed":
                survivors.append(f"- `{one}`: {reason or 'survived ' + ' '.join(result['tests'])}")
            folder = next(name for name in FOLDERS if Path(one.file).match(FOLDERS[name]))
            for name in (folder, "all"):
                counts[name].update(["tried", verdict])
    columns = ("tried", "killed", "survived", "equivalent")
    lines = [f"| folder | {' | '.join(columns)} |", "|---|---|---|---|---|"]
    for name, count in counts.items():
        lines.append(f"| {name} | {' | '.join(str(count[column]) for column in columns)} |")
    return [*lines, "", *survivors]


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the tests on changed code.")
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="runs of tests at a time")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("mutants.jsonl"))
    parser.add_argument("--no-suite", action="store_true", help="only the tests of each file")
    parser.add_argument("--again", action="store_true", help="run the survivors again")
    parser.add_argument("--table", action="store_true", help="run nothing, print the results")
    parser.add_argument("--write", action="store_true", help="put the table into the documents")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    mutants = draw(REPOSITORY, options.mutants, options.seed)
    if not options.table:
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
            study = Study(REPOSITORY, options.results, Path(folder), options.jobs)
            study.run(mutants, options.again, not options.no_suite)
    lines = table(mutants, options.results)
    print("\n".join(lines))
    if options.write:
        command = f"`benchmarks/mutants.py --mutants {options.mutants} --seed {options.seed}`"
        title = (
            f"## Small changes to the code\n\n{machine('pytest').partition('; ')[0]}.\n\n{command}"
        )
        write_section("mutants", "\n".join([f"{title}:", "", *lines]).rstrip())
        counts = "\n".join(line for line in lines if line.startswith("|"))
        write_section("mutants", counts, REPOSITORY / "docs" / "reliability.md")


if __name__ == "__main__":
    main()
