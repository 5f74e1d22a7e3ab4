"""Runs a learner's program under an exercise's layouts, and compares what it prints."""

import contextlib
import copy
import faulthandler
import gc
import json
import math
import os
import re
import runpy
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exercises.course import FIRST, FOLDER, ROOT, Exercise, Layout, Mistake, edited

#: The largest relative difference of losses and norms that rounding explains in float32.
ROUNDING = 3e-6
#: A relative difference that rounding explains on no processor, at least in the first steps.
CLEAR = 1e-4
#: Seconds after which a run counts as hanging if none of its ranks has got on.
IDLE = 18
#: Seconds of a processor after which a rank counts as hanging; most need one or two.
ENDLESS = 60.0
#: Seconds after which a run is given up in any case.
LIMIT = 600.0
HANGS = "it hangs: a rank waits for a call that another one does not make"
UNEQUAL = "the ranks of a group send and expect different sizes: they make different calls"
#: What the programs print: a step, the loss, and maybe a norm.
LINE = re.compile(r"\d+( (-?\d+\.\d{9}|-?inf|nan))+")
#: Lines of its own that are shown of each rank.
PRINTS = 10
KNOWN = FOLDER / "known_mistakes.json"

#: What a program prints, by step: the loss, and with some programs the norm of the gradient.
Values = dict[int, tuple[float, ...]]
#: By what an outcome is recognized: the error; or the first step that it prints, the first one
#: that is wrong (0: none), and this step's values. Later, rounding may have grown.
Mark = list[float] | str


class Outcome(NamedTuple):
    """What a program did under a layout.

    Attributes:
        values: What it printed, by step; empty if it failed.
        error: The last line of its traceback, or that it hung; empty if it did not fail.
        where: The line of its own code where this was.
        prints: The first other lines that it printed, each with its rank.
        besides: What is wrong besides the values.
        right: What it has to print.
    """

    values: Values
    error: str = ""
    where: str = ""
    prints: tuple[str, ...] = ()
    besides: str = ""
    right: Values = Values()

    @property
    def wrong(self) -> int | None:
        """The first step with wrong values."""
        return first_wrong(self.values, self.right)

    @property
    def mark(self) -> Mark:
        """By what it is recognized."""
        if self.error or not self.values:
            return self.error[:100] or "nothing is printed"
        last = max(self.values) if self.wrong else 0
        step = first_wrong(self.values, self.right, CLEAR) or last
        return [min(self.values), step, *self.values.get(step, ())]


def watch(busy: Path) -> None:
    """Ends this rank, and says where it was, when no rank of its job gets on any more.

    A rank that computes, or whose program is at another place than before, touches a file of the
    job. The clock alone would not do: on a busy machine, any run may take long.
    """
    idle, place, used = 0, (0, 0), 0.0
    while idle < IDLE and used < ENDLESS:
        touched, before, earlier = busy.stat().st_mtime_ns, place, used
        time.sleep(1)
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        place, used = (id(frame), frame.f_lasti), time.process_time()
        if place != before or used - earlier > 0.05:  # a rank that waits uses 0.01
            busy.touch()
        idle = idle + 1 if busy.stat().st_mtime_ns == touched else 0
    # In turns: the lines of two ranks would mix.
    faulthandler.dump_traceback_later(0.01 + 0.5 * int(os.environ["RANK"]))
    time.sleep(5)  # the other ranks say where they are, too
    os._exit(1)


def refuse_what_is_not_loaded() -> None:
    """Lets a training that loads begin with other weights, and loads nothing in place.

    Otherwise a training from the start would be right, and one that drops what it has loaded.
    """
    from megatron.core import dist_checkpointing

    from megakit import models

    load, seeded = dist_checkpointing.load, models.seeded
    dist_checkpointing.load = lambda state, *more: load(copy.deepcopy(state), *more)
    models.seeded = lambda seed, name: seeded(seed + 1, name)


def train(path: str, arguments: Sequence[str], folder: Path) -> tuple[int, int, float]:
    """Runs a program as one rank of a job, whose output goes to a file, also if it fails.

    Returns:
        How many of the autoencoder's samples it reads, how many chunks its model has, and how many
        numbers an optimizer of which each rank stores a part has for each weight.
    """
    from megatron.core import parallel_state
    from torch import Tensor, distributed
    from torch.utils._pytree import tree_leaves

    from mnist.samples import TrainingSamples

    os.chdir(folder)
    Path("busy").touch()
    threading.Thread(target=watch, args=(folder / "busy",), daemon=True).start()
    if "--load" in arguments:
        refuse_what_is_not_loaded()
    if "--save" in arguments:
        from megakit.runtime.writer_threads import write_in_threads

        write_in_threads()  # Megatron's writers are processes that would import the program again
    read, reads = TrainingSamples.__getitem__, 0

    def read_and_count(samples: TrainingSamples, some: slice) -> Any:
        nonlocal reads
        reads += some.stop - some.start
        return read(samples, some)

    end, stored = distributed.destroy_process_group, 0.0

    def count_and_end() -> None:  # the last call of main
        nonlocal stored
        for one in gc.get_objects():
            if type(one).__name__ == "ShardedAdam":
                state = (x for x in tree_leaves(vars(one)) if isinstance(x, Tensor))
                weights = sum(weight.numel() for weight in one.model.parameters())
                stored = sum(tensor.numel() for tensor in state) / weights
        end()

    distributed.destroy_process_group = count_and_end  # type: ignore[assignment]
    TrainingSamples.__getitem__ = read_and_count  # type: ignore[method-assign]
    sys.argv = [path, *arguments]
    path_of_prints = Path(f"prints-{os.environ['RANK']}")
    with path_of_prints.open("w") as prints, contextlib.redirect_stdout(prints):
        runpy.run_path(path, run_name="__main__")
    return reads, parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1, stored


def run(ranks: Any, path: Path, options: str, number: int) -> Outcome:
    """Runs a program on some ranks of a pool, in the folder where its checkpoint is."""
    from megakit.testing import RankError

    try:
        told = ranks.run(train, str(path), options.split(), Path.cwd(), world_size=number)
    except RankError as error:
        return failure(str(error), path)._replace(prints=read_prints(number)[1])
    values, prints = read_prints(number)
    reads, (_, chunks, stored) = sum(one[0] for one in told), told[0]
    asked = dict(re.findall(r"--(\S+) (\d+)", options))
    shared = int(asked.get("tensor-parallel", 1)) * int(asked.get("pipeline-parallel", 1))
    excess = reads // shared - len(values) * int(asked["batch-size"])
    besides = f"its ranks read {excess} samples too many" if reads and excess else ""
    if chunks != int(asked.get("chunks", 1)):
        besides = f"a stage has {chunks} part of the model, not {asked['chunks']}"
    if number == 4 and shared == 1 and stored >= 2:  # 0.75 if Adam's state is divided
        besides = f"each rank's optimizer has {stored:.2g} numbers for each weight"
    return Outcome(values, prints=prints, besides=besides)


def read_prints(number: int) -> tuple[Values, tuple[str, ...]]:
    """Returns the values that the ranks of a job printed, and their other lines."""
    values, others = Values(), dict[int, list[str]]()
    for rank in range(number):
        path = Path(f"prints-{rank}")
        for line in path.read_text().splitlines() if path.exists() else ():
            if LINE.fullmatch(line):
                step, *numbers = line.split()
                values[int(step)] = tuple(map(float, numbers))
            else:
                others.setdefault(rank, []).append(f"rank {rank}: {line}")
        path.unlink(missing_ok=True)
    return values, tuple(line for lines in others.values() for line in lines[:PRINTS])


def failure(report: str, path: Path) -> Outcome:
    """Returns what a rank's report says: the error, and the program's innermost line."""
    lines = report.strip().splitlines()
    own = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', report)
    if "Timeout (" in report or "gave no result" in report:  # its traceback begins inside
        threads = report.split("Timeout (")[1:]
        waits = [re.findall(rf'File "{re.escape(str(path))}", line (\d+)', one) for one in threads]
        return Outcome({}, HANGS, " and ".join(f"line {one[0]}" for one in waits if one))
    if "enforce fail" in report:
        return Outcome({}, UNEQUAL)
    errors = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    says = " ".join(map(str.strip, lines[(errors or [-1])[-1] :]))
    return Outcome({}, says[:300], f"line {own[-1]}" if own else "")


def right_values(ranks: Any, exercise: Exercise) -> Values:
    """Returns the values of plain PyTorch, or of the exercise's program in one process."""
    path = ROOT / FIRST[exercise.program]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if exercise.adds:
            path = Path("solution.py")
            path.write_text(exercise.solution)
        return run(ranks, path, exercise.small, 1).values


def outcomes_of(ranks: Any, exercise: Exercise, path: Path, right: Values) -> Iterator[Outcome]:
    """Yields what a program does under each layout of its exercise, until it hangs."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for layout in exercise.layouts:
            outcome = run(ranks, path, f"{exercise.small} {layout.options}", layout.ranks)
            yield outcome._replace(right=expected(right, layout))
            if outcome.error == HANGS:
                return


def expected(right: Values, layout: Layout) -> Values:
    """Returns what a layout has to print."""
    first, last = layout.steps or (1, len(right))
    return {step: row for step, row in right.items() if first <= step <= last}


def first_wrong(values: Values, right: Values, bound: float = ROUNDING) -> int | None:
    """Returns the first step with other values, None for none; one that lacks counts as other."""
    for step in sorted(values.keys() | right.keys()):
        if step not in values or step not in right or not alike(values[step], right[step], bound):
            return step
    return None


def alike(some: Sequence[float], others: Sequence[float], bound: float = ROUNDING) -> bool:
    """Whether values agree up to rounding; plain PyTorch may print fewer of them."""
    return all(
        abs(a - b) <= bound * abs(b) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(some, others, strict=False)
    )


def measure(ranks: Any, exercise: Exercise) -> dict[str, list[Outcome]]:
    """Makes each known mistake; returns what it does under each layout, by the mistake's name."""
    found, right = {}, right_values(ranks, exercise)
    for mistake in exercise.mistakes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{exercise.name}.py")
            path.write_text(edited(exercise.solution, mistake.edits))
            found[mistake.name] = [*outcomes_of(ranks, exercise, path, right)]
    return found


def diagnose(exercise: Exercise, outcomes: Sequence[Outcome]) -> list[Mistake]:
    """Returns the known mistakes that give these outcomes under all layouts."""
    known: dict[str, list[Mark]] = json.loads(KNOWN.read_text())[exercise.name]
    # Which rank fails first may differ, and with it the sizes in the error.
    for ignored in ("^$", r"\d+"):
        if found := [one for one in exercise.mistakes if fit(outcomes, known[one.name], ignored)]:
            return found
    return []


def fit(outcomes: Sequence[Outcome], marks: Sequence[Mark], ignored: str = "^$") -> bool:
    """Whether outcomes have the marks of a mistake, but for a pattern that errors may have."""
    return len(outcomes) == len(marks) and all(map(fits, outcomes, marks, [ignored] * len(marks)))


def fits(outcome: Outcome, mark: Mark, ignored: str) -> bool:
    """Whether an outcome has a mark."""
    own = outcome.mark
    if isinstance(own, str) or isinstance(mark, str):
        return re.sub(ignored, "", str(own)) == re.sub(ignored, "", str(mark))
    first, step, *values = mark
    if not step:
        return outcome.wrong is None
    found = outcome.values.get(int(step), ())
    return own[0] == first and len(found) == len(values) and alike(found, values)
