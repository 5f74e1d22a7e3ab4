"""Checks everything before any work begins, and makes the plan of a job."""

import contextlib
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megakit.checkpoints.manifest import CHANGES, CODE, Manifest
from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.identity import changed_names, differences, identify, listed
from megakit.job.layout import Layout, plan_layout
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.program import code_of
from megakit.job.ranges import names_are_usable
from megakit.job.run_lock import RunLock, close_in_children, lock
from megakit.job.runs import (
    RunDirectory,
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
    """

    dataset: Any
    start: str | None
    resume: str | None
    accelerator: Accelerator
    layout: Layout
    identity: dict[str, Any]
    is_done: bool
    lock: tuple[int, int] | None = None

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

    def for_ranks(self) -> str:
        """Returns the value of `PLAN_VARIABLE`: the plan, and the id of the launching process."""
        return json.dumps({"launcher": os.getpid(), "plan": self.to_json()})

    @classmethod
    def of_launcher(cls, text: str) -> "Plan":
        """Returns the plan in a value of `PLAN_VARIABLE` that this process's parent set.

        Raises:
            UserError: Another process set the value, or the value is damaged.
        """
        remedy = f"The scripts set it for the processes that they start. Unset {PLAN_VARIABLE}."
        with reading(f"the environment variable {PLAN_VARIABLE}", remedy):
            content = json.loads(text)
            if content["launcher"] != os.getppid():
                raise ValueError("it is not this job's")
            return cls.from_json(content["plan"])


def prepare(
    stage: Stage,
    options: CommonOptions,
    cluster: Cluster,
    console: Console,
    script: Path | None = None,
) -> tuple[Plan, Any]:
    """Checks everything, and only then locks the run directory.

    Args:
        stage: The stage to run.
        options: Options of the command line.
        cluster: The job, and the place of this process in it.
        console: Receives the messages.
        script: The script whose code is compared with the run's; None: no code is compared.

    Returns:
        The plan, and an `ExitStack` that holds the locks on the run directory and on the
        checkpoint that the job starts from. The stack has to stay open while the job runs.

    Raises:
        UserError: Lists all problems that can be found together.
    """
    try:
        return _prepare(stage, options, cluster, console, script)
    except UserError:
        raise
    except Exception as error:  # no work has begun, so any error is a refusal
        if options.verbose:
            traceback.print_exc()
        raise UserError(failed_check("the preparation", error)) from error


def _prepare(
    stage: Stage,
    options: CommonOptions,
    cluster: Cluster,
    console: Console,
    script: Path | None,
) -> tuple[Plan, Any]:
    training = options if isinstance(options, TrainingOptions) else None
    problems = options.problems()
    # Unusable names cannot be passed to the file system.
    usable = names_are_usable(options)

    def attempt(what: str, check: Callable[[], Any], problems: list[str] = problems) -> Any:
        try:
            return check()
        except UserError as error:
            problems.extend(error.problems)
        except Exception as error:  # an unexpected error is reported with the other problems
            if options.verbose:
                traceback.print_exc()
            problems.append(failed_check(what, error))
        return None

    of_start: list[str] = []  # reported after the problems of the layout
    start, sizes = None, Sizes()
    if usable:
        named = options.named_checkpoint
        start = attempt(
            "the checkpoint to start from",
            lambda: find_start(stage, named, options.output_dir, console.say),
            of_start,
        )
    if usable and not of_start:
        path = start[0] if start else None
        found = attempt("the model's sizes", lambda: check_sizes(stage, options, path), of_start)
        sizes = found or sizes
    layout, impossible = plan_layout(
        options,
        cluster,
        global_batch_size=training.global_batch_size if training else None,
        width=sizes.width,  # 0 if unknown: every number divides 0
        num_pipeline_stages=stage.num_pipeline_stages,
        num_heads=stage.num_heads,
    )
    problems += [*impossible, *find_limits(min(1024, layout.devices + options.num_workers))]
    if not usable:
        raise UserError(problems)
    directory = RunDirectory(options.output_dir / stage.name)

    unwritable = attempt(
        "--output-dir",
        lambda: check_writable(options.output_dir) or check_writable(directory.path),
    )
    problems += unwritable or []
    is_writable = unwritable == []
    attempt("the loopback interface", ensure_loopback)
    accelerator = attempt(
        f"--accelerator {options.accelerator}",
        lambda: find_accelerator(options.accelerator, options.precision),
    )
    if accelerator is not None:
        problems += too_many(layout, accelerator)
    is_anew = training is not None and training.fresh
    old = attempt(f"{directory.path}", directory.identity) if is_writable and not is_anew else None
    problems += of_start
    previous = (old or {}).get("dataset") or (start[1].dataset if start else None)
    # A command that is refused anyway downloads nothing and reports nothing about the data.
    refused = bool(problems)
    say = (lambda line: None) if refused else console.say
    dataset = attempt("the data", lambda: options.resolve_dataset(previous, say, not refused))
    identity: dict[str, Any] = {}
    if training:
        digest = start[1].digest if start else None
        code = attempt("the code", lambda: identify(stage, training, dataset, digest, script))
        if code is not None:
            identity = code | sizes.by_option  # effective sizes, whether an option sets them or not
        if not problems and not is_anew:
            problems += _other_run(directory, stage, training, identity, start and str(start[0]))
    if problems:
        raise UserError(problems)

    if accelerator.remark:
        console.say(accelerator.remark)
    if start and script:
        _remark_on_old_code(stage, script, start, console)
    if accelerator.name == "cpu" and layout.devices > accelerator.count:
        console.say(
            f"{layout.devices} processes share the {accelerator.count} CPU cores of this machine: "
            "the result is the same, the time is not."
        )
    with contextlib.ExitStack() as guard:
        if start is not None:
            guard.enter_context(start[2])
            close_in_children(start[2])
        own = _lock(directory, training, console)
        guard.callback(own.close)
        start_path = str(start[0]) if start else None
        resume, done = None, False
        if training:
            resume, done = _find_own(directory, stage, training, identity, start_path, console)
        plan = Plan(
            dataset=dataset,
            start=start_path,
            resume=str(resume[0]) if resume else None,
            accelerator=accelerator,
            layout=layout,
            identity=identity,
            is_done=done,
            lock=own.inode,
        )
        return plan, guard.pop_all()


def _remark_on_old_code(
    stage: Stage, script: Path, start: tuple[Path, Manifest, Any], console: Console
) -> None:
    """Reports if the previous stage's code has changed since it made the checkpoint."""
    assert stage.before is not None
    before = script.with_name(stage.before.script)
    if not before.is_file():  # the previous stage belongs to another project
        return
    changed = changed_names(start[1].run, {CODE: code_of(before)})
    if changed:
        console.say(
            f"{before.name} has changed since it made {start[0]}: {listed(changed)}. "
            f"To start from the new code's result, run it again with --fresh."
        )


def _lock(directory: RunDirectory, options: TrainingOptions | None, console: Console) -> RunLock:
    """Locks the run directory; with `--fresh`, renames the old run directory first."""
    if options and options.fresh and directory.path.exists():
        old = lock(directory.path)  # raises if another process uses the directory
        console.say(f"The old run is now {directory.set_aside()}.")
        old.close()
    return lock(directory.path)


def _find_own(
    directory: RunDirectory,
    stage: Stage,
    options: TrainingOptions,
    identity: dict[str, Any],
    start: str | None,
    console: Console,
) -> tuple[tuple[Path, Manifest] | None, bool]:
    """Records the run in the locked directory, and finds the checkpoint to resume from.

    Returns:
        The checkpoint with its manifest, or None; and whether the run is done.
    """
    # Another process may have used the directory between the first comparison and the lock.
    if problems := differences(directory, identity, start):
        raise UserError(problems)
    found = find_resumption(directory, stage.name, identity, console.say)
    manifest = found[1] if found else None
    if problems := _changed_code(directory, options, manifest, identity):
        raise UserError(problems)
    done = is_done(directory, options, found)
    if not done:
        if found:
            _note_changes(identity, found[1], console)
        directory.write_identity(identity)
        directory.summary.unlink(missing_ok=True)
        if found:
            console.say(f"Going on from {found[0]}, step {found[1].step}.")
    return found, done


def _other_run(
    directory: RunDirectory,
    stage: Stage,
    options: TrainingOptions,
    identity: dict[str, Any],
    start: str | None,
) -> list[str]:
    """Returns why the run in a directory is not the requested run; no message if it is."""
    newest = directory.newest_of(stage.name, identity)
    return differences(directory, identity, start) or _changed_code(
        directory, options, newest, identity
    )


def _changed_code(
    directory: RunDirectory,
    options: TrainingOptions,
    newest: Manifest | None,
    identity: dict[str, Any],
) -> list[str]:
    """Returns a message if the code has changed since the newest checkpoint of the run."""
    changed = changed_names(newest.run, identity) if newest else []
    if newest is None or not changed or options.keep_changes:
        return []
    remedy = "--fresh starts over with the new code (the old run is kept under another name)"
    if newest.ends(options.max_steps):
        remedy += "; without the changes the run is done"
    else:
        remedy += "; --keep-changes goes on with it, so that the result comes from both"
    return [
        f"{directory.path}: the code was changed since its last checkpoint: {listed(changed)}. "
        f"{remedy}."
    ]


def _note_changes(identity: dict[str, Any], found: Manifest, console: Console) -> None:
    """Records in a run's identity at which steps its code was changed."""
    identity[CHANGES] = [*found.run.get(CHANGES, [])]
    if not identity[CODE]:  # a notebook resumes the run of a script
        identity[CODE] = found.run.get(CODE, {})
    if changed := changed_names(found.run, identity):
        identity[CHANGES].append({"step": found.step, "names": changed})
        console.say(f"Going on with changed code: {listed(changed)}.")


def is_done(
    directory: RunDirectory,
    options: TrainingOptions,
    resume: tuple[Path, Manifest] | None,
) -> bool:
    """Returns whether a run has its last step's verified checkpoint and its summary file."""
    return resume is not None and resume[1].ends(options.max_steps) and directory.summary.is_file()


def failed_check(what: str, error: Exception) -> str:
    """Returns the message for a check that raised an unexpected error."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    reason = reason_of(error).rstrip(".")
    return f"{what}: the check failed ({reason}). --verbose shows where."


def too_many(layout: Layout, accelerator: Accelerator) -> list[str]:
    """Returns a message if there are more processes than GPUs; processes may share CPUs."""
    if accelerator.name == "gpu" and layout.devices > accelerator.count:
        has = f"{accelerator.count} GPU" + "s" * (accelerator.count != 1)
        return [
            f"--devices {layout.devices}: this machine has {has}, and each process needs its own. "
            "Use fewer, or --accelerator cpu."
        ]
    return []
