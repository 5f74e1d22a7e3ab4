"""Checks everything before any work begins, and makes the plan of a job."""

import contextlib
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from megakit.checkpoints.manifest import CHANGES, CODE, Manifest
from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.identity import changed_names, differences, identify, listed
from megakit.job.layout import Layout, plan_layout, too_few_gpus
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.program import code_of
from megakit.job.ranges import names_are_usable
from megakit.job.run_lock import close_in_children, lock
from megakit.job.runs import (
    RunDirectory,
    StartCheckpoint,
    check_writable,
    find_resumption,
    find_start,
)
from megakit.job.sizes import Sizes, check_sizes
from megakit.job.stage import Stage
from megakit.reporting.console import Console
from megakit.runtime.accelerator import Accelerator, find_accelerator
from megakit.runtime.foreign_files import reading, reason_of
from megakit.runtime.interpreter import find_limits
from megakit.runtime.loopback import ensure_loopback

PLAN_VARIABLE = "MEGAKIT_PLAN"
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """The decisions that one process makes for all ranks of a job.

    Attributes:
        dataset: Name of the dataset.
        start: Checkpoint of the previous stage to start from, or None.
        resume: Checkpoint of this run to resume from, or None.
        accelerator: The device that the job runs on.
        layout: How the job's processes share the work.
        identity: Everything that the run's result depends on; empty for a script that does not
            train.
        is_done: Whether the run has already ended.
        lock: Device and inode number of the lock file in the run directory; None for a job
            without a lock.
        old_run: The run that `--fresh` has renamed, or None.
    """

    dataset: Any
    start: str | None
    resume: str | None
    accelerator: Accelerator
    layout: Layout
    identity: dict[str, Any]
    is_done: bool
    lock: tuple[int, int] | None = None
    old_run: str | None = None

    def to_json(self) -> str:
        """Serializes the plan for the other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Returns the plan that another process serialized with `to_json`."""
        content = json.loads(text)
        content["accelerator"] = Accelerator(**content["accelerator"])
        content["layout"] = Layout(**content["layout"])
        content["lock"] = tuple(content["lock"]) if content["lock"] else None
        return cls(**content)

    def for_ranks(self) -> tuple[str, int]:
        """Writes the plan to a file in memory, which the ranks of this process inherit.

        An environment variable has at most 128 KiB, too few for the code of a large project.

        Returns:
            The value of `PLAN_VARIABLE`, and the file descriptor that the ranks have to inherit.
        """
        descriptor = os.memfd_create("plan")
        with open(descriptor, "w", closefd=False) as file:
            file.write(self.to_json())
        return f"{os.getpid()} {descriptor}", descriptor

    @classmethod
    def of_launcher(cls, text: str) -> "Plan":
        """Returns the plan that this process's parent wrote in `for_ranks`.

        Args:
            text: The value of `PLAN_VARIABLE`.

        Raises:
            UserError: Another process set the value, or the plan is damaged.
        """
        remedy = f"The scripts set it for the processes that they start. Unset {PLAN_VARIABLE}."
        with reading(f"the environment variable {PLAN_VARIABLE}", remedy):
            launcher, descriptor = map(int, text.split())
            if launcher != os.getppid():
                raise ValueError("another job set it")
            # All ranks share the position in the file, and `pread` does not move it.
            content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            os.close(descriptor)
            return cls.from_json(content.decode())


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
        checked = _check(stage, options, cluster, console, script)
        _report_remarks(stage, checked, console, script)
        return _lock_and_plan(stage, checked, console)
    except UserError:
        raise
    except Exception as error:  # no work has begun, so any error is a refusal
        if options.verbose:
            traceback.print_exc()
        raise UserError(failed_check("the preparation", error)) from error


@dataclass(frozen=True)
class _Checked:
    """The results of the checks, from which the plan is made."""

    training: TrainingOptions | None
    directory: RunDirectory
    start: StartCheckpoint | None
    accelerator: Accelerator
    layout: Layout
    dataset: Any
    identity: dict[str, Any]

    @property
    def start_path(self) -> str | None:
        return str(self.start.path) if self.start else None


class _Checks:
    """Collects the problems of several checks, so that one message lists all of them."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.problems: list[str] = []

    def attempt(self, what: str, check: Callable[[], T]) -> T | None:
        """Returns the result of a check; if the check raises, collects the problems."""
        try:
            return check()
        except UserError as error:
            self.problems += error.problems
        except Exception as error:  # an unexpected error is reported with the other problems
            if self.verbose:
                traceback.print_exc()
            self.problems.append(failed_check(what, error))
        return None


def _check(
    stage: Stage,
    options: CommonOptions,
    cluster: Cluster,
    console: Console,
    script: Path | None,
) -> _Checked:
    """Runs all checks, and downloads missing data if no check has failed; locks nothing."""
    training = options if isinstance(options, TrainingOptions) else None
    checks, start_checks = _Checks(options.verbose), _Checks(options.verbose)
    checks.problems += options.problems()
    is_usable = names_are_usable(options)  # otherwise no path can be passed to the file system
    start, sizes = None, Sizes()
    if is_usable:
        start, sizes = _check_start(stage, options, console, start_checks)
    layout, layout_problems = plan_layout(options, cluster, stage, sizes.width)
    checks.problems += layout_problems
    checks.problems += find_limits(min(1024, layout.devices + options.num_workers))
    if not is_usable:
        raise UserError(checks.problems)
    directory = RunDirectory(options.output_dir / stage.name)

    unwritable = checks.attempt(
        "--output-dir",
        lambda: check_writable(options.output_dir) or check_writable(directory.path),
    )
    checks.problems += unwritable or []
    checks.attempt("the loopback interface", ensure_loopback)
    accelerator = checks.attempt(
        f"--accelerator {options.accelerator}",
        lambda: find_accelerator(options.accelerator, options.precision),
    )
    if accelerator is not None:
        checks.problems += too_few_gpus(layout, accelerator)
    resumes = training is None or not training.fresh
    old = None
    if unwritable == [] and resumes:
        old = checks.attempt(f"{directory.path}", directory.identity)
    checks.problems += start_checks.problems
    previous = (old or {}).get("dataset") or (start.manifest.dataset if start else None)
    # A command that is refused anyway downloads nothing and reports nothing about the data.
    is_refused = bool(checks.problems)
    say = (lambda line: None) if is_refused else console.say
    dataset = checks.attempt(
        "the data", lambda: options.resolve_dataset(previous, say, not is_refused)
    )
    identity: dict[str, Any] = {}
    if training:
        digest = start.manifest.digest if start else None
        code = checks.attempt(
            "the code", lambda: identify(stage, training, dataset, digest, script)
        )
        # Effective sizes, whether an option sets them or not.
        identity = (code or {}) | sizes.by_option
    if accelerator is None or checks.problems:
        raise UserError(checks.problems)
    checked = _Checked(training, directory, start, accelerator, layout, dataset, identity)
    if training and resumes:
        newest = directory.newest_of(stage.name, identity)
        if problems := _other_run(checked) or _changed_code(checked, newest):
            raise UserError(problems)
    return checked


def _check_start(
    stage: Stage, options: CommonOptions, console: Console, checks: _Checks
) -> tuple[StartCheckpoint | None, Sizes]:
    """Finds the checkpoint to start from, and the sizes of the stage's model."""
    start = checks.attempt(
        "the checkpoint to start from",
        lambda: find_start(stage, options.named_checkpoint, options.output_dir, console.say),
    )
    if checks.problems:
        return None, Sizes()
    path = start.path if start else None
    sizes = checks.attempt("the model's sizes", lambda: check_sizes(stage, options, path))
    return start, sizes or Sizes()


def _report_remarks(stage: Stage, checked: _Checked, console: Console, script: Path | None) -> None:
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
                    f"{before.name} has changed since it made {checked.start.path}: "
                    f"{listed(changed)}. To start from the new code's result, run "
                    f"{before.name} again with --fresh."
                )
    if accelerator.name == "cpu" and layout.devices > accelerator.count:
        console.say(
            f"{layout.devices} processes share the {accelerator.count} CPU cores of this machine: "
            "the result is the same, but the job takes longer."
        )


def _lock_and_plan(
    stage: Stage, checked: _Checked, console: Console
) -> tuple[Plan, contextlib.ExitStack]:
    with contextlib.ExitStack() as locks:
        if checked.start is not None:
            locks.enter_context(checked.start.file)
            close_in_children(checked.start.file)
        old_run = _rename_old_run(checked, console)
        try:
            own = lock(checked.directory.path)
            locks.callback(own.close)
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
            layout=checked.layout,
            identity=checked.identity,
            is_done=is_done,
            lock=own.inode,
            old_run=old_run,
        )
        return plan, locks.pop_all()


def _rename_old_run(checked: _Checked, console: Console) -> str | None:
    """With `--fresh`, renames the old run directory; returns its new path."""
    directory = checked.directory
    if not (checked.training and checked.training.fresh and directory.path.exists()):
        return None
    old_lock = lock(directory.path)  # raises if another process uses the directory
    old_run = directory.rename()
    console.say(f"The old run is now {old_run}.")
    old_lock.close()
    return str(old_run)


def _open_run(stage: Stage, checked: _Checked, console: Console) -> tuple[Path | None, bool]:
    """Records the run in the locked directory, and finds the checkpoint to resume from.

    Returns:
        The checkpoint, or None; and whether the run has ended.
    """
    directory, identity = checked.directory, checked.identity
    assert checked.training is not None
    # Another process may have used the directory between the first comparison and the lock.
    if problems := _other_run(checked):
        raise UserError(problems)
    found = find_resumption(directory, stage.name, identity, console.say)
    path, newest = found or (None, None)
    if problems := _changed_code(checked, newest):
        raise UserError(problems)
    if newest and newest.ends(checked.training.max_steps) and directory.summary.is_file():
        directory.write_identity(newest.run)  # it may have been removed
        return path, True
    if newest:
        _record_code_changes(identity, newest, console)
    directory.write_identity(identity)
    directory.summary.unlink(missing_ok=True)
    if newest:
        console.say(f"Resuming from {path}, step {newest.step}.")
    return path, False


def _other_run(checked: _Checked) -> list[str]:
    """Returns why the run in the directory is not the requested run; no message if it is."""
    return differences(checked.directory, checked.identity, checked.start_path, checked.training)


def _changed_code(checked: _Checked, newest: Manifest | None) -> list[str]:
    """Returns a message if the code has changed since the newest checkpoint of the run."""
    options = checked.training
    assert options is not None
    changed = changed_names(newest.run, checked.identity) if newest else []
    if newest is None or not changed or options.keep_changes:
        return []
    remedy = "--fresh starts over with the new code (the old run is kept under another name)"
    if newest.ends(options.max_steps):
        remedy += "; without the changes the run has already ended"
    else:
        remedy += "; --keep-changes resumes the run, and its result then comes from both versions"
    return [
        f"{checked.directory.path}: the code was changed since its last checkpoint: "
        f"{listed(changed)}. {remedy}."
    ]


def _record_code_changes(identity: dict[str, Any], newest: Manifest, console: Console) -> None:
    """Adds to a run's identity which code has changed since its newest checkpoint."""
    identity[CHANGES] = [*newest.run.get(CHANGES, [])]
    if not identity[CODE]:  # a notebook resumes the run of a script
        identity[CODE] = newest.run.get(CODE, {})
    if changed := changed_names(newest.run, identity):
        identity[CHANGES].append({"step": newest.step, "names": changed})
        console.say(f"Resuming with changed code: {listed(changed)}.")


def failed_check(what: str, error: Exception) -> str:
    """Returns the message for a check that raised an unexpected error."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    reason = reason_of(error).rstrip(".")
    return f"{what}: the check failed ({reason}). --verbose shows where."
