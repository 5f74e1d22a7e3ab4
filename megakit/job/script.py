"""Runs a script: plans the job, starts its ranks, does the work, and exits.

Nothing here imports torch before the command line is parsed and checked.
"""

import contextlib
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT
from typing import NoReturn, TypeVar

from megakit.checkpoints.manifest import list_checkpoints
from megakit.errors import RunDirectoryLostError, Stopped, UserError, printable
from megakit.job.begin_or_resume import begin_run
from megakit.job.cluster import LAUNCHER, Cluster, has_process_group, is_first_to_fail, read_cluster
from megakit.job.command_line import parse_options, program
from megakit.job.options import CommonOptions
from megakit.job.plan import Plan, check_job
from megakit.job.run import Run
from megakit.job.runs import RunDirectory, Stage
from megakit.reporting.console import Console
from megakit.reporting.streams import secure_streams
from megakit.runtime.accelerator import (
    keep_freed_memory,
    limit_threads,
    use_accelerator,
    use_full_float32,
)
from megakit.runtime.deferred import suspend_collector
from megakit.runtime.patching import is_stock
from megakit.runtime.signals import exit_status, reset_signals

OptionsT = TypeVar("OptionsT", bound=CommonOptions)

#: Error messages of gloo and NCCL after a rank was killed. A rank that fails reports its own error.
LOST_CONNECTION_ERRORS = (
    *("Connection closed by peer", "Connection reset by peer"),
    *("Broken pipe", "remote process exited"),
)


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
    stage = Stage(options.run_name(stage.name), stage.before)
    console, cluster = Console(), Cluster()
    try:
        cluster = _read_cluster(options)
        console.silent = cluster.rank != 0
        plan, locks = _plan(stage, options, cluster, console, script)
        if locks is None:
            from megakit.job.launch import launch

            status = launch(plan.layout.devices, console)
        elif plan.is_done:
            status = _say_done(stage, options, console)
        else:
            run = Run(stage, options, plan, console, cluster.rank == 0, began)
            status = _work(run, work, f"{program()}{cluster.rank_suffix}")
    except UserError as error:
        if has_process_group():  # every rank may raise the same error; one rank reports it
            console.silent = not is_first_to_fail()
        for problem in error.problems:
            # A problem may quote a file, which may contain control sequences for the terminal.
            lines = f"{program()}: {problem}".split("\n")
            console.say("\n".join(map(printable, lines)))
        status = 2
    except KeyboardInterrupt:
        console.say("Interrupted.")
        status = exit_status(SIGINT)
    except (OSError, RunDirectoryLostError) as error:
        if isinstance(error, RunDirectoryLostError) or is_first_to_fail():
            remark = _checkpoint_remark(options, stage) if isinstance(error, OSError) else ""
            console.error(f"{program()}{cluster.rank_suffix}: {error}{remark}")
        status = 1
    except Exception:
        console.error(traceback.format_exc())
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # of the log, on a full disk
            stream.flush()
    if _is_profiled():  # the profiler writes its file during a normal exit
        sys.exit(status)
    # A normal exit waits seconds for threads and helper processes that the frameworks left.
    os._exit(status)


def begin_script() -> None:
    """Prepares a new process's streams, signals and limits. Every script calls this first."""
    secure_streams()
    reset_signals()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _is_profiled() -> bool:
    """Returns whether a profiler runs, such as `python -m cProfile`."""
    monitoring = getattr(sys, "monitoring", None)  # cProfile uses it from Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.PROFILER_ID) is not None:
        return True
    return sys.getprofile() is not None


def _read_cluster(options: CommonOptions) -> Cluster:
    """Reads the job from the environment; an error also lists the problems of the options."""
    try:
        return read_cluster()
    except UserError as error:
        raise UserError([*error.problems, *options.problems()]) from error


def _plan(
    stage: Stage, options: CommonOptions, cluster: Cluster, console: Console, script: Path
) -> tuple[Plan, object]:
    """Returns the plan and the locks of the job; no locks if its ranks have to be started first."""
    source = script if script.is_file() else None
    if options.tensor_parallel > 1:
        # On a GPU before Blackwell, Megatron's all-reduce of a layer's backward pass overlaps with
        # the next matrix product only if all kernels share one queue. CUDA reads this at its start.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Our launcher has checked everything before, and has said what there is to say.
    told = Console(silent=True) if LAUNCHER in os.environ else console

    def make() -> tuple[Plan, object]:
        plan, start = check_job(stage, options, cluster, told, source)
        has_ranks = plan.layout.world_size == 1 or cluster.launcher is not None
        if has_ranks or plan.is_done:
            locks = begin_run(stage, options, plan, start, console)
            if has_ranks or plan.is_done:
                return plan, locks
            locks.close()  # the checkpoint of the last step was damaged
        return plan, None

    if cluster.num_processes == 1:
        plan, locks = make()
        limit_threads(plan.work, plan.layout.devices if locks is None else 1)
    else:
        from megakit.job.rendezvous import share_plan

        # As torchrun sets it: the other ranks import torch before they know the plan.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Rank 0 refuses an option out of range. All ranks need a usable timeout to learn this.
        plan, locks = share_plan(cluster, make, min(max(1, options.timeout), 7 * 24 * 3600))
    vars(options).update(plan.chosen)
    console.fall_back_to(RunDirectory(options.output_dir / stage.name).log)
    return plan, locks


def _say_done(stage: Stage, options: CommonOptions, console: Console) -> int:
    directory = RunDirectory(options.output_dir / stage.name)
    best = directory.best_checkpoint()
    assert best is not None, "a run that has ended has a checkpoint"
    console.say(f"{stage.name} is already done: {directory.path}. --fresh starts over.")
    console.result(best)
    return 0


def _work(run: Run[OptionsT], work: Callable[[Run[OptionsT]], Path], where: str) -> int:
    log = run.directory.log
    if not run.options.verbose:
        run.console.divert(log)
        paths = (f"{name}={path}" for name, path in run.options.places().items() if path)
        print("paths:", *paths, *(["MEGAKIT_STOCK=1"] if is_stock() else []))
    suspend_collector()
    keep_freed_memory()
    try:
        use_accelerator(run.accelerator.name)
        if run.precision == "32":
            use_full_float32()
        path = work(run)
    except Stopped as stopped:
        run.console.say(f"Stopped after step {stopped.step}; the same command resumes from there.")
        return exit_status(stopped.signal)
    except UserError:
        run.check_directory()  # a lost run directory explains the error better
        if run.console.is_diverted:
            traceback.print_exc()  # to the log, where the reason of an unknown error can be found
        run.withdraw()
        raise
    except OSError:
        run.check_directory()  # as above
        traceback.print_exc()  # to the log: a programming error may have caused the OSError
        raise
    except RunDirectoryLostError:
        raise
    except Exception as error:
        # The failure of another rank causes such an error.
        other_rank_ended = any(words in str(error) for words in LOST_CONNECTION_ERRORS)
        is_first = is_first_to_fail()
        if is_first and not other_rank_ended:
            run.console.error(traceback.format_exc())
        else:
            traceback.print_exc()  # to the log
        if is_first:
            what = "ended because another rank ended" if other_rank_ended else "failed"
            run.console.error(f"{where} {what}; the log is {log}.")
        if other_rank_ended:
            time.sleep(1)  # so that the launcher sees and reports the end of the other rank first
        return 1
    run.console.result(path)
    return 0


def _checkpoint_remark(options: CommonOptions, stage: Stage) -> str:
    has_checkpoint = list_checkpoints(options.output_dir / stage.name / "checkpoints")
    return ". The last complete checkpoint is unchanged." if has_checkpoint else "."
