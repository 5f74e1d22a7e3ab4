"""Plans a job: decides everything once, before any work begins."""

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megakit.checkpoints.manifest import (
    CHANGES,
    FILES,
    IMPORTED,
    Manifest,
    list_checkpoints,
    verify,
)
from megakit.checkpoints.model_settings import read_model_settings
from megakit.checkpoints.select import keep_own_checkpoints, readable_checkpoints, remove_leftovers
from megakit.errors import UserError
from megakit.job.cluster import LAUNCHER, Cluster
from megakit.job.console import Console
from megakit.job.identity import changed_files, identify, refuse
from megakit.job.layout import Layout, find_sizes, plan_layout
from megakit.job.option_types import use_sizes_of
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.run import Run
from megakit.job.run_directory import RunDirectory, Stage
from megakit.runtime.accelerator import (
    Accelerator,
    find_accelerator,
    has_fast_bfloat16,
    is_certainly_cpu,
)
from megakit.runtime.atomic_files import set_aside, write_json

OptionsT = TypeVar("OptionsT", bound=CommonOptions)


class Start(NamedTuple):
    """The verified checkpoint that a stage starts from."""

    path: Path
    manifest: Manifest


def plan(
    stage: Stage,
    options: OptionsT,
    cluster: Cluster,
    console: Console,
    script: Path | None = None,
) -> Run[OptionsT]:
    """Decides everything about a job before any work begins.

    If the run directory exists, it is locked until `run.close()`. Nothing is written, except that
    checkpoints that the run cannot use get other names. The data may be downloaded.

    Args:
        stage: The stage to run.
        options: Options of the command line, which are not changed.
        cluster: The job, and the rank of this process.
        console: Receives the messages.
        script: The script whose files are recorded and compared; None: no file is.

    Returns:
        The run, with a copy of the options in which every open choice is made. In a process that
        only starts the ranks, accelerator and precision are a guess: to test a GPU would take a
        part of its memory.

    Raises:
        UserError: The job is impossible. All problems of the options come together, and so do
            those of start checkpoint, layout and device.
    """
    # 1. Options: each value has to be in its range.
    if problems := options.problems():
        raise UserError(problems)
    options = copy.copy(options)
    stage = Stage(options.run_name(stage.name), stage.before)

    # 2. Start checkpoint: it decides the sizes of the model.
    start, settings = None, dict[str, Any]()
    with _collecting(problems):
        start = find_start(stage, options)
        if start is not None:
            settings = read_model_settings(start.path)
            use_sizes_of(options, settings, start.path)

    # 3. Layout: it has to divide the model, the batch and the processes.
    sizes = find_sizes(options, settings)
    layout, layout_problems = plan_layout(options, cluster, sizes)
    problems += layout_problems

    # 4. Device: `auto` is a GPU that works, else the CPU.
    accelerator = find_accelerator("cpu")
    only_starts_ranks = layout.world_size > 1 and cluster.launcher is None
    if is_certainly_cpu("auto") or not only_starts_ranks:
        with _collecting(problems):
            accelerator = find_accelerator(options.accelerator, options.precision)
            problems += _too_few_gpus(layout, accelerator, cluster)
    if problems:
        raise UserError(problems)

    # 5. Identity: what the result depends on decides whether the run begins, resumes, is done, or
    # is another one than that in the directory. The lock keeps what is found there true.
    directory = RunDirectory(options.output_dir / stage.name)
    with contextlib.ExitStack() as on_error:
        lock = on_error.enter_context(directory.lock()) if directory.path.is_dir() else None
        found = list[Manifest]()
        if isinstance(options, TrainingOptions) and not options.fresh:
            found += readable_checkpoints(directory.checkpoints).values()
        before = found[-1].run if found else {}
        vars(options).update(  # for `fingerprint`
            start_dataset=start.manifest.dataset if start else None,
            run_dataset=before.get("dataset"),
            say=console.say,
        )
        run = Run(
            stage=stage,
            options=options,
            layout=layout,
            accelerator=accelerator,
            precision=_choose_precision(options, accelerator, before.get("precision")),
            dataset=options.fingerprint(),
            console=console,
            start=str(start.path) if start else None,
            lock=lock,
            only_starts_ranks=only_starts_ranks,
            work=layout.micro_batch_size * sizes["seq_length"] * sizes["hidden_size"] ** 2,
        )
        if isinstance(options, TrainingOptions):
            digest = start.manifest.digest if start else None
            run.identity = identify(options, run.dataset, run.precision, digest, script)
            if not options.fresh:
                _compare_with_directory(run, options.max_steps, found)
        if lock and not lock.writable() and not run.is_done:
            raise UserError(f"{directory.path}: cannot be written. Use another --output-dir.")
        on_error.pop_all()  # keeps the lock
    return run


def begin(run: Run[Any]) -> None:
    """Takes the run directory for a run that is not done.

    Locks a new directory, sets an old run aside if the user asked for it, removes what interrupted
    saves left, and records a training in run.json.

    Raises:
        UserError: Another process has taken the directory since the plan.
    """
    directory = run.directory
    if run.lock is not None and getattr(run.options, "fresh", False):
        renamed = set_aside(directory.path, directory.path.name)
        run.console.say(f"The old run is now {renamed}.")
        run.close()
        run.lock = None  # the lock went with the old run
    if run.lock is None:
        run.lock = directory.lock()
        if run.trains and list_checkpoints(directory.checkpoints):
            raise UserError(
                f"{directory.path}: another process has begun this run since the command was "
                "given. Give the command again."
            )
    if run.trains:
        remove_leftovers(directory.checkpoints)
        write_json(directory.path / "run.json", run.identity)
        directory.summary.unlink(missing_ok=True)


def find_start(stage: Stage, options: CommonOptions) -> Start | None:
    """Finds the checkpoint that a stage starts from; None for fresh weights.

    It is the user's `--checkpoint`, or the best one of a run directory: of the named one, or of the
    stage before.

    Raises:
        UserError: The checkpoint is missing, damaged or of another stage.
    """
    before, named = stage.before, getattr(options, "checkpoint", None)
    if before is None or named == "none":
        return None
    directory = RunDirectory(Path(named) if named else options.output_dir / before.name)
    is_checkpoint = named and not directory.checkpoints.is_dir()
    path = directory.path if is_checkpoint else directory.best_checkpoint()
    if path is None:
        raise UserError(
            f"{directory.checkpoints}: no checkpoint to start from. Run {before.script} with the "
            "same --output-dir first, or name one with --checkpoint."
        )
    manifest = verify(path)
    if manifest.stage not in (before.name, IMPORTED):
        raise UserError(
            f"{path}: stage {manifest.stage} saved this {manifest.model}, but {stage.script} "
            f"starts from a checkpoint of stage {before.name}. Run {before.script}, or name one of "
            "its checkpoints with --checkpoint."
        )
    return Start(path, manifest)


@contextlib.contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    """Adds the problems of a check to a list, so that one message tells all of them."""
    try:
        yield
    except UserError as error:
        problems += error.problems
    except OSError as error:
        problems.append(f"{error.filename}: {error.strerror}.")


def _too_few_gpus(layout: Layout, accelerator: Accelerator, cluster: Cluster) -> list[str]:
    """Returns a message if there are fewer GPUs than processes; processes may share CPUs."""
    count = accelerator.count
    # A process of srun or torchrun may see only its own GPU; NCCL refuses that two have the same.
    sees_own = count == 1 and cluster.launcher is not None and LAUNCHER not in os.environ
    if accelerator.name == "cpu" or layout.devices <= count or sees_own:
        return []
    return [
        f"--devices {layout.devices}: this machine has {count} GPU{'s' * (count != 1)}, and each "
        "process needs its own. Use fewer, or --accelerator cpu."
    ]


def _choose_precision(options: CommonOptions, accelerator: Accelerator, found: Any) -> str:
    """Returns the precision; `auto` goes on with a run in its precision, also on another device."""
    if options.precision != "auto":
        return options.precision
    if found in ("bf16-mixed", "32"):
        return str(found)
    return "32" if accelerator.name == "cpu" and not has_fast_bfloat16() else "bf16-mixed"


def _compare_with_directory(run: Run[Any], max_steps: int, found: Sequence[Manifest]) -> None:
    """Refuses another run than that in the directory; finds the checkpoint to resume from.

    Sets `resume`, `ended_at`, `is_done` and `changed` of the run, and completes its identity.

    Args:
        run: The run.
        max_steps: The option.
        found: The readable manifests in the directory, oldest first.
    """
    directory, stage = run.directory, run.stage.name
    if found and not any(one.belongs_to(stage, run.identity) for one in found):
        refuse(directory.path, found[-1].run, run.identity, run.start)
    path, newest = keep_own_checkpoints(directory.checkpoints, stage, run.identity, run.console.say)
    if newest is None:  # there is no checkpoint that can be used
        return
    run.resume = str(path)
    if newest.final:  # the run ended early; perhaps only its summary is missing
        run.ended_at = newest.step
    run.is_done = newest.ends(max_steps) and directory.summary.is_file()
    run.changed = changed_files(newest.run, run.identity[FILES])
    run.identity[FILES] = run.identity[FILES] or newest.run.get(FILES, {})  # a notebook has none
    run.identity[CHANGES] = [*newest.run.get(CHANGES, [])]
    if run.changed:
        run.identity[CHANGES].append({"step": newest.step, "files": run.changed})
