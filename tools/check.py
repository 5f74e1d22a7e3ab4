"""Says whether a Megatron training computes the same under every layout, and which weight does not.

    ./run check PROGRAM.py [its options] [--layouts TP2,SP,PP2xDP2]

runs the program's first step in one process and under each layout, from the same weights, and
compares samples, loss, gradients, norm and update. Nothing of the program is changed.

A layout names kinds and their sizes: TP tensor parallel, SP sequence parallel, PP pipeline
parallel, VP interleaved stages, DP data parallel, DO the distributed optimizer, CP context
parallel, EP expert parallel, MB samples of a micro batch. Exit status: 0 all are right; 1 one is
wrong, a named one fails, or none was checked; 2 wrong options.
"""

import argparse
import json
import os
import runpy
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megakit.errors import UserError

from . import ranks
from .alone import judge_alone, notes_of
from .float64 import compute_in_float64
from .judge import SAFETY, Judgement
from .programs import DEFAULT, Layout, Words, hide_gpus, parse_layout
from .ranks import FailedError, prepare_once, run_ranks, telling
from .recorder import prepare, run
from .step_values import StepValues, watch_weights
from .steps import Finding, Step

FOLDER = Path("runs/check")
ONE = Layout("one process", {})
COLUMNS = ("loss", "gradients", "norm", "update")
#: Options of a small step, unless the user has given them.
SMALL = (
    (("--global-batch-size", "--batch-size"), "8"),
    (("--micro-batch-size",), "2"),
    (("--precision",), "32"),
)


@dataclass
class Verdict:
    """What is said of a layout."""

    layout: str
    ranks: int
    verdict: str = "right"
    step: int = 1
    differences: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    communicates: str = ""
    draws: bool = False  # other first weights than one process
    seconds: float = 0.0


class Checker:
    """Runs a program under layouts, and judges its steps.

    Args:
        mine: The command's own options.
        options: Those of the program.
        words: Its options for layouts.
        folder: For what the ranks write.
    """

    def __init__(
        self, mine: argparse.Namespace, options: Sequence[str], words: Words, folder: Path
    ) -> None:
        self.program, self.steps, self.causal = mine.program, mine.steps, mine.causal
        self.words, self.folder, self.right = words, folder, list[Step]()
        small: list[str] = []  # before the user's own, which count
        for names, value in (*SMALL, (("--output-dir",), str(folder / "runs"))):
            if (word := words.find(names)) and word not in options:
                small += [word, value]
        self.options = [*small, *options]

    def record(self, layout: Layout) -> list[Step]:
        """Runs the steps under a layout, and returns them."""
        own, first = self.folder / layout.name, self.folder / ONE.name
        logs = FOLDER / layout.name
        for folder in (own, logs):
            folder.mkdir(parents=True, exist_ok=True)
        options = [*self.options, *self.words.options(layout)]

        def values(rank: int) -> Iterator[tuple[StepValues, bool]]:
            for n in range(self.steps):
                right = first / f"0.{n}" if self.right else None
                yield StepValues(own / f"{rank}.{n}", right, self.causal), n + 1 == self.steps

        def work(rank: int) -> None:
            run(self.program, options, own / f"{rank}.json", values(rank))

        run_ranks(self.program, layout.ranks, own, logs, work)
        files = [[own / f"{rank}.{n}" for rank in range(layout.ranks)] for n in range(self.steps)]
        if not all(file.exists() for files_of_step in files for file in files_of_step):
            raise UserError(
                f"{self.program}: makes fewer than {self.steps} training steps by Megatron's "
                "schedule, get_forward_backward_func(), or in `with record(model)`."
            )
        return [Step([torch.load(file) for file in files_of_step]) for files_of_step in files]

    def judge(self, layout: Layout) -> Verdict:
        """Runs the steps under a layout, and says whether they are right."""
        begin = time.monotonic()
        found = Verdict(layout.name, layout.ranks)
        steps = self.record(layout)
        self.right = self.right or steps
        for number, (right, step) in enumerate(zip(self.right, steps, strict=True)):
            judged = Judgement(right, step)
            found.differences = judged.differences
            found.draws |= number == 0 and judged.has_other_first_weights()
            found.findings = [*judged.findings, *(judge_alone(step) if layout == ONE else ())]
            found.step = number + 1
            if found.findings:
                found.verdict = f"wrong: {found.findings[0].value}" + f" of step {number + 1}" * (
                    number > 0
                )
                found.communicates = communication(step)
                break
        found.seconds = time.monotonic() - begin
        return found

    def judge_or_fail(self, layout: Layout) -> Verdict:
        """Returns what is said of a layout, also if the program fails or hangs under it."""
        try:
            return self.judge(layout)
        except (FailedError, ValueError) as error:
            verdict = "hangs" if "the ranks hang" in str(error) else "fails"
            if verdict == "hangs":
                ranks.PATIENCE = 15  # the next ones will not take longer
            reason = [Finding("error", str(error))]
            return Verdict(layout.name, layout.ranks, verdict, findings=reason)


def communication(step: Step) -> str:
    """Returns in words what rank 0 communicates in a step."""
    events = (one for one in step.ranks[0]["events"] if "group" in one)
    found = Counter((one["group"], one["kind"]) for one in events)
    return ", ".join(f"{count} {kind} ({group})" for (group, kind), count in found.items())


def help_of(program: Path, folder: Path) -> str:
    """Returns what the program's --help prints."""

    def work(_: int) -> None:
        prepare(program)
        sys.argv = [str(program), "--help"]
        runpy.run_path(str(program), run_name="__main__")

    try:
        run_ranks(program, 1, folder, folder, work)
    except (FailedError, UserError):
        return ""
    return (folder / "0.txt").read_text()


def rows_of(found: Verdict, before: Sequence[Verdict] = ()) -> Iterator[str]:
    """Yields the row of a layout, and below it what is wrong, unless it is as with one before."""
    cells = [f"{found.layout:14}{found.ranks:>5}"]
    for column in COLUMNS:
        value = found.differences.get(column)
        cells.append(f"{'' if value is None else f'{value:.1e}' if value else '0':>11}")
    yield f"{''.join(cells)}   {found.verdict}"
    same = [v.layout for v in before if v.findings[:1] == found.findings[:1] and v.findings]
    if same:
        yield f"    as with {same[0]}"
        return
    for one in found.findings[:1]:
        yield f"    {one.value}, {one.text}"
        yield from (f"        {line}" for line in one.details)
        if one.cause:
            yield f"    Usually: {one.cause}"
    values = dict.fromkeys(one.value for one in found.findings)
    if others := [*values][1:]:
        yield f"    After it, this is wrong, too: {', '.join(others)}"
    if found.communicates:
        yield f"    Rank 0 communicates: {found.communicates}"


def layouts_of(mine: argparse.Namespace) -> list[Layout]:
    """Returns the layouts to check.

    Raises:
        UserError: A number is below 1, or a name is not one of a layout.
    """
    numbers = {"--steps": mine.steps, "--max-ranks": mine.max_ranks}
    problems = [f"{n} {size}: has to be at least 1." for n, size in numbers.items() if size < 1]
    rule = "expected NAME=OPTIONS, such as 'TP=--tp {}' or 'TP2=--tp 2'."
    problems += [f"--layout {one}: {rule}" for one in mine.layout if "=" not in one]
    if problems:
        raise UserError(problems)
    given = [parse_layout(one.partition("=")[0]).name for one in mine.layout]
    every = dict.fromkeys([*DEFAULT, *(name for name in given if name[-1].isdigit())])
    return [parse_layout(name) for name in (mine.layouts.split(",") if mine.layouts else every)]


def omitted(layout: Layout, right: dict[str, Any], mine: argparse.Namespace) -> str:
    """Returns why a layout that nobody has named is not checked; empty if it is.

    Args:
        layout: The layout.
        right: What one process recorded.
        mine: The command's own options.
    """
    if layout.ranks > mine.max_ranks:
        return f"more ranks than --max-ranks {mine.max_ranks}"
    if "EP" in layout.sizes and not right["experts"] and not mine.layout:
        return "the model has no experts"
    if "MB" in layout.sizes and right["balances"]:
        return "the router's auxiliary loss is one of each micro batch"
    return ""


def check(mine: argparse.Namespace, options: Sequence[str], folder: Path) -> int:
    """Checks all layouts, prints what is found, and returns the exit status."""
    layouts = layouts_of(mine)
    most = max(layout.ranks for layout in layouts)
    hide_gpus(most if mine.layouts else min(most, mine.max_ranks))
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not mine.float32:
        compute_in_float64()
    prepare_once(mine.program, FOLDER / "start.log")
    watch_weights()
    given = dict(one.partition("=")[::2] for one in mine.layout)
    checker = Checker(mine, options, Words(help_of(mine.program, folder), given), folder)
    try:
        found = [checker.judge(ONE)]
    except FailedError as error:
        if mine.float32:
            raise
        print(f"Not in float64, but in float32: {error}", file=sys.stderr, flush=True)
        shutil.rmtree(folder)
        os.execv(sys.executable, [*sys.orig_argv, "--float32"])  # torch's names are changed here
    right = checker.right[0]
    say = partial(print, sep="\n", file=sys.stderr if mine.json else sys.stdout, flush=True)
    say(*heading(mine.program, right), *rows_of(found[0]))
    skipped: defaultdict[str, list[str]] = defaultdict(list)
    for layout in layouts:
        if not mine.layouts and (reason := omitted(layout, right.ranks[0], mine)):
            skipped[reason].append(layout.name)
            continue
        try:
            found.append(checker.judge_or_fail(layout))
        except UserError as error:
            skipped[" ".join(error.problems)].append(layout.name)
        else:
            say(*rows_of(found[-1], found[:-1]))
    accepted = {"right"} if mine.layouts else {"right", "fails"}
    wrong = [one.layout for one in found if one.verdict not in accepted]
    is_checked = any(one.verdict != "fails" for one in found[1:])
    say("", *remarks(right, found, skipped))
    if wrong:
        say(f"Wrong: {', '.join(wrong)}.")
    else:
        say("No layout is wrong." if is_checked else "No layout was checked.")
    if mine.json:
        layouts_found = [asdict(one) for one in found]
        print(json.dumps({"program": str(mine.program), "layouts": layouts_found, **skipped}))
    return int(bool(wrong or (mine.layouts and skipped) or not is_checked))


def remarks(right: Step, found: Sequence[Verdict], skipped: dict[str, list[str]]) -> Iterator[str]:
    """Yields what may be intended, and what was not checked, and why."""
    yield from (f"Note: {note}." for note in notes_of(right))
    if others := [one.layout for one in found if one.draws]:
        yield (
            f"Note: other first weights than in one process are drawn under {', '.join(others)}; "
            "here, all begin with the same."
        )
    yield from (f"Not checked: {', '.join(names)} ({reason})." for reason, names in skipped.items())
    if any("--help" in reason for reason in skipped):
        yield "--layout 'TP=--tp {}' says what the program calls a kind, 'TP2=...' one layout."


def heading(program: Path, right: Step) -> Iterator[str]:
    """Yields what is said of the step of one process, and the heads of the columns."""
    norm = right.ranks[0]["norm"]
    kinds = sorted({str(one.dtype)[6:] for one in right.ranks[0]["tensors"]["weight"]})
    judged = Judgement(right, right)
    yield (
        f"{program.name}: loss {right.loss:.9g}{'' if norm is None else f', norm {norm:.9g}'}; "
        f"{len(right.shapes)} weights, {' and '.join(kinds)}."
    )
    yield (
        f"Rounding explains relative differences up to {judged.bound:.1e}, "
        f"{SAFETY} x {judged.epsilon:.1e} x the root of {judged.terms} terms.\n"
    )
    yield f"{'layout':14}{'ranks':>5}{''.join(f'{column:>11}' for column in COLUMNS)}"


def main() -> int:
    """Runs the command and returns its exit status."""
    name = os.environ.get("MEGAKIT_COMMAND", "check")
    kind: Any = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=name, description=__doc__, formatter_class=kind, allow_abbrev=False
    )
    parser.add_argument("program", type=Path, metavar="PROGRAM")
    parser.add_argument(
        "--layouts",
        metavar="NAMES",
        help="with commas; by default, all that the program has options for",
    )
    where = (
        "the program's own options for a layout, if its --help does not name them; several times"
    )
    parser.add_argument("--layout", metavar="NAME=OPTIONS", action="append", default=[], help=where)
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=1,
        help="number of steps (default: 1); each begins with the weights of one process",
    )
    parser.add_argument(
        "--max-ranks",
        metavar="N",
        type=int,
        default=8,
        help="largest number of processes (default: 8)",
    )
    where = "do not compute in float64 what the program computes in float32"
    parser.add_argument("--float32", action="store_true", help=where)
    where = "check that it is causal, though none of its modules has `attn_mask_type`"
    parser.add_argument("--causal", action="store_true", help=where)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    mine, options = parser.parse_known_args()
    with telling(name):
        if not mine.program.is_file():
            raise UserError(f"{mine.program}: there is no such program.")
        with tempfile.TemporaryDirectory() as folder:
            return check(mine, options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
