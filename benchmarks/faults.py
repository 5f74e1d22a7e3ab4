"""How many of N runs that were disturbed at random moments came out bit-identical.

    python benchmarks/faults.py [--runs N] [--seed N] [--write]

Each run is disturbed once or twice, drawn by the seed: killed with SIGKILL at a call of one of the
functions that train, save, clean up or report, which has to happen, or any number of seconds after
its start; hung up with SIGHUP; left without a reader of its messages; its checkpoints swapped
between two starts. Then it is started again and compared with one that nothing happened to: weights
and optimizer states byte by byte, metrics.csv, TensorBoard's curves, names of checkpoints, the
choice of the best, and processes left behind. A run that ended before its disturbance does not
count. `--write` puts the count into RESULTS.md.
"""

import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from report import REPOSITORY, machine, parser_of, write_section

# Some packages install a `tests` of their own; this one is ours.
sys.modules["tests"] = tests = ModuleType("tests")
tests.__path__ = [str(REPOSITORY / "tests")]

from megakit.checkpoints.manifest import checkpoint_name, list_checkpoints  # noqa: E402
from tests.faults.harness import PLACES, Fault, Training  # noqa: E402

#: How often each kind is drawn, and the exit statuses that it may end with.
KINDS = {"SIGKILL": 4, "SIGHUP": 1, "closed pipe": 1, "swapped checkpoints": 1}


def disturb(
    training: Training, kind: str, dice: random.Random, seconds: float, is_first: bool
) -> tuple[bool, str]:
    """Starts a run and disturbs it; returns whether the disturbance came in time, and what it was.

    Only the first start of a run is disturbed at a call of a function: it passes all of them. A
    disturbance after some seconds comes too late if the run ends before.

    Raises:
        AssertionError: The run ended otherwise than it has to, or passed the place without a fault.
    """
    if kind in ("SIGKILL", "SIGHUP"):
        fault = replace(draw(dice, seconds, is_first), name=kind)
        status = training.start(fault).status
        is_stopped = status == (-9 if kind == "SIGKILL" else 129)
        # A late fault finds no process; SIGHUP after the last step stops nothing.
        may_end = status == 0 and (fault.place is None or kind == "SIGHUP")
        assert is_stopped or may_end, f"status {status} after {fault}"
        return is_stopped or fault.place is not None, str(fault)
    if kind == "closed pipe":
        status = training.start_without_reader()
        assert status == 0, f"status {status} without a reader"
        return True, kind
    training.start(draw(dice, seconds, is_first))
    found = list_checkpoints(training.checkpoints)
    if len(found) > 1:
        first, last = found[0], found[-1]
        first.rename(aside := training.checkpoints / "swap")
        last.rename(first)
        aside.rename(last)
    elif found:
        found[0].rename(found[0].with_name(checkpoint_name(39)))
    return bool(found), kind


def draw(dice: random.Random, seconds: float, is_first: bool) -> Fault:
    """Draws a place or a moment; see `disturb`."""
    if is_first and dice.random() < 0.5:
        place = dice.choice(sorted(PLACES))
        return Fault(place, dice.randint(1, PLACES[place]))
    return Fault(seconds=round(dice.uniform(0, seconds), 2))


def remove_what_was_set_aside(training: Training) -> None:
    """Checkpoints that a run cannot use keep other names; they are no part of its result."""
    for path in training.checkpoints.glob("*-step=*"):
        shutil.rmtree(path)


def main() -> None:
    parser = parser_of("Disturbs runs at random moments.", needs_images=False)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the runs would ignore it too
    stages = (("model_pretrain.py", ()), ("model_finetune.py", ("--checkpoint", "none")))
    kinds: Counter[str] = Counter()
    same = disturbed = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        whole, seconds = {}, {}
        for script, arguments in stages:
            training = Training(Path(folder, "whole"), script, arguments)
            started = time.monotonic()
            start = training.start()
            if start.status:
                sys.exit(start.err)
            whole[script], seconds[script] = training.result(), time.monotonic() - started
        for number in range(options.runs):
            dice = random.Random(f"{options.seed}-{number}")
            script, arguments = stages[number % len(stages)]
            training = Training(Path(folder, str(number)), script, arguments)
            drawn = dice.choices(list(KINDS), list(KINDS.values()), k=dice.randint(1, 2))
            problem, came = None, False
            told: list[str] = []
            try:
                for kind in drawn:
                    in_time, what = disturb(training, kind, dice, seconds[script], not told)
                    kinds[kind] += in_time
                    came |= in_time
                    told.append(what if in_time else f"{what}: did not come")
                last = training.start()
                if last.status:
                    problem = last.err
                remove_what_was_set_aside(training)
                if problem is None and training.result() != whole[script]:
                    problem = "differs from the run that was never killed"
            except AssertionError as error:
                problem = str(error)
            disturbed += came or problem is not None
            same += came and problem is None
            outcome = problem or ("identical" if came else "not disturbed")
            print(f"{number + 1:3} {script:18} {outcome}: {'; '.join(told)}", flush=True)
    minutes = (time.monotonic() - began) / 60
    count = f"{same} of {disturbed} disturbed runs bit-identical"
    moments = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS)
    text = (
        "## Runs disturbed at random moments\n\n"
        f"{machine('nemo_toolkit', 'megatron-core').partition('; ')[0]}.\n\n"
        f"`benchmarks/faults.py --runs {options.runs} --seed {options.seed}`: **{count}**. "
        f"{kinds.total()} disturbances happened before the end of their run ({moments}). "
        f"Pretraining and fine-tuning alternate. The study took {minutes:.0f} minutes. "
        f"{options.runs - disturbed} more runs ended before their disturbance."
    )
    print(count)
    if options.write:
        write_section("faults", text)
    sys.exit(not same or same != disturbed)


if __name__ == "__main__":
    main()
