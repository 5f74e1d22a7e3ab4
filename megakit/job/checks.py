"""Checks everything that a command needs before any work begins; changes nothing."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megakit.checkpoints.manifest import Manifest
from megakit.errors import UserError
from megakit.job.cluster import Cluster
from megakit.job.identity import changed_names, differences, identify, listed
from megakit.job.layout import Layout, plan_layout, too_few_gpus
from megakit.job.options import CommonOptions, TrainingOptions
from megakit.job.ranges import names_are_usable
from megakit.job.remembered import earlier_runs
from megakit.job.runs import RunDirectory, StartCheckpoint, check_writable, find_start
from megakit.job.sizes import Sizes, check_sizes, stated_sizes
from megakit.job.stage import Stage
from megakit.reporting.console import Console
from megakit.runtime.accelerator import Accelerator, find_accelerator, has_fast_bfloat16
from megakit.runtime.foreign_files import reason_of
from megakit.runtime.interpreter import find_limits
from megakit.runtime.loopback import ensure_loopback

T = TypeVar("T")


@dataclass(frozen=True)
class Checked:
    """The results of the checks, from which the plan is made."""

    training: TrainingOptions | None
    directory: RunDirectory
    start: StartCheckpoint | None
    accelerator: Accelerator
    precision: str
    layout: Layout
    dataset: Any
    places: dict[str, str]
    identity: dict[str, Any]

    @property
    def start_path(self) -> str | None:
        """The path of the checkpoint to start from, or None."""
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


def check(
    stage: Stage,
    options: CommonOptions,
    cluster: Cluster,
    console: Console,
    script: Path | None,
) -> Checked:
    """Runs all checks, and downloads missing data if no check has failed; locks nothing.

    Raises:
        UserError: Lists the problems of all checks.
    """
    training = options if isinstance(options, TrainingOptions) else None
    checks, start_checks = _Checks(options.verbose), _Checks(options.verbose)
    checks.problems += options.problems()
    is_usable = names_are_usable(options)  # otherwise no path can be passed to the file system
    start, sizes = None, stated_sizes(stage)
    if is_usable:
        start, sizes = _check_start(stage, options, console, start_checks)
    layout, layout_problems = plan_layout(options, cluster, sizes)
    checks.problems += layout_problems
    checks.problems += find_limits(min(1024, layout.devices + options.num_workers))
    if not is_usable:
        raise UserError(checks.problems)
    directory = RunDirectory(options.output_dir / stage.name)
    old = _check_directory(directory, options, checks)
    accelerator = _check_device(options, layout, cluster, checks)
    checks.problems += start_checks.problems
    precision = _choose_precision(options, accelerator, old)
    previous = old.get("dataset") or (start.manifest.dataset if start else None)
    options.recall(earlier_runs(stage, options.output_dir, start))
    dataset = _check_data(options, previous, console, checks)
    identity: dict[str, Any] = {}
    if training:
        digest = start.manifest.digest if start else None
        code = checks.attempt(
            "the code", lambda: identify(stage, training, dataset, digest, script)
        )
        # Effective sizes, whether an option sets them or not.
        identity = (code or {}) | {"precision": precision} | sizes.by_option
    if accelerator is None or checks.problems:
        raise UserError(checks.problems)
    places = options.places()
    checked = Checked(
        *(training, directory, start, accelerator, precision, layout, dataset, places, identity)
    )
    if training and not training.fresh:
        newest = directory.newest_of(stage.name, identity)
        if problems := other_run(checked) or changed_code(checked, newest):
            raise UserError(problems)
    return checked


def _check_directory(
    directory: RunDirectory, options: CommonOptions, checks: _Checks
) -> dict[str, Any]:
    """Checks that the run can be written; returns the identity of the run in the directory."""
    unwritable = checks.attempt(
        "--output-dir",
        lambda: check_writable(options.output_dir) or check_writable(directory.path),
    )
    checks.problems += unwritable or []
    is_fresh = isinstance(options, TrainingOptions) and options.fresh
    if unwritable != [] or is_fresh:
        return {}
    return checks.attempt(f"{directory.path}", directory.identity) or {}


def _check_device(
    options: CommonOptions, layout: Layout, cluster: Cluster, checks: _Checks
) -> Accelerator | None:
    checks.attempt("the loopback interface", ensure_loopback)
    accelerator = checks.attempt(
        f"--accelerator {options.accelerator}",
        lambda: find_accelerator(options.accelerator, options.precision),
    )
    if accelerator is not None:
        checks.problems += too_few_gpus(layout, accelerator, cluster)
    return accelerator


def _choose_precision(
    options: CommonOptions, accelerator: Accelerator | None, old: dict[str, Any]
) -> str:
    """Returns the precision; `auto` continues a run in its precision, also on another CPU."""
    if options.precision != "auto":
        return options.precision
    if old.get("precision") in ("bf16-mixed", "32"):
        return str(old["precision"])
    is_emulated = accelerator and accelerator.name == "cpu" and not has_fast_bfloat16()
    return "32" if is_emulated else "bf16-mixed"


def _check_data(options: CommonOptions, previous: Any, console: Console, checks: _Checks) -> Any:
    """Finds the dataset; a command that is refused anyway downloads and reports nothing."""
    is_refused = bool(checks.problems)
    say = (lambda line: None) if is_refused else console.say
    return checks.attempt(
        "the data", lambda: options.resolve_dataset(previous, say, not is_refused)
    )


def _check_start(
    stage: Stage, options: CommonOptions, console: Console, checks: _Checks
) -> tuple[StartCheckpoint | None, Sizes]:
    """Finds the checkpoint to start from, and the sizes of the stage's model."""
    start = checks.attempt(
        "the checkpoint to start from",
        lambda: find_start(stage, options.named_checkpoint, options.output_dir, console.say),
    )
    if checks.problems:
        return None, stated_sizes(stage)
    path = start.path if start else None
    sizes = checks.attempt("the model's sizes", lambda: check_sizes(stage, options, path))
    return start, sizes or stated_sizes(stage)


def other_run(checked: Checked) -> list[str]:
    """Returns why the run in the directory is not the requested run; no message if it is."""
    return differences(checked.directory, checked.identity, checked.start_path, checked.training)


def changed_code(checked: Checked, newest: Manifest | None) -> list[str]:
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


def failed_check(what: str, error: Exception) -> str:
    """Returns the message for a check that raised an unexpected error."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}."
    reason = reason_of(error).rstrip(".")
    return f"{what}: the check failed ({reason}). --verbose shows where."
