"""Checking everything before any work begins."""

import contextlib
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megakit.checkpoints.manifest import Manifest
from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.layout import Layout, plan_layout
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.ranges import names_are_usable
from megakit.job.run_lock import RunLock, close_in_children, lock
from megakit.job.runs import (
    RunDirectory,
    check_writable,
    differences,
    find_resumption,
    find_start,
)
from megakit.job.stage import Stage
from megakit.reporting.console import Console
from megakit.runtime.accelerator import Accelerator, find_accelerator
from megakit.runtime.foreign_files import reading, reason_of
from megakit.runtime.interpreter import find_limits
from megakit.runtime.loopback import ensure_loopback

PLAN_VARIABLE = "MEGAKIT_PLAN"


@dataclass(frozen=True)
class Plan:
    """What one process works out and every rank of the job goes by.

    Attributes:
        dataset: Name of the dataset.
        start: Checkpoint of the stage before, or None.
        resume: Checkpoint of this run to go on from, or None.
        accelerator: Where the job runs.
        layout: How its processes share the work.
        identity: What makes this run the run it is; empty where nothing is trained.
        is_done: Whether there is nothing left to do.
        lock: Device and inode number of the lock file in the run directory; None for a job that
            takes none.
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
        """For ranks that only listen."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that another process made."""
        content = json.loads(text)
        content["accelerator"] = Accelerator(**content["accelerator"])
        content["layout"] = Layout(**content["layout"])
        content["lock"] = tuple(content["lock"]) if content["lock"] else None
        return cls(**content)

    def for_ranks(self) -> str:
        """For `PLAN_VARIABLE`: the plan, and which process made it."""
        return json.dumps({"launcher": os.getpid(), "plan": self.to_json()})

    @classmethod
    def of_launcher(cls, text: str) -> "Plan":
        """The plan that this process's parent made.

        Raises:
            UserError: Another process made it, or it is damaged.
        """
        remedy = f"The scripts set it for the processes that they start. Unset {PLAN_VARIABLE}."
        with reading(f"the environment variable {PLAN_VARIABLE}", remedy):
            content = json.loads(text)
            if content["launcher"] != os.getppid():
                raise ValueError("it is not this job's")
            return cls.from_json(content["plan"])


def prepare(
    stage: Stage, options: CommonOptions, cluster: Cluster, console: Console
) -> tuple[Plan, Any]:
    """Checks everything, and only then takes the run directory.

    Returns:
        The plan, and what has to stay open for as long as the job runs: the locks on the run
        directory and on the checkpoint that it starts from.

    Raises:
        UserError: With all problems that can be found together.
    """
    try:
        return _prepare(stage, options, cluster, console)
    except UserError:
        raise
    except Exception as error:  # whatever it is, nothing has begun
        if options.verbose:
            traceback.print_exc()
        raise UserError(failed_check("the preparation", error)) from error


def _prepare(
    stage: Stage, options: CommonOptions, cluster: Cluster, console: Console
) -> tuple[Plan, Any]:
    training = options if isinstance(options, TrainingOptions) else None
    problems = options.problems()
    layout, impossible = plan_layout(
        options,
        cluster,
        global_batch_size=training.global_batch_size if training else None,
        width=stage.width,
        num_pipeline_stages=stage.num_pipeline_stages,
        num_heads=stage.num_heads,
    )
    problems += [*impossible, *find_limits(min(1024, layout.devices + options.num_workers))]
    if not names_are_usable(options):  # the file system cannot even be asked about them
        raise UserError(problems)
    directory = RunDirectory(options.output_dir / stage.name)

    def attempt(what: str, check: Callable[[], Any]) -> Any:
        try:
            return check()
        except UserError as error:
            problems.extend(error.problems)
        except Exception as error:  # whatever it is, it is one problem among others
            if options.verbose:
                traceback.print_exc()
            problems.append(failed_check(what, error))
        return None

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
    named = getattr(options, "checkpoint", None)
    start = attempt(
        "the checkpoint to start from",
        lambda: find_start(stage, named, options.output_dir, console.say),
    )
    previous = (old or {}).get("dataset") or (start[1].dataset if start else None)
    # Nothing is downloaded for a command that is refused anyway.
    refused = bool(problems)
    dataset = attempt(
        "the data", lambda: options.resolve_dataset(previous, console.say, not refused)
    )
    identity: dict[str, Any] = {}
    if training:
        identity = {name: getattr(training, name) for name in training.identity}
        identity |= {
            "model": stage.model,
            "dataset": dataset,
            "start": start[1].digest if start else None,
            "best_by": training.choice(),
        }
        identity |= training.stopping()
        identity = json.loads(json.dumps(identity))  # as manifests have it
        if old is not None and not problems:
            problems += differences(directory, identity, str(start[0]) if start else None)
    if problems:
        raise UserError(problems)

    if accelerator.remark:
        console.say(accelerator.remark)
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


def _lock(directory: RunDirectory, options: TrainingOptions | None, console: Console) -> RunLock:
    """Locks the run directory; with `--fresh` a new one, after the old one got another name."""
    if options and options.fresh and directory.path.exists():
        old = lock(directory.path)  # refuses if another process is at work there
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
    """Makes the locked directory this run's; finds the checkpoint to go on from.

    Returns:
        The checkpoint with its manifest, if there is one, and whether the run is done.
    """
    # Another start may have used the directory between the first comparison and the lock.
    if problems := differences(directory, identity, start):
        raise UserError(problems)
    directory.write_identity(identity)
    found = find_resumption(directory, stage.name, identity, console.say)
    done = is_done(directory, options, found)
    if not done:
        directory.summary.unlink(missing_ok=True)
        if found:
            console.say(f"Going on from {found[0]}, step {found[1].step}.")
    return found, done


def is_done(
    directory: RunDirectory,
    options: TrainingOptions,
    resume: tuple[Path, Manifest] | None,
) -> bool:
    """Whether a run has its last step's checkpoint, verified, and has reported its end."""
    return resume is not None and resume[1].ends(options.max_steps) and directory.summary.is_file()


def failed_check(what: str, error: Exception) -> str:
    """The message for a check that itself failed, in a way that nobody foresaw."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    reason = reason_of(error).rstrip(".")
    return f"{what}: the check failed ({reason}). --verbose shows where."


def too_many(layout: Layout, accelerator: Accelerator) -> list[str]:
    """GPUs cannot be shared by processes; CPUs can."""
    if accelerator.name == "gpu" and layout.devices > accelerator.count:
        has = f"{accelerator.count} GPU" + "s" * (accelerator.count != 1)
        return [
            f"--devices {layout.devices}: this machine has {has}, and each process needs its own. "
            "Use fewer, or --accelerator cpu."
        ]
    return []
