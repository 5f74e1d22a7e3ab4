"""Makes the plan of a job: all checks first, then the locks and the changes on the disk."""

import contextlib
import traceback
from pathlib import Path
from typing import Any

from megakit.checkpoints.manifest import CHANGES, CODE, Manifest
from megakit.errors import UserError
from megakit.job.checks import Checked, changed_code, check, failed_check, other_run
from megakit.job.cluster import Cluster
from megakit.job.identity import changed_names, listed
from megakit.job.options import CommonOptions
from megakit.job.plan import Plan
from megakit.job.program import code_of
from megakit.job.run_lock import close_in_children, lock
from megakit.job.runs import find_resumption
from megakit.job.stage import Stage
from megakit.reporting.console import Console


def prepare(
    stage: Stage,
    options: CommonOptions,
    cluster: Cluster,
    console: Console,
    script: Path | None = None,
) -> tuple[Plan, contextlib.ExitStack]:
    """Checks everything, and only then locks the run directory.

    Args:
        stage: The stage to run.
        options: Options of the command line.
        cluster: The job, and the place of this process in it.
        console: Receives the messages.
        script: The script whose code is compared with the run's; None: no code is compared.

    Returns:
        The plan, and the locks on the run directory and on the checkpoint that the job starts
        from. The stack of locks has to stay open while the job runs.

    Raises:
        UserError: Lists all problems that can be found together.
    """
    try:
        checked = check(stage, options, cluster, console, script)
        _report_remarks(stage, checked, console, script)
        return _lock_and_plan(stage, checked, console)
    except UserError:
        raise
    except Exception as error:  # no work has begun, so any error is a refusal
        if options.verbose:
            traceback.print_exc()
        raise UserError(failed_check("the preparation", error)) from error


def _report_remarks(stage: Stage, checked: Checked, console: Console, script: Path | None) -> None:
    """Reports facts that refuse nothing, but that the user should know."""
    accelerator, layout = checked.accelerator, checked.layout
    if accelerator.remark:
        console.say(accelerator.remark)
    if checked.start and script and stage.before:
        before = script.with_name(stage.before.script)
        if before.is_file():  # otherwise the previous stage belongs to another project
            changed = changed_names(checked.start.manifest.run, {CODE: code_of(before)})
            if changed:
                console.say(
                    f"The code of {before.name} or of its imports has changed since it made "
                    f"{checked.start.path}: {listed(changed)}. To start from the new code's "
                    f"result, run {before.name} again with --fresh."
                )
    if accelerator.name == "cpu" and layout.devices > accelerator.count:
        console.say(
            f"{layout.devices} processes share the {accelerator.count} CPU cores of this machine: "
            "the result is the same up to rounding, but the job takes longer."
        )


def _lock_and_plan(
    stage: Stage, checked: Checked, console: Console
) -> tuple[Plan, contextlib.ExitStack]:
    with contextlib.ExitStack() as locks:
        if checked.start is not None:
            locks.enter_context(checked.start.file)
            close_in_children(checked.start.file)
        old_run = _rename_old_run(checked, console)
        try:
            own = lock(checked.directory.path)
        except OSError:  # a UserError would mean that the directory is another process's by now
            if old_run is not None:
                with contextlib.suppress(OSError):  # the first error matters more
                    Path(old_run).rename(checked.directory.path)
                    console.say(f"The old run is {checked.directory.path} again.")
            raise
        locks.callback(own.close)
        try:
            resume, is_done = None, False
            if checked.training:
                resume, is_done = _open_run(stage, checked, console)
        except BaseException:
            if old_run is not None:
                with contextlib.suppress(OSError):  # the first error matters more
                    if checked.directory.withdraw(old_run):
                        console.say(f"The old run is {checked.directory.path} again.")
            raise
        plan = Plan(
            dataset=checked.dataset,
            start=checked.start_path,
            resume=str(resume) if resume else None,
            accelerator=checked.accelerator,
            precision=checked.precision,
            layout=checked.layout,
            places=checked.places,
            identity=checked.identity,
            is_done=is_done,
            lock=own.inode,
            old_run=old_run,
        )
        return plan, locks.pop_all()


def _rename_old_run(checked: Checked, console: Console) -> str | None:
    """With `--fresh`, renames the old run directory; returns its new path."""
    directory = checked.directory
    if not (checked.training and checked.training.fresh and directory.path.exists()):
        return None
    old_lock = lock(directory.path)  # raises if another process uses the directory
    old_run = directory.rename()
    console.say(f"The old run is now {old_run}.")
    old_lock.close()
    return str(old_run)


def _open_run(stage: Stage, checked: Checked, console: Console) -> tuple[Path | None, bool]:
    """Records the run in the locked directory, and finds the checkpoint to resume from.

    Returns:
        The checkpoint, or None; and whether the run has ended.
    """
    directory, identity = checked.directory, checked.identity
    assert checked.training is not None
    # Another process may have used the directory between the first comparison and the lock.
    if problems := other_run(checked):
        raise UserError(problems)
    found = find_resumption(directory, stage.name, identity, console.say)
    path, newest = found or (None, None)
    if problems := changed_code(checked, newest):
        raise UserError(problems)
    if newest and newest.ends(checked.training.max_steps) and directory.summary.is_file():
        directory.write_identity(newest.run, checked.places)  # it may have been removed
        return path, True
    if newest:
        _record_code_changes(identity, newest, console)
    directory.write_identity(identity, checked.places)
    directory.summary.unlink(missing_ok=True)
    if newest:
        console.say(f"Resuming from {path}, step {newest.step}.")
    return path, False


def _record_code_changes(identity: dict[str, Any], newest: Manifest, console: Console) -> None:
    """Adds to a run's identity which code has changed since its newest checkpoint."""
    identity[CHANGES] = [*newest.run.get(CHANGES, [])]
    if not identity[CODE]:  # a notebook resumes the run of a script
        identity[CODE] = newest.run.get(CODE, {})
    if changed := changed_names(newest.run, identity):
        identity[CHANGES].append({"step": newest.step, "names": changed})
        console.say(f"Resuming with changed code: {listed(changed)}.")
