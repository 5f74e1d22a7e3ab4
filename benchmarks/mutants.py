"""How many of N small changes to the code the short test suite notices.

    python benchmarks/mutants.py [--mutants N] [--seed N] [--jobs N] [--folders NAME...]
                                 [--no-suite] [--again] [--table] [--write]

A mutant is one change by one operator (mutant_operators.py). The seed draws them, the same number
for each line that can change in each folder; a larger N keeps the mutants of a smaller one.

First, each mutant is run against the test file that mirrors its file, or else against the test
files that name its module; then each survivor, unless mutants_equivalent.json lists it, against the
tests that start all scripts. Those that still survive are run against the whole short suite,
several in different files at once: if that fails, each of them is run against the failed test files
alone. A failed test kills a mutant, and so does the time limit, which is three times the time of
the same tests without a mutant plus 30 s. Those tests have to pass, else the study ends.

Each result is added to mutants.jsonl, so the same command resumes an interrupted study. A result
counts until the line of its mutant changes. `--again` runs the survivors again, `--no-suite` leaves
the whole suite out, `--table` only prints the results. mutants_equivalent.json lists the survivors
that no test could notice: file, source, operator, new (as in mutants.jsonl) and the reason.
`--write` puts the table into RESULTS.md and docs/reliability.md.

The tests run in copies of the working tree. A copy has no .venv, because a mutant of `run` could
empty it: the tests use the Python that runs this study.
"""

import argparse
import contextlib
import hashlib
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

from mutant_operators import Mutant, mutants_of
from report import REPOSITORY, machine, write_section

LIBRARY = ("data", "checkpoints", "runtime", "training", "job", "models")
FOLDERS = {
    **{f"megakit/{name}": f"megakit/{name}/*.py" for name in LIBRARY},
    **{"mnist": "mnist/*.py", "scripts": "model_*.py", "run": "run"},
    "run_setup.sh": "run_setup.sh",
}
CHAINS = [
    *("test_chain.py", "test_changes.py", "test_refusals.py", "test_exit_statuses.py"),
    *("faults/test_run_machine.py", "faults/test_exact.py", "parallel/test_named_values.py"),
]
SUITE = ["tests"]
PARALLEL = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]  # as ./run tests
TOGETHER = 12  # mutants that are run against the whole suite at once


def draw(root: Path, number: int, seed: int) -> list[Mutant]:
    """Draws at least so many mutants, at most one for each line."""

    def rank(*parts: object) -> str:
        return hashlib.sha256(repr((seed, *parts)).encode()).hexdigest()

    folders: list[dict[str, list[Mutant]]] = []  # the mutants of each line, by the line's rank
    for pattern in FOLDERS.values():
        folders.append(defaultdict(list))
        for path in root.glob(pattern):
            for one in mutants_of(path.relative_to(root).as_posix(), root):
                folders[-1][rank(one.file, one.source, one.nth)].append(one)
    drawn = []
    for lines in folders:
        share = math.ceil(number * len(lines) / sum(map(len, folders)))
        for _, line in sorted(lines.items()):
            line.sort(key=lambda m: rank((m.file, m.source, m.nth, m.column, m.operator, m.new)))
            valid = (one for one in line if one.is_valid((root / one.file).read_bytes()))
            if share and (chosen := next(valid, None)):
                drawn.append(chosen)
                share -= 1
    return drawn


def tests_of(file: str, root: Path) -> list[str]:
    """Returns the tests that mirror a file, or those that name its module, or its folder's."""
    path = Path(file)
    if file == "run_setup.sh":  # `run` uses it
        return ["tests/run"]
    package, name, folder = ".".join(path.parent.parts), path.stem, f"tests/{path.parent}"
    tests = sorted(root.glob("tests/**/test_*.py" if package else "tests/test_*.py"))
    named = rf"\b{package}[./]{name}\b|from {package} import .*\b{name}\b" if package else name
    mirrors = root / folder / f"test_{name}.py", root / folder / name  # a file or a folder
    found = [mirror for mirror in mirrors if mirror.exists()]
    if not found:
        found = [test for test in tests if re.search(named, test.read_text())]
    return [test.relative_to(root).as_posix() for test in found] or [folder]


class Copy:
    """A copy of the working tree, in which one run of tests takes place at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder, self.root, self.stopped = folder, folder / "project", False
        self.root.mkdir(parents=True)
        git = ["git", f"--git-dir={self.root}/.git"]
        subprocess.run([*git, "init", "--quiet"], check=True)
        for tree, command in ((root, "add"), (self.root, "checkout-index")):
            # All files that git does not ignore, as they are now.
            subprocess.run([*git, f"--work-tree={tree}", command, "--all"], cwd=tree, check=True)
        if (root.parent / "shared").is_dir():  # where tests find MNIST
            shutil.copytree(root.parent / "shared", folder / "shared", symlinks=True)

    def run(self, tests: Sequence[str], limit: float, mutants: Sequence[Mutant] = ()) -> list[str]:
        """Runs tests with some mutants, and ends every process that they leave behind.

        Returns:
            The test files that failed, or else why the run failed; nothing if all tests passed.
        """
        temporary, output = self.folder / "tmp", self.folder / "output"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        environment = {k: v for k, v in os.environ.items() if k not in ("VENV", "PYTHON")}
        # Old bytecode would hide a change of the same length. Writing none costs no time.
        environment |= {"TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
        originals = {one.file: (self.root / one.file).read_bytes() for one in mutants}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        command += PARALLEL if tests == SUITE else []
        try:
            for one in mutants:
                (self.root / one.file).write_bytes(one.apply(originals[one.file]))
            with output.open("w") as file:
                process = subprocess.Popen(
                    command + ["-x"] * (len(mutants) == 1),
                    cwd=self.root,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            try:
                status = process.wait(0 if self.stopped else limit)
                reason = [f"status {status}"] if status else []
            except subprocess.TimeoutExpired:
                reason = ["time limit"]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.end_processes()
        finally:
            for name, text in originals.items():
                (self.root / name).write_bytes(text)
        if self.stopped:
            raise KeyboardInterrupt
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?\.py)", output.read_text(), re.M)
        return reason and (sorted({*failed}) or reason)

    def end_processes(self) -> None:
        """Kills all processes, of whatever session, whose environment names this copy's folder."""
        found = True
        while found:
            found = False
            for path in Path("/proc").glob("[0-9]*/environ"):
                with contextlib.suppress(OSError):  # it has ended, or is another user's
                    if f"{self.folder}/".encode() in path.read_bytes():
                        os.kill(int(path.parent.name), signal.SIGKILL)
                        found = True


class Study:
    """Runs mutants in copies of a tree, and adds the results to a file."""

    def __init__(self, root: Path, results: Path, folder: Path, jobs: int) -> None:
        self.results = results
        self.copies = [Copy(root, folder / str(number)) for number in range(jobs)]
        self.seconds: dict[str, float] = {}  # without a mutant, by tests

    def run(self, mutants: list[Mutant], again: bool = False, suite: bool = True) -> None:
        """Runs the mutants that have no result yet, and the survivors again if told to."""
        before, root = known(self.results), self.copies[0].root
        due = [m for m in mutants if m not in before or (again and not before[m]["failed"])]
        self._each([(tests_of(one.file, root), [one]) for one in due])

        reasons = equivalent(self.results)

        def left_after(*stages: list[str]) -> list[Mutant]:
            now = known(self.results)
            left = [m for m in mutants if not now[m]["failed"] and now[m]["tests"] not in stages]
            return [m for m in left if key(m) not in reasons]

        if not suite:
            return
        chains = [f"tests/{name}" for name in CHAINS if (root / "tests" / name).exists()]
        self._each([(chains, [one]) for one in left_after(chains, SUITE)] if chains else [])
        left = left_after(SUITE)
        parts: list[tuple[list[str], list[Mutant]]] = []
        while left:
            parts.append((SUITE, [*{one.file: one for one in left}.values()][:TOGETHER]))
            left = [one for one in left if one not in parts[-1][1]]
        self._each(parts, self.copies[:1])  # the suite itself uses all cores

    def _each(
        self, work: list[tuple[list[str], list[Mutant]]], copies: list[Copy] | None = None
    ) -> None:
        """Runs mutants against tests, one piece of work in each copy at a time."""
        copies = copies or self.copies
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)

        def do(tests: list[str], mutants: list[Mutant]) -> None:
            copy = free.get()
            try:
                self._judge(copy, tests, mutants)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(len(copies)) as pool:
            try:
                for future in as_completed([pool.submit(do, *piece) for piece in work]):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in copies:
                    copy.stopped = True
                    copy.end_processes()
                raise

    def _judge(self, copy: Copy, tests: list[str], mutants: list[Mutant]) -> None:
        if (name := " ".join(tests)) not in self.seconds:
            began = time.monotonic()
            if failed := copy.run(tests, 3600):
                sys.exit(f"Without a mutant, {name} failed: {' '.join(failed)}")
            self.seconds[name] = time.monotonic() - began
        limit = 3 * self.seconds[name] + 30
        failed = copy.run(tests, limit, mutants)
        if len(mutants) > 1 and failed and not failed[0].startswith("tests"):
            self._judge(copy, tests, mutants[::2])
            self._judge(copy, tests, mutants[1::2])
            return
        for one in mutants:
            if len(mutants) > 1 and failed:
                self._record(one, tests, copy.run(failed, limit, [one]))
            else:
                self._record(one, tests, failed)

    def _record(self, one: Mutant, tests: list[str], failed: list[str]) -> None:
        line = {"tests": tests, "failed": failed, "mutant": asdict(one)}
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{'killed  ' if failed else 'survived'} {one}: {' '.join(failed or tests)}", flush=True
        )


def known(results: Path) -> dict[Mutant, dict[str, list[str]]]:
    """Returns the last result of each mutant."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {Mutant(**line["mutant"]): line for line in map(json.loads, lines)}


def folder_of(one: Mutant) -> str:
    """Returns the table's name of a mutant's folder."""
    return next(name for name in FOLDERS if Path(one.file).match(FOLDERS[name]))


def key(one: Mutant) -> tuple[str, str, str, str]:
    return one.file, one.source, one.operator, one.new


def equivalent(results: Path) -> dict[tuple[str, str, str, str], str]:
    """Returns why no test can notice a mutant, by its key."""
    path = results.with_name("mutants_equivalent.json")
    listed = json.loads(path.read_text()) if path.exists() else []
    return {
        (each["file"], each["source"], each["operator"], each["new"]): each["reason"]
        for each in listed
    }


def table(mutants: list[Mutant], results: Path) -> list[str]:
    """Counts the results by folder, and lists the mutants that survived."""
    judged, reasons = known(results), equivalent(results)
    counts: dict[str, Counter[str]] = {name: Counter() for name in [*FOLDERS, "all"]}
    survivors = []
    for one in filter(judged.__contains__, mutants):
        reason = reasons.get(key(one))
        verdict = "equivalent" if reason else "survived"
        if judged[one]["failed"]:
            verdict = "killed"
        else:
            survivors.append(f"- `{one}`: {reason or 'survived ' + ' '.join(judged[one]['tests'])}")
        for name in (folder_of(one), "all"):
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
    parser.add_argument(
        "--folders", nargs="*", choices=FOLDERS, default=[*FOLDERS], help="by default all"
    )
    parser.add_argument("--again", action="store_true", help="run the survivors again")
    parser.add_argument("--table", action="store_true", help="run nothing, print the results")
    parser.add_argument("--write", action="store_true", help="put the table into the documents")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    mutants = draw(REPOSITORY, options.mutants, options.seed)
    if not options.table:
        with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
            study = Study(REPOSITORY, options.results, Path(folder), options.jobs)
            chosen = [one for one in mutants if folder_of(one) in options.folders]
            study.run(chosen, options.again, not options.no_suite)
    lines = table(mutants, options.results)
    print("\n".join(lines))
    if options.write:
        where = machine("pytest").partition("; ")[0]
        command = f"`benchmarks/mutants.py --mutants {options.mutants} --seed {options.seed}`"
        text = ["## Small changes to the code", "", f"{where}.", "", f"{command}:", "", *lines]
        write_section("mutants", "\n".join(text).rstrip())
        counts = "\n".join(lines[: lines.index("")])
        write_section("mutants", counts, REPOSITORY / "docs" / "reliability.md")


if __name__ == "__main__":
    main()
