"""Makes the plan of a job: checks everything, and changes nothing on the disk."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megakit.checkpoints.context import read_model_settings
from megakit.checkpoints.manifest import Manifest
from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.code import changed_names, code_of, listed
from megakit.job.identity import (
    identify,
    refuse_another_run,
    refuse_changed_code,
)
from megakit.job.layout import Layout, Sizes, plan_layout
from megakit.job.option_types import flag
from megakit.job.options import CommonOptions, EarlierRun, TrainingOptions
from megakit.job.runs import RunDirectory, Stage, why_not_writable
from megakit.job.start_checkpoint import StartCheckpoint, find_start
from megakit.reporting.console import Console
from megakit.runtime.accelerator import (
    Accelerator,
    find_accelerator,
    has_fast_bfloat16,
    is_certainly_cpu,
)


@dataclass(kw_only=True)
class Plan:
    """The decisions that one process makes for all ranks of a job.

    Attributes:
        layout: How the job's processes share the work.
        accelerator: The device that the job runs on.
        precision: `bf16-mixed` or `32`.
        dataset: The fingerprint of the data.
        start: Checkpoint of the previous stage to start from, or None.
        resume: Checkpoint of this run to resume from, or None.
        identity: Everything that the run's result depends on; empty for a script that does not
            train.
        is_done: Whether the run has already ended.
        work: Multiplications in the product of a micro batch and a square weight of the model.
        chosen: Values that the plan has chosen for options that the command leaves out.
        lock: Device and inode number of the lock file in the run directory; None: no lock.
        old_run: The run that `--fresh` has set aside, or None.
    """

    layout: Layout
    accelerator: Accelerator
    precision: str
    dataset: str = ""
    start: str | None = None
    resume: str | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    work: int = 0
    chosen: dict[str, Any] = field(default_factory=dict)
    lock: tuple[int, int] | None = None
    old_run: Path | None = None


def check_job(
    stage: Stage,
    options: CommonOptions,
    cluster: Cluster,
    console: Console,
    script: Path | None = None,
) -> tuple[Plan, StartCheckpoint | None]:
    """Checks everything without a lock, and changes nothing on the disk; may download data.

    A process that only starts the ranks does not check a GPU, since the check would take a part of
    its memory.

    Args:
        stage: The stage to run.
        options: Options of the command line. Options that the command leaves out may get a value.
        cluster: The job, and the rank of this process.
        console: Receives the messages.
        script: The script whose code is compared with the run's; None: no code is compared.

    Returns:
        The plan and the checkpoint to start from. `is_done` is a guess, and so are accelerator and
        precision if the GPU was not checked.

    Raises:
        UserError: Lists the problems that can be found together.
    """
    training = options if isinstance(options, TrainingOptions) else None
    problems = options.problems()
    given = {option.name: getattr(options, option.name) for option in fields(options)}
    start, settings = None, dict[str, Any]()
    with _collecting(problems):
        named = getattr(options, "checkpoint", None)
        start = find_start(stage, named, options.output_dir, console.say)
        if start is not None:
            settings = read_model_settings(start.path)
            _choose_sizes(options, settings, start.path)
    sizes = Sizes.find(options, settings)
    layout, layout_problems = plan_layout(options, cluster, sizes)
    problems += layout_problems
    directory = RunDirectory(options.output_dir / stage.name)
    old: dict[str, Any] = {}
    if why := why_not_writable(directory.path):
        problems.append(why)
    elif training is None or not training.fresh:
        with _collecting(problems):
            old = directory.identity() or {}
    accelerator = find_accelerator("cpu")
    only_launches = layout.world_size > 1 and cluster.launcher is None
    if not only_launches or is_certainly_cpu("auto"):
        with _collecting(problems):
            accelerator = find_accelerator(options.accelerator, options.precision)
            problems += _too_few_gpus(layout, accelerator, cluster)
    if problems:
        raise UserError(problems)

    earlier = _earlier_runs(directory, start, old)
    vars(options).update(earlier=earlier, say=console.say)
    plan = Plan(
        layout=layout,
        accelerator=accelerator,
        precision=_choose_precision(options, accelerator, old),
        dataset=options.fingerprint(),
        start=str(start.path) if start else None,
        work=layout.micro_batch_size * sizes.seq_length * sizes.hidden_size**2,
    )
    now = {name: getattr(options, name) for name in given}
    plan.chosen = {name: value for name, value in now.items() if value != given[name]}
    if training is not None:
        plan.identity = identify(
            *(training, plan.dataset, plan.precision),
            *(start.manifest.digest if start else None, script),
        )
        if not training.fresh:
            newest = directory.newest_of(stage.name, plan.identity)
            refuse_another_run(directory, plan.identity, plan.start)
            refuse_changed_code(directory, plan.identity, newest, training)
            plan.is_done = has_ended(directory, newest, training)
    _say_changes_before(stage, start, console, script)
    return plan, start


@contextlib.contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    """Adds the problems of a check to a list, so that one message tells all of them."""
    try:
        yield
    except UserError as error:
        problems += error.problems
    except OSError as error:
        problems.append(f"{error.filename}: {error.strerror}.")


def _choose_sizes(options: CommonOptions, settings: Mapping[str, Any], start: Path) -> None:
    """Sets the options without a value that are sizes of the start checkpoint's model.

    Raises:
        UserError: An option differs from the checkpoint's size.
    """
    problems = []
    for option in fields(options):
        if option.default is not None or option.name not in settings:
            continue
        given, size = getattr(options, option.name), settings[option.name]
        if given not in (None, size):
            problems.append(
                f"{flag(option.name)} {given}: the model of {start} has {size}, and its weights "
                f"fit no other size. Leave {flag(option.name)} out, or start from fresh weights "
                "with --checkpoint none."
            )
        setattr(options, option.name, size)
    if problems:
        raise UserError(problems)


def _too_few_gpus(layout: Layout, accelerator: Accelerator, cluster: Cluster) -> list[str]:
    """Returns a message if there are fewer GPUs than processes; processes may share CPUs."""
    # With Slurm's --gpus-per-task, each process sees only its own GPU.
    count = max(accelerator.count, cluster.num_gpus if accelerator.count == 1 else 0)
    if accelerator.name == "cpu" or layout.devices <= count:
        return []
    return [
        f"--devices {layout.devices}: this machine has {count} GPU{'s' * (count != 1)}, and each "
        "process needs its own. Use fewer, or --accelerator cpu."
    ]


def _choose_precision(
    options: CommonOptions, accelerator: Accelerator, old: Mapping[str, Any]
) -> str:
    """Returns the precision; `auto` continues a run in its precision, also on another device."""
    if options.precision != "auto":
        return options.precision
    if old.get("precision") in ("bf16-mixed", "32"):
        return str(old["precision"])
    return "32" if accelerator.name == "cpu" and not has_fast_bfloat16() else "bf16-mixed"


def _earlier_runs(
    directory: RunDirectory, start: StartCheckpoint | None, old: Mapping[str, Any]
) -> list[EarlierRun]:
    own = EarlierRun(directory.path, False, old.get("dataset"), directory.places())
    if start is None:
        return [own]
    run = RunDirectory(start.path.absolute().parent.parent)  # above `checkpoints`
    near = directory.path.with_name(start.manifest.stage)
    shown = near if near.absolute() == run.path else run.path
    return [own, EarlierRun(shown, True, start.manifest.dataset, run.places())]


def has_ended(directory: RunDirectory, newest: Manifest | None, options: TrainingOptions) -> bool:
    """Returns whether a run has made its last checkpoint and written its summary."""
    return newest is not None and newest.ends(options.max_steps) and directory.summary.is_file()


def _say_changes_before(
    stage: Stage,
    start: StartCheckpoint | None,
    console: Console,
    script: Path | None,
) -> None:
    """Reports that the code of the previous stage is newer than the start checkpoint."""
    if start is None or script is None or stage.before is None:
        return
    before = script.with_name(stage.before.script)
    # Otherwise the previous stage belongs to another project.
    code = code_of(before) if before.is_file() else {}
    if changed := changed_names(start.manifest, code):
        console.say(
            f"The code of {before.name} or of its imports has changed since it made {start.path}: "
            f"{listed(changed)}. To start from the new code's result, run {before.name} again with "
            "--fresh."
        )
