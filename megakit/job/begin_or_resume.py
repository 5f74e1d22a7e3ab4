"""Begins or resumes a run: locks and records its directory, and finds its last checkpoint."""

import contextlib
from pathlib import Path

from megakit.checkpoints.select import keep_own_checkpoints, remove_leftovers
from megakit.job.cluster import Cluster
from megakit.job.identity import record_code_changes, refuse_another_run, refuse_changed_code
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.plan import Plan, check_job, has_ended
from megakit.job.runs import RunDirectory, Stage, lock
from megakit.job.start_checkpoint import StartCheckpoint
from megakit.reporting.console import Console


def make_plan(
    stage: Stage,
    options: CommonOptions,
    cluster: Cluster,
    console: Console,
    script: Path | None = None,
) -> tuple[Plan, contextlib.ExitStack]:
    """Makes the plan of a job, and locks its run directory.

    Arguments and errors are those of `check_job`.

    Returns:
        The plan, and the locks on the run directory and on the checkpoint that the job starts
        from. The stack of locks has to stay open while the job runs.
    """
    plan, start = check_job(stage, options, cluster, console, script)
    return plan, begin_run(stage, options, plan, start, console)


def begin_run(
    stage: Stage,
    options: CommonOptions,
    plan: Plan,
    start: StartCheckpoint | None,
    console: Console,
) -> contextlib.ExitStack:
    """Locks the run directory, records the run in it, and finds the checkpoint to resume from.

    Raises:
        UserError: Another process uses the directory, or has used it since the checks.
    """
    directory = RunDirectory(options.output_dir / stage.name)
    with contextlib.ExitStack() as locks:
        if start is not None:
            locks.enter_context(start.file)
        if isinstance(options, TrainingOptions) and options.fresh and directory.path.exists():
            with lock(directory.path).file:
                plan.old_run = directory.set_aside()
            console.say(f"The old run is now {plan.old_run}.")
        file, plan.lock = lock(directory.path)
        locks.enter_context(file)
        if isinstance(options, TrainingOptions):
            _open_training(stage, options, plan, directory, console)
        if not plan.is_done:
            _say_device(plan, console)
        return locks.pop_all()


def _say_device(plan: Plan, console: Console) -> None:
    """Reports why a GPU is not used, and that processes share the cores of a CPU."""
    accelerator, devices = plan.accelerator, plan.layout.devices
    if accelerator.remark:
        console.say(accelerator.remark)
    if accelerator.name == "cpu" and devices > accelerator.count:
        console.say(
            f"{devices} processes share the {accelerator.count} CPU cores of this machine: the "
            "result is the same up to rounding, but the job takes longer."
        )


def _open_training(
    stage: Stage,
    options: TrainingOptions,
    plan: Plan,
    directory: RunDirectory,
    console: Console,
) -> None:
    refuse_another_run(directory, plan.identity, plan.start)
    checkpoints = directory.checkpoints
    remove_leftovers(checkpoints)
    path, newest = keep_own_checkpoints(checkpoints, stage.name, plan.identity, console.say)
    refuse_changed_code(directory, plan.identity, newest, options)
    paths = {name: path for name, path in options.places().items() if name != "output_dir"}
    places = {name: str(path.absolute()) for name, path in paths.items() if path is not None}
    places = directory.places() | places
    plan.resume = str(path) if path else None
    plan.is_done = has_ended(directory, newest, options)
    if plan.is_done and newest is not None:
        directory.write(newest.run, places)  # run.json may have been removed
        return
    if newest is not None:
        record_code_changes(plan.identity, newest, console)
        console.say(f"Resuming from {path}, step {newest.step}.")
    directory.write(plan.identity, places)
    directory.summary.unlink(missing_ok=True)
