"""Runs the whole tutorial: the scripts for pretraining, fine-tuning and prediction."""

import contextlib
import dataclasses
import importlib
import os
import runpy
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # the scripts and megakit are in the parent folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megakit.job.command_line import parse_options
from megakit.job.launch import run_in_fork
from megakit.job.option_types import Seed, flag
from megakit.job.options import CommonOptions
from megakit.job.script import begin_script
from mnist.files import DataOptions
from mnist.sizes import SizeOptions

PROJECT = Path(__file__).resolve().parents[1]
SCRIPTS = ("model_pretrain.py", "model_finetune.py", "model_predict.py")
#: Options that the prediction script does not have.
TRAINING_ONLY = ("fresh", "seed")


@dataclass(kw_only=True)
class TutorialOptions(DataOptions, CommonOptions):
    """Run the three scripts in sequence: pretrain, fine-tune, predict."""

    seed: Seed = 42
    """Seed of the initial weights, the order of samples and the random effects."""

    fresh: bool = False
    """Start new runs; the old runs are kept under other names."""


def arguments_for(script: str, options: TutorialOptions) -> list[str]:
    """Returns a script's command-line arguments: the options that differ from their defaults."""
    arguments = []
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        is_for_training = option.name in TRAINING_ONLY
        if value == option.default or (is_for_training and script == "model_predict.py"):
            continue
        arguments.append(flag(option.name))
        if value is not True:
            arguments.append(str(value))
    return arguments


def import_stack(options: TutorialOptions) -> None:
    """Imports the frameworks once, for the processes of all scripts, which are forked from here.

    This works only for a single process on a CPU: a forked process cannot use a GPU that its parent
    has used.
    """
    from megakit.job.console import diverted
    from megakit.runtime.accelerator import (
        is_certainly_cpu,
        keep_freed_memory,
        limit_threads,
        use_accelerator,
    )
    from megakit.runtime.deferred_imports import suspend_collector

    is_alone = options.devices in (None, 1) and "RANK" not in os.environ
    if not is_alone or options.problems() or not is_certainly_cpu(options.accelerator):
        return
    limit_threads(TutorialOptions.largest_micro_batch * SizeOptions.hidden_size**2)
    suspend_collector()
    keep_freed_memory()
    with contextlib.nullcontext() if options.verbose else diverted():
        use_accelerator("cpu")
        for module in (
            "megakit.nemo.fit",
            "megakit.job.finish",
            "model_components",
            "model_trainer",
        ):
            importlib.import_module(module)


def import_figures() -> None:
    """Imports what the last script draws with, while the first one trains."""
    from megakit.job.console import diverted

    if "model_trainer" in sys.modules:  # otherwise nothing that a script needs is imported here
        with diverted(), contextlib.suppress(Exception):  # the last script tells what is wrong
            for module in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
                importlib.import_module(module)


def run(script: str, arguments: list[str]) -> int:
    """Runs a script like `python SCRIPT ARGUMENTS`; returns its exit status."""
    path = str(PROJECT / script)

    def work() -> None:
        sys.argv = [path, *arguments]
        if script != SCRIPTS[-1]:
            # Only the last script writes to standard output: the path of predictions.csv.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        runpy.run_path(path, run_name="__main__")

    return run_in_fork(work, import_figures)


def main() -> int:
    """Runs the scripts in sequence until one fails; returns that script's exit status, or 0."""
    began = time.perf_counter()
    begin_script()
    options = parse_options(TutorialOptions)
    import_stack(options)
    for number, script in enumerate(SCRIPTS, start=1):
        arguments = arguments_for(script, options)
        print(f"[{number}/3] {' '.join([script, *arguments])}", file=sys.stderr, flush=True)
        if status := run(script, arguments):
            return status
    seconds = time.perf_counter() - began
    print(f"The three scripts took {seconds:.1f} s in all.", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # A normal exit frees each object of the imported frameworks, which takes a second.
    os._exit(status)
