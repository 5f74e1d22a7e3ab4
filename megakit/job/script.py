"""Runs a script: plans the job, starts its ranks, does the work, and exits.

Nothing here imports torch before the command line is parsed and checked.
"""

import contextlib
import errno
import os
import shlex
import socket
import sys
import time
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn, TypeVar

from megakit.errors import Stopped, UserError, printable
from megakit.job.cluster import LAUNCHER, PATIENCE, Cluster, is_first, read_cluster, until
from megakit.job.command_line import parse_options, program
from megakit.job.console import Console, Output, open_output
from megakit.job.options import CommonOptions
from megakit.job.plan import begin, plan
from megakit.job.run import Run
from megakit.job.run_directory import Stage
from megakit.runtime.accelerator import (
    keep_freed_memory,
    limit_threads,
    use_accelerator,
    use_full_float32,
)
from megakit.runtime.deferred_imports import suspend_collector
from megakit.runtime.patching import is_stock
from megakit.runtime.signals import exit_status, reset_signals

OptionsT = TypeVar("OptionsT", bound=CommonOptions)


def run_script(
    stage: Stage,
    options_class: type[OptionsT],
    work: Callable[[Run[OptionsT]], Path],
    *,
    uses_nemo: bool = True,
) -> NoReturn:
    """Runs a script from its command line to its exit status.

    Args:
        stage: The script's stage in the chain.
        options_class: The class of the script's options.
        work: Does the work of one rank; returns the path to print on standard output.
        uses_nemo: Whether the work uses NeMo, beside Megatron.
    """
    began = time.perf_counter()
    script = Path(sys._getframe(1).f_code.co_filename)  # its files are compared with the run's
    begin_script()
    options = parse_options(options_class)
    if not Path("run").is_file():  # the commands that the job prints belong to another folder
        options.output_dir = options.output_dir.absolute()
    console, cluster, run, status = Console(), Cluster(), None, 0
    try:
        if PathFinder.find_spec("megatron") is None:
            raise UserError(
                f"the packages are missing in this Python, {sys.executable}. Use .venv/bin/python, "
                "or ./run, which installs them there."
            )
        cluster = read_cluster()
        console.silent = cluster.rank != 0
        if options.tensor_parallel > 1:
            # On a GPU before Blackwell, Megatron's all-reduce of a layer's backward pass overlaps
            # with the next matrix product only if all kernels share one queue. CUDA reads this at
            # its start.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        run = _open(stage, options, cluster, console, script if script.is_file() else None)
        run.console, run.is_main, run.began = console, cluster.rank == 0, began
        Output.log = run.directory.log
        if run.is_done:
            _say_done(run)
        elif run.only_starts_ranks:
            from megakit.job.launch import launch

            status = launch(run.layout.devices, console)
        else:
            _work(run, work, uses_nemo)
    except (Exception, Stopped) as error:
        folder = options.output_dir
        status = report(error, console, cluster, folder, run.directory.log if run else None)
    with contextlib.suppress(OSError):  # of the log, on a full disk; standard error keeps nothing
        sys.stdout.flush()
    # A normal exit waits seconds for threads and helper processes that the frameworks left.
    os._exit(status)


def begin_script() -> None:
    """Prepares a new process's streams and signals. Every script calls this first."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = open_output(descriptor)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    reset_signals()


def report(
    error: BaseException, console: Console, cluster: Cluster, folder: Path, log: Path | None
) -> int:
    """Tells the user why a script ends, on one of the ranks that fail; returns the exit status.

    | error | status | what the console shows |
    |---|---|---|
    | `Stopped` by a signal in training | of the signal | the step |
    | `UserError` | 2 | value, rule and remedy of each problem |
    | `OSError` | 1 | the system's reason, and the file; of a disk, at least the folder of runs |
    | another | 1 | the traceback |
    """
    reset_signals()
    if isinstance(error, Stopped):
        console.say(f"Stopped after step {error.step}; the same command resumes from there.")
        return exit_status(error.signal)
    if console.is_diverted:
        with contextlib.suppress(OSError):  # of the log, on a full disk
            traceback.print_exception(error)  # there, a programming error can be found
    status = 2 if isinstance(error, UserError) else 1
    problems = error.problems if isinstance(error, UserError) else [str(error)]
    # If rank 0 refuses the job, the other ranks have nothing to tell.
    if not problems or not is_first("failed"):
        time.sleep(3)  # the rank that tells the reason ends first; then the launcher ends this one
        return status
    name = program() + (f" (rank {cluster.rank})" if cluster.num_processes > 1 else "")
    if status == 2:
        for problem in problems:
            # A problem may quote a file, which may contain control sequences for the terminal.
            console.error("\n".join(map(printable, f"{program()}: {problem}".split("\n"))))
    elif isinstance(error, OSError):
        # A stream or a library names no file; then it is one of the job's.
        is_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
        told = f"{error.filename or folder}: {error.strerror}" if is_disk else error
        console.error(f"{name}: {told}. Complete checkpoints are unchanged.")
    else:
        if cluster.num_processes > 1:
            # If another rank was killed, this error is a consequence. Meanwhile, the launcher names
            # that rank and ends this one.
            time.sleep(1)
        console.error("".join(traceback.format_exception(error)))
        console.error(f"{name} failed{f'; the log is {log}' if log else ''}.")
    return status


def _open(
    stage: Stage, options: OptionsT, cluster: Cluster, console: Console, script: Path | None
) -> Run[OptionsT]:
    """Plans the run on one rank; begins it unless it is done or its ranks have to be started."""
    # Our launcher has planned the same before, and has said what there is to say.
    told = Console(silent=True) if LAUNCHER in os.environ else console

    def make() -> Run[OptionsT]:
        run = plan(stage, options, cluster, told, script)
        if run.only_starts_ranks:
            run.close()  # rank 0 locks the directory again
        elif not run.is_done:
            run.console = console
            begin(run)
        return run

    if cluster.num_processes == 1:
        run = make()
        limit_threads(run.work, run.layout.devices if run.only_starts_ranks else 1)
        return run
    from megakit.job.rendezvous import share

    # As torchrun sets it: the other ranks import torch before they know the plan.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return share(cluster, make, _folder_problem, options)


def _folder_problem(run: Run[OptionsT]) -> str:
    """Returns that this rank's run directory is not that of rank 0; or nothing."""
    # A network's file system may show a file late.
    if until(min(PATIENCE, run.options.timeout / 2), lambda: run.directory.holder() == run.holder):
        return ""
    return (
        f"{run.path.absolute()} on {socket.gethostname()} is not the folder of rank 0. "
        "--output-dir has to be on a file system that all machines share."
    )


def _say_done(run: Run[OptionsT]) -> None:
    best = run.directory.best_checkpoint()
    assert best is not None, "a run that has ended has a checkpoint"
    run.console.say(f"{run.stage.name} is already done: {run.path}. --fresh starts over.")
    if run.changed:
        run.console.say(f"Changed since then: {', '.join(run.changed)}.")
    run.console.result(best)


def _work(run: Run[OptionsT], work: Callable[[Run[OptionsT]], Path], uses_nemo: bool) -> None:
    if not run.options.verbose:
        run.console.divert(run.directory.log)
        print("command:", shlex.join(sys.argv), *(["MEGAKIT_STOCK=1"] if is_stock() else []))
    suspend_collector()
    keep_freed_memory()
    use_accelerator(run.accelerator.name, uses_nemo)
    if run.precision == "32":
        use_full_float32()
    run.console.result(work(run))
