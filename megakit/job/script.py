"""Runs a script: checks everything, plans the job, does the work, reports the result and exits.

Nothing here imports torch before the command line is parsed.
"""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from signal import SIGINT
from typing import Any, Generic, NoReturn, TypeVar

from megakit.checkpoints.folders import step_of
from megakit.checkpoints.manifest import Manifest
from megakit.errors import RunDirectoryLostError, Stopped, UserError
from megakit.job.checks import failed_check
from megakit.job.cluster import Cluster
from megakit.job.launch import launch
from megakit.job.layout import Layout, other_layout
from megakit.job.options import MOST_SECONDS, CommonOptions, parse_options
from megakit.job.plan import PLAN_VARIABLE, Plan
from megakit.job.preparation import prepare
from megakit.job.rendezvous import has_process_group, is_first_to_fail, share_plan
from megakit.job.run_lock import check_still_ours
from megakit.job.runs import RunDirectory
from megakit.job.sizes import expected_work
from megakit.job.stage import Stage
from megakit.reporting.console import Console
from megakit.reporting.streams import secure_streams
from megakit.runtime.accelerator import Accelerator, limit_threads, use_accelerator
from megakit.runtime.foreign_files import printable
from megakit.runtime.interpreter import adapt_interpreter
from megakit.runtime.memory import keep_freed_memory, suspend_collector
from megakit.runtime.signals import exit_status, reset_signals
from megakit.runtime.versions import installed_versions

OptionsT = TypeVar("OptionsT", bound=CommonOptions)
OptionsT_co = TypeVar("OptionsT_co", bound=CommonOptions, covariant=True)

#: Error messages of gloo and NCCL after a rank was killed. A rank that fails reports its own error.
LOST_CONNECTION_ERRORS = (
    *("Connection closed by peer", "Connection reset by peer"),
    *("Broken pipe", "remote process exited"),
)


@dataclass
class Run(Generic[OptionsT_co]):
    """One start of a script; the script's work function receives it.

    Attributes:
        stage: The stage of the chain.
        options: Options of the command line.
        plan: The plan made from the options.
        console: Prints messages for the user.
        is_main: Whether this process writes files and prints messages; one process of a job does.
        began: When the script began, by `time.perf_counter()`.
    """

    stage: Stage
    options: OptionsT_co
    plan: Plan
    console: Console
    is_main: bool
    began: float

    @property
    def layout(self) -> Layout:
        """How the job's processes share the work."""
        return self.plan.layout

    @property
    def accelerator(self) -> Accelerator:
        """The device that the job runs on."""
        return self.plan.accelerator

    @property
    def precision(self) -> str:
        """The precision that the job computes in, `bf16-mixed` or `32`."""
        return self.plan.precision

    @cached_property
    def directory(self) -> RunDirectory:
        """The run directory."""
        return RunDirectory(self.options.output_dir / self.stage.name)

    @property
    def path(self) -> Path:
        """The path of the run directory."""
        return self.directory.path

    def check_directory(self) -> None:
        """Checks that the run directory is still the directory that this job has locked.

        Raises:
            RunDirectoryLostError: The directory was removed, renamed or replaced.
        """
        if self.plan.lock is not None and self.is_main:
            check_still_ours(self.path, self.plan.lock)

    def withdraw(self) -> None:
        """Undoes the start of a training run that was refused before its first checkpoint.

        Another run can then use the run directory. A run that `--fresh` renamed gets its name back.
        """
        if self.is_main and self.trains:
            # The reason of the refusal matters more than an error here.
            with contextlib.suppress(OSError, RunDirectoryLostError):
                self.check_directory()
                if self.directory.withdraw(self.plan.old_run):
                    self.console.say(f"The old run is {self.path} again.")

    @property
    def trains(self) -> bool:
        """Whether this script trains; otherwise it predicts."""
        return bool(self.plan.identity)

    @property
    def best_by(self) -> str:
        """The criterion for the best checkpoint."""
        return str(self.plan.identity["best_by"])

    @property
    def resumed_step(self) -> int:
        """Optimizer steps done before this start."""
        return step_of(Path(self.plan.resume)) if self.plan.resume else 0

    def manifest(self) -> Manifest:
        """Returns a manifest with the entries that all checkpoints of this run share."""
        return Manifest(
            stage=self.stage.name,
            model=self.stage.model,
            dataset=self.plan.dataset,
            step=0,
            run=self.plan.identity,
            versions=installed_versions(),
        )


def begin_script() -> None:
    """Prepares a new process's streams and signals. Every script calls this first."""
    secure_streams()
    reset_signals()


def run_script(
    stage: Stage, options_class: type[OptionsT], work: Callable[[Run[OptionsT]], Path]
) -> NoReturn:
    """Runs a script from its command line to its exit status.

    Args:
        stage: The script's stage in the chain.
        options_class: The class of the script's options.
        work: Does the work of one rank; returns the path to print on standard output.
    """
    began = time.perf_counter()
    script = Path(sys._getframe(1).f_code.co_filename)  # its code is compared with the run's
    begin_script()
    options = parse_options(options_class)
    adapt_interpreter()
    stage = options.adapt(stage)
    console, cluster = Console(), Cluster()
    try:
        cluster = _read_cluster(options)
        limit_threads(expected_work(stage, options), _processes_per_machine(options, cluster))
        console.silent = cluster.rank != 0
        status = _run(stage, options, cluster, console, work, began, script)
    except UserError as error:
        if has_process_group():  # every rank may raise the same error; one rank reports it
            console.silent = not is_first_to_fail()
        for problem in error.problems:
            # A problem may quote a file, which may contain control sequences for the terminal.
            lines = f"{stage.script}: {problem}".split("\n")
            console.say("\n".join(map(printable, lines)))
        status = 2
    except KeyboardInterrupt:
        console.say("Interrupted.")
        status = exit_status(SIGINT)
    except RunDirectoryLostError as error:
        console.error(f"{stage.script}{cluster.rank_suffix}: {error}")
        status = 1
    except OSError as error:
        if is_first_to_fail():
            where = f"{stage.script}{cluster.rank_suffix}"
            console.error(f"{where}: {error}.{_checkpoint_remark(options, stage)}")
        status = 1
    except Exception as error:  # of the preparation; `_work` handles errors of the work
        if options.verbose:
            traceback.print_exc()
        console.error(f"{stage.script}{cluster.rank_suffix}: {failed_check('the start', error)}")
        status = 2
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # of the log, on a full disk
            stream.flush()
    if _is_profiled():  # the profiler writes its file during a normal exit
        sys.exit(status)
    # A normal exit waits seconds for threads and helper processes that the frameworks left.
    os._exit(status)


def _is_profiled() -> bool:
    """Returns whether a profiler runs, such as `python -m cProfile`."""
    monitoring = getattr(sys, "monitoring", None)  # cProfile uses it from Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.PROFILER_ID) is not None:
        return True
    return sys.getprofile() is not None


def _processes_per_machine(options: CommonOptions, cluster: Cluster) -> int | None:
    """Returns how many processes share a machine's cores; None if srun assigns the cores."""
    return None if cluster.launcher == "srun" else options.devices or cluster.devices


def _checkpoint_remark(options: CommonOptions, stage: Stage) -> str:
    with contextlib.suppress(OSError):
        if RunDirectory(options.output_dir / stage.name).newest_step is not None:
            return " The last complete checkpoint is unchanged."
    return ""


def _read_cluster(options: CommonOptions) -> Cluster:
    """Reads the job from the environment; errors also list the problems of the options."""
    try:
        cluster = Cluster.from_environment()
    except UserError as error:
        raise UserError([*error.problems, *options.problems()]) from error
    cluster.correct_environment()
    return cluster


def _run(
    stage: Stage,
    options: OptionsT,
    cluster: Cluster,
    console: Console,
    work: Callable[[Run[OptionsT]], Path],
    began: float,
    script: Path,
) -> int:

    def check() -> tuple[Plan, Any]:
        return prepare(stage, options, cluster, console, script if script.is_file() else None)

    if PLAN_VARIABLE in os.environ:
        plan, locks = Plan.of_launcher(os.environ[PLAN_VARIABLE]), None
    elif cluster.num_processes > 1:
        # Rank 0 refuses an option out of range. All ranks need a usable timeout to learn this.
        timeout = min(max(1, options.timeout), MOST_SECONDS)
        plan, locks = share_plan(cluster, check, timeout)
    else:
        plan, locks = check()
    options.adopt(plan.places)
    directory = RunDirectory(options.output_dir / stage.name)
    console.fall_back_to(directory.log)
    if plan.is_done:
        best = directory.best_checkpoint()
        assert best is not None
        console.say(f"{stage.name} is already done: {directory.path}. --fresh starts over.")
        if remark := other_layout(plan.layout, options, cluster, directory.summary):
            console.say(remark)
        console.result(best)
        return 0
    if plan.layout.world_size > 1 and cluster.launcher is None:
        value, descriptor = plan.for_ranks()
        status = launch(plan.layout.devices, console, {PLAN_VARIABLE: value}, (descriptor,))
        del locks
        return status
    run = Run(stage, options, plan, console, cluster.rank == 0, began)
    return _work(run, work, f"{stage.script}{cluster.rank_suffix}")


def _work(run: Run[OptionsT], work: Callable[[Run[OptionsT]], Path], where: str) -> int:
    log = run.directory.log
    if not run.options.verbose:
        run.console.divert(log)
    suspend_collector()
    keep_freed_memory()
    try:
        use_accelerator(run.accelerator.name)
        path = work(run)
    except Stopped as stopped:
        run.console.say(f"Stopped after step {stopped.step}; the same command resumes from there.")
        return exit_status(stopped.signal)
    except UserError:
        run.check_directory()  # a lost run directory explains the error better
        run.withdraw()
        raise
    except (RunDirectoryLostError, KeyboardInterrupt):
        raise
    except OSError:
        run.check_directory()  # as above
        traceback.print_exc()  # to the log: a programming error may have caused the OSError
        raise
    except Exception as error:
        is_first = is_first_to_fail()
        other_rank_ended = any(words in str(error) for words in LOST_CONNECTION_ERRORS)
        if is_first and not other_rank_ended:
            run.console.error(traceback.format_exc())
        else:
            traceback.print_exc()  # to the log: the failure of another rank caused this error
        if is_first:
            what = "ended because another rank ended" if other_rank_ended else "failed"
            run.console.error(f"{where} {what}; the log is {log}.")
        if other_rank_ended:
            time.sleep(1)  # so that the launcher sees and reports the end of the other rank first
        return 1
    run.console.result(path)
    return 0
