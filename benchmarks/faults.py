"""How many of N runs that were killed at random moments came out bit-identical.

    python benchmarks/faults.py [--runs N] [--seed N] [--write]

Each run is killed once or twice with SIGKILL, at a moment drawn by the seed: a call of one of the
functions that train, save, clean up or report, or any number of seconds after the start. Then it is
started again and compared with one that nothing happened to: weights and optimizer states byte by
byte, metrics.csv, TensorBoard's curves, names of checkpoints, the choice of the best, and processes
left behind. `--write` puts the count into RESULTS.md.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

from report import REPOSITORY, machine, write_section

# Some packages install a `tests` of their own; this one is ours.
sys.modules["tests"] = tests = ModuleType("tests")
tests.__path__ = [str(REPOSITORY / "tests")]

from tests.faults.harness import Fault, Training  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Kills runs at random moments.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put the count into RESULTS.md")
    options = parser.parse_args()
    stages = (("model_pretrain.py", ()), ("model_finetune.py", ("--checkpoint", "none")))
    kinds: Counter[str] = Counter()
    same = kills = 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        whole, seconds = {}, {}
        for script, arguments in stages:
            training = Training(Path(folder, "whole"), script, arguments)
            start = training.start()
            if start.status:
                sys.exit(start.err)
            whole[script], seconds[script] = training.result(), start.seconds
        for number in range(options.runs):
            dice = random.Random(f"{options.seed}-{number}")
            script, arguments = stages[number % len(stages)]
            training = Training(Path(folder, str(number)), script, arguments)
            faults = [Fault.draw(dice, seconds[script]) for _ in range(dice.randint(1, 2))]
            problem = None
            try:
                for fault in faults:
                    killed = training.start(fault).status == -9
                    kills += killed
                    kinds["in time" if fault.place is None else "at a call"] += killed
                last = training.start()
                if last.status:
                    problem = last.err
                elif training.result() != whole[script]:
                    problem = "differs from the run that was never killed"
            except AssertionError as error:
                problem = str(error)
            same += problem is None
            what = "; ".join(map(str, faults))
            print(f"{number + 1:3} {script:18} {problem or 'identical'}: {what}", flush=True)
    minutes = (time.monotonic() - began) / 60
    count = f"{same} of {options.runs} bit-identical"
    moments = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
    text = (
        "## Runs killed at random moments\n\n"
        f"{machine('nemo_toolkit', 'megatron-core').partition('; ')[0]}.\n\n"
        f"`benchmarks/faults.py --runs {options.runs} --seed {options.seed}`: **{count}**; "
        f"{kills} kills ({moments}), pretraining and fine-tuning by turns, {minutes:.0f} minutes."
    )
    print(count)
    if options.write:
        write_section("faults", text)
    sys.exit(same != options.runs)


if __name__ == "__main__":
    main()
