"""How many of N mutated checkpoints were refused or did no harm.

    python benchmarks/attacks.py [--attacks N] [--seed N] [--only TEXT] [--write]

Each attack changes a real checkpoint, lists its files again in its manifest with their sizes and
sha256, and uses the checkpoint in one of three ways, in turn: to resume a run that was stopped
half-way, to start fine-tuning, or to predict. Every second run has
TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in its environment. Two runs at a time, each a fork of this
process, which has imported the stack.

A run passes if

- no code of the attacker ran: no payload left its trace, and an audit hook in the run recorded no
  command, no connection but to this machine, no opened canary and nothing written outside the
  output directory; no class of pathlib, torch or Megatron has got other attributes;
- neither standard error nor log.txt holds a traceback, and standard error no control character;
- it ended within 60 s, and used less than 2 GB of memory more than the stack;
- it was refused (status 2 and a message in the last line) or harmless (status 0 and the right
  result). The right result is the one of the original checkpoint: the same metrics.csv of the
  training, the same predictions.csv. Where a mutation may have changed numbers, such as the bytes
  of weights, a complete result is right as well: metrics.csv of the same steps and a last
  checkpoint that is intact, or predictions of every image. A resumption may set the mutated
  checkpoint aside and go on from the one before.

`--only` runs the mutations whose kind and name hold a text. `--write` puts the table into
RESULTS.md.
"""

import argparse
import csv
import functools
import importlib
import os
import random
import signal
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import attack_runs
from attack_mutations import Mutation, attack, in_turn
from attack_originals import USES, Originals, command
from attack_runs import End
from attack_watch import Sandbox
from report import machine, write_section

from megakit.checkpoints.manifest import list_checkpoints, verify
from megakit.errors import UserError
from megakit.job.launch import run_in_fork
from mnist.tutorial import TutorialOptions, import_stack

AT_A_TIME = 2


@dataclass
class Attack:
    """One mutated checkpoint in use.

    Attributes:
        number: Which attack.
        mutation: What is done to the checkpoint.
        use: A name among `USES`.
        forced: Whether torch is told to load pickles without restriction.
        sandbox: Its folder.
    """

    number: int
    mutation: Mutation
    use: str
    forced: bool
    sandbox: Sandbox
    process: int = 0
    began: float = 0.0

    def start(self, originals: Originals, seed: int) -> None:
        """Mutates a checkpoint and starts a script on it."""
        dice = random.Random(f"{seed}-{self.number}")
        victim = originals.prepare(self.use, self.sandbox, dice)
        # In a process of its own: torch's threads, once started, do not survive a fork.
        if status := run_in_fork(lambda: attack(self.mutation, victim)):
            raise RuntimeError(f"{self.mutation.kind}, {self.mutation.name}: status {status}")
        use = USES[self.use]
        options = () if self.use == "resume" else ("--checkpoint", str(victim.folder))
        started = command(use, self.sandbox, originals.no_data, *options)
        force = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"} if self.forced else {}
        self.process = attack_runs.start(*started, force)
        self.began = time.monotonic()

    def wrong_result(self, originals: Originals) -> str | None:
        """What is wrong with the result of a run that ended with status 0."""
        use = USES[self.use]
        right, found = originals.whole.out / use.result, self.sandbox.out / use.result
        if not found.is_file():
            return f"no {use.result}"
        if found.read_bytes() == right.read_bytes():
            return None
        if not self.mutation.changes_numbers:
            return f"{use.result} differs"
        if _first_column(found) != _first_column(right):
            return f"{use.result} is incomplete"
        if self.use != "predict":
            try:
                verify(list_checkpoints(found.parent / "checkpoints")[-1])
            except (UserError, IndexError) as error:
                return f"no intact checkpoint: {error}"
        return None


def _first_column(path: Path) -> list[str]:
    """The steps of metrics.csv, or the images of predictions.csv."""
    with path.open(newline="") as file:
        return [row[0] for row in csv.reader(file) if row]


def run_all(
    attacks: list[Attack],
    originals: Originals,
    seed: int,
    report: Callable[[Attack, End, list[str]], None],
) -> None:
    """Runs all attacks, `AT_A_TIME` at once, and reports on each."""
    waiting = attacks[::-1]
    running: list[Attack] = []
    try:
        while waiting or running:
            while waiting and len(running) < AT_A_TIME:
                running.append(waiting.pop())
                running[-1].start(originals, seed)
            time.sleep(0.02)
            for one in list(running):
                end = attack_runs.finish(one.process, one.began, one.sandbox)
                if end is not None:
                    running.remove(one)
                    wrong = functools.partial(one.wrong_result, originals)
                    found = attack_runs.problems(end, USES[one.use].script, wrong)
                    report(one, end, found)
                    attack_runs.remove(one.sandbox.folder)
    finally:
        for one in running:
            os.kill(one.process, signal.SIGKILL)


def prepare_for_forks() -> None:
    """Imports what the scripts need; matplotlib makes its folders, which no run may."""
    import_stack(TutorialOptions(dataset="digits", accelerator="cpu"))
    for module in ("matplotlib.font_manager", "megakit.reporting.figures", "mnist.report"):
        importlib.import_module(module)


def draw(folder: Path, number: int, seed: int, only: str) -> list[Attack]:
    """So many attacks: the three ways to use a checkpoint in turn, and both environments."""
    chosen = in_turn(seed, number, only)
    uses = list(USES)
    return [
        Attack(
            number=at,
            mutation=mutation,
            use=uses[at % len(uses)],
            forced=at // len(uses) % 2 == 1,
            sandbox=Sandbox(folder / f"attack-{at}"),
        )
        for at, mutation in enumerate(chosen)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Uses mutated checkpoints.")
    parser.add_argument("--attacks", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="mutations whose kind and name hold this text")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    began = time.monotonic()
    prepare_for_forks()
    counts: Counter[tuple[str, str]] = Counter()

    def report(one: Attack, end: End, found: list[str]) -> None:
        verdict = "failed" if found else "refused" if end.status else "harmless"
        counts[one.mutation.kind, verdict] += 1
        what = f"{one.use}{', forced' * one.forced}: {one.mutation.kind}, {one.mutation.name}"
        wrong = f": {'; '.join(found)}" if found else ""
        print(f"{one.number + 1:3} {verdict:8} {end.seconds:4.1f} s {what!r}{wrong}", flush=True)
        if found:
            traced = end.log.partition("Traceback")[2]
            for part in (end.err[-1000:], traced[-1000:]):
                print(textwrap.indent(part, "      | "), flush=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        originals = Originals.make(Path(folder).resolve())
        attacks = draw(Path(folder).resolve(), options.attacks, options.seed, options.only)
        run_all(attacks, originals, options.seed, report)
    failed = sum(count for (_, verdict), count in counts.items() if verdict == "failed")
    result = f"{len(attacks) - failed} of {len(attacks)} refused or harmless"
    minutes = (time.monotonic() - began) / 60
    text = (
        "## Checkpoints from a stranger\n\n"
        f"{machine('nemo_toolkit', 'megatron-core').partition('; ')[0]}.\n\n"
        f"`benchmarks/attacks.py --attacks {options.attacks} --seed {options.seed}`: "
        f"**{result}**; {minutes:.0f} minutes.\n\n" + "\n".join(table(counts))
    )
    print(f"{result}\n\n" + "\n".join(table(counts)))
    if options.write:
        write_section("attacks", text)
    return int(failed > 0)


def table(counts: Counter[tuple[str, str]]) -> list[str]:
    """Attacks by kind of mutation and by how they ended."""
    verdicts = ("refused", "harmless", "failed")
    lines = ["| mutation of | tried | refused | harmless | failed |", "|---|---|---|---|---|"]
    for kind in sorted({kind for kind, _ in counts}):
        each = [counts[kind, verdict] for verdict in verdicts]
        lines.append(f"| {kind} | {sum(each)} | {' | '.join(map(str, each))} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
