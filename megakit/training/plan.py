"""Checking everything before any work begins."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megakit.errors import UserError
from megakit.reporting.console import Console
from megakit.runtime.accelerator import Accelerator, find_accelerator
from megakit.runtime.loopback import ensure_loopback
from megakit.training.layout import Cluster, Layout, plan_layout
from megakit.training.options import CommonOptions, TrainingOptions
from megakit.training.runs import (
    RunDirectory,
    Stage,
    check_writable,
    differences,
    find_resumption,
    find_start,
    lock,
)

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
    """

    dataset: Any
    start: str | None
    resume: str | None
    accelerator: Accelerator
    layout: Layout
    identity: dict[str, Any]
    is_done: bool

    def to_json(self) -> str:
        """For ranks that only listen."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that another process made."""
        content = json.loads(text)
        content["accelerator"] = Accelerator(**content["accelerator"])
        content["layout"] = Layout(**content["layout"])
        return cls(**content)


def prepare(
    stage: Stage, options: CommonOptions, cluster: Cluster, console: Console
) -> tuple[Plan, Any]:
    """Checks everything, and only then takes the run directory.

    Returns:
        The plan, and the lock on the directory, to be kept for as long as the job runs.

    Raises:
        UserError: With all problems that can be found together.
    """
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
    directory = RunDirectory(options.output_dir / stage.name)
    unwritable = check_writable(options.output_dir) or check_writable(directory.path)
    problems += impossible + unwritable

    def attempt(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except UserError as error:
            problems.extend(error.problems)
        except OSError as error:
            problems.append(f"{error.filename}: {error.strerror}.")
        return None

    attempt(ensure_loopback)
    accelerator = attempt(lambda: find_accelerator(options.accelerator, options.precision))
    if accelerator is not None:
        problems += too_many(layout, accelerator)
    is_anew = training is not None and training.fresh
    old = None if is_anew or unwritable else attempt(directory.identity)
    named = getattr(options, "checkpoint", None)
    start = attempt(lambda: find_start(stage, named, options.output_dir, console.say))
    previous = (old or {}).get("dataset") or (start[1].dataset if start else None)
    # Nothing is downloaded for a command that is refused anyway.
    refused = bool(problems)
    dataset = attempt(lambda: options.resolve_dataset(previous, console.say, not refused))
    identity: dict[str, Any] = {}
    if training:
        identity = {name: getattr(training, name) for name in training.identity}
        identity |= {
            "model": stage.model,
            "dataset": dataset,
            "start": start[1].digest if start else None,
            "best_by": training.best_by(),
        }
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
    guard = lock(directory)
    resume = None
    if training:
        resume = _take(directory, training, identity, console)
    else:
        directory.path.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        dataset=dataset,
        start=str(start[0]) if start else None,
        resume=str(resume) if resume else None,
        accelerator=accelerator,
        layout=layout,
        identity=identity,
        is_done=training is not None and resume is not None and directory.is_done,
    )
    return plan, guard


def _take(
    directory: RunDirectory, options: TrainingOptions, identity: dict[str, Any], console: Console
) -> Path | None:
    """Makes the directory this run's, and finds the checkpoint to go on from."""
    if options.fresh and (aside := directory.set_aside()):
        console.say(f"The old run is now {aside}.")
    if directory.identity() != identity:
        directory.write_identity(identity)
    found = find_resumption(directory, console.say)
    return found[0] if found else None


def too_many(layout: Layout, accelerator: Accelerator) -> list[str]:
    """GPUs cannot be shared by processes; CPUs can."""
    if accelerator.name == "gpu" and layout.devices > accelerator.count:
        has = f"{accelerator.count} GPU" + "s" * (accelerator.count != 1)
        return [
            f"--devices {layout.devices}: this machine has {has}, and each process needs its own. "
            "Use fewer, or --accelerator cpu."
        ]
    return []
