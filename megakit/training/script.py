"""The frame around every script: check everything, agree among the ranks, work, report, exit.

Nothing here imports torch before the options are known to be good.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from megakit.checkpoints.layout import step_of
from megakit.checkpoints.manifest import Manifest
from megakit.checkpoints.select import BestBy
from megakit.errors import Stopped, UserError
from megakit.reporting.console import Console
from megakit.runtime.accelerator import Accelerator, use_accelerator
from megakit.runtime.memory import keep_freed_memory, suspend_collector
from megakit.runtime.threads import limit_threads
from megakit.runtime.versions import installed_versions
from megakit.training.agreement import agree, is_first_to_fail
from megakit.training.launch import launch
from megakit.training.layout import Cluster, Layout
from megakit.training.options import CommonOptions, parse_options
from megakit.training.plan import PLAN_VARIABLE, Plan, prepare
from megakit.training.runs import RunDirectory, Stage

OptionsT = TypeVar("OptionsT", bound=CommonOptions)

#: What gloo and NCCL say where a rank has been killed; one that fails has its own say before.
OTHER_RANK_IS_GONE = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
    "remote process exited",
)


@dataclass
class Run:
    """One start of a script, as its work sees it.

    Attributes:
        stage: Which stage of the chain.
        options: The command line's.
        plan: What was worked out from them.
        console: Where to speak to the user.
        is_main: Whether this process writes files and speaks; one of the job does.
        began: When the script began, by `time.perf_counter()`.
        results: For summary.json; the work adds to it.
    """

    stage: Stage
    options: Any
    plan: Plan
    console: Console
    is_main: bool
    began: float
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """How the job's processes share the work."""
        return self.plan.layout

    @property
    def accelerator(self) -> Accelerator:
        """Where the job runs."""
        return self.plan.accelerator

    @cached_property
    def directory(self) -> RunDirectory:
        """Where this run lives."""
        return RunDirectory(self.options.output_dir / self.stage.name)

    @property
    def path(self) -> Path:
        """The same as a path."""
        return self.directory.path

    @property
    def trains(self) -> bool:
        """Whether this script trains, rather than predicts."""
        return bool(self.plan.identity)

    @property
    def best_by(self) -> BestBy:
        """How the best checkpoint is chosen."""
        by: BestBy = self.plan.identity["best_by"]
        return by

    @property
    def resumed_step(self) -> int:
        """Steps done before this start."""
        return step_of(Path(self.plan.resume)) if self.plan.resume else 0

    def manifest(self) -> Manifest:
        """What checkpoints of this run have in common."""
        return Manifest(
            stage=self.stage.name,
            model=self.stage.model,
            dataset=self.plan.dataset,
            step=0,
            run=self.plan.identity,
            versions=installed_versions(),
        )


def run_script(
    stage: Stage, options_class: type[OptionsT], work: Callable[[Run], Path]
) -> NoReturn:
    """Runs a script from its command line to its exit status.

    Args:
        stage: What the script is within the chain.
        options_class: Its options.
        work: Does the work of one rank; returns the path to print on standard output.
    """
    began = time.perf_counter()
    options = parse_options(options_class)
    stage = options.adapt(stage)
    limit_threads(stage.width)
    # Until training listens there is nothing to save; the launcher and the callback replace these.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: os._exit(143))
    cluster = Cluster.from_environment()
    # Lightning knows Slurm, too, but refuses `srun --ntasks`, and requeues jobs by itself on
    # signals that are ours; a job of this name it leaves alone.
    if "SLURM_NTASKS" in os.environ:
        os.environ["SLURM_JOB_NAME"] = "interactive"
    console = Console(silent=cluster.rank != 0)
    try:
        status = _run(stage, options, cluster, console, work, began)
    except UserError as error:
        for problem in error.problems:
            console.say(f"{stage.script}: {problem}")
        status = 2
    except KeyboardInterrupt:
        console.say("Interrupted.")
        status = 130
    except OSError as error:
        if is_first_to_fail():
            where = f"{stage.script}{cluster.of_rank}"
            console.alarm(f"{where}: {error}. The last complete checkpoint is untouched.")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Frameworks leave threads and helpers behind that take seconds to unwind.
    os._exit(status)


def _run(
    stage: Stage,
    options: CommonOptions,
    cluster: Cluster,
    console: Console,
    work: Callable[[Run], Path],
    began: float,
) -> int:
    if PLAN_VARIABLE in os.environ:
        plan, guard = Plan.from_json(os.environ[PLAN_VARIABLE]), None
    elif cluster.num_processes > 1:
        timeout = max(1, options.timeout)  # less is refused, which all have to hear of
        plan, guard = agree(cluster, lambda: prepare(stage, options, cluster, console), timeout)
    else:
        plan, guard = prepare(stage, options, cluster, console)
    directory = RunDirectory(options.output_dir / stage.name)
    if plan.is_done:
        best = directory.best_checkpoint()
        assert best is not None
        console.say(f"{stage.name} is done already: {directory.path}. --fresh starts over.")
        console.result(best)
        return 0
    if plan.layout.world_size > 1 and cluster.starter is None:
        status = launch(plan.layout.devices, console, {PLAN_VARIABLE: plan.to_json()})
        del guard
        return status
    run = Run(stage, options, plan, console, cluster.rank == 0, began)
    return _work(run, work)


def _work(run: Run, work: Callable[[Run], Path]) -> int:
    log = run.path / "log.txt"
    # Read now: Lightning takes a part of it out of the environment when it ends.
    where = f"{run.stage.script}{Cluster.from_environment().of_rank}"
    if not run.options.verbose:
        run.console.divert(log)
    suspend_collector()
    keep_freed_memory()
    try:
        use_accelerator(run.accelerator.name)
        path = work(run)
    except Stopped as stopped:
        run.console.say(f"Stopped after step {stopped.step}; the same command goes on from there.")
        return 130 if stopped.signal == 2 else 143
    except (UserError, OSError, KeyboardInterrupt):
        raise
    except Exception as error:
        is_first = is_first_to_fail()
        other_is_gone = any(words in str(error) for words in OTHER_RANK_IS_GONE)
        if is_first and not other_is_gone:
            run.console.alarm(traceback.format_exc())
        else:
            traceback.print_exc()  # into the log: it follows from what became of another rank
        if is_first:
            what = "ended, as another rank is gone without a word" if other_is_gone else "failed"
            run.console.alarm(f"{where} {what}; the log is {log}.")
        if other_is_gone:
            time.sleep(1)  # whoever started the ranks shall see the other's end first, and name it
        return 1
    run.console.result(path)
    return 0
