"""Options of all scripts and of training scripts, without torch, so that a start is quick."""

import difflib
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

from megakit.job.help import format_help
from megakit.job.ranges import INT32_MAX, Range, find_problems, flag
from megakit.job.stage import Stage
from megakit.runtime.foreign_files import brief

OptionsT = TypeVar("OptionsT", bound="CommonOptions")

Count = Annotated[int, Range(least=1, most=INT32_MAX)]
#: The bound keeps the product of batch size and number of steps within 64 bits.
BatchSize = Annotated[int, Range(least=1, most=2**24)]
MOST_SECONDS = 7 * 24 * 3600
Seed = Annotated[int, Range(least=0, most=INT32_MAX)]
LearningRate = Annotated[float, Range(above=0, most=100)]


@dataclass(kw_only=True)
class CommonOptions:
    """Where and how a script runs."""

    output_dir: Path = Path("runs")
    """Folder that contains the runs."""

    precision: Literal["auto", "bf16-mixed", "32"] = "auto"
    """bf16-mixed computes in bfloat16 and keeps float32 weights; 32 uses only float32. auto uses
    the precision of the resumed run, else bf16-mixed, or 32 on a CPU that emulates bfloat16."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """Device to run on; auto uses a GPU if it works."""

    devices: Annotated[int | None, Range(least=1, most=1024)] = None
    """Processes per machine, one per GPU; 1 unless torchrun or srun sets the number."""

    num_nodes: Annotated[int | None, Range(least=1, most=100_000)] = None
    """Number of machines; 1 unless torchrun or srun sets the number."""

    tensor_parallel: Annotated[int, Range(least=1, most=2**24)] = 1
    """Ranks that split each layer."""

    pipeline_parallel: Annotated[int, Range(least=1, most=2**24)] = 1
    """Pipeline stages that split the layers; the remaining ranks are data parallel."""

    micro_batch_size: Annotated[int | None, Range(least=1, most=2**24)] = None
    """Samples per rank and forward pass; by default as many as were fastest in measurements."""

    num_workers: Annotated[int, Range(least=0, most=256)] = 0
    """Data loader workers per rank; they prefetch batches."""

    timeout: Annotated[int, Range(least=1, most=MOST_SECONDS)] = 600
    """Seconds a rank may wait for another rank before the job fails."""

    verbose: bool = False
    """Show the frameworks' log on the terminal instead of writing it to log.txt."""

    #: Options that do not change the result. A class lists only its own options; `identity` adds
    #: the options that its base classes list.
    harmless: ClassVar[tuple[str, ...]] = (
        *("output_dir", "accelerator", "devices", "num_nodes", "tensor_parallel"),
        *("pipeline_parallel", "micro_batch_size", "num_workers", "timeout", "verbose"),
    )
    largest_micro_batch: ClassVar[int] = 1024
    #: Options that set a field of the model's config if no checkpoint sets it; see `size`.
    model_sizes: ClassVar[tuple[str, ...]] = ()

    def size(self, name: str) -> Any:
        """Returns the value of a new model's config field, or None if no option sets it."""
        return getattr(self, name, None)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses bases in an order in which the data's `resolve_dataset` is never called."""
        super().__init_subclass__(**kwargs)
        owners = [base for base in cls.__mro__ if "resolve_dataset" in vars(base)]
        if owners[0] is CommonOptions and len(owners) > 1:
            data = owners[1].__name__
            raise TypeError(
                f"class {cls.__name__}: {data} has to be its first base, else "
                f"{data}.resolve_dataset is never called. Write class {cls.__name__}({data}, ...)."
            )

    @property
    def named_checkpoint(self) -> str | None:
        """The user's `--checkpoint`, in a script that has this option."""
        return getattr(self, "checkpoint", None)

    def resolve_dataset(
        self, previous: Any, report: Callable[[str], None], may_download: bool = True
    ) -> Any:
        """Checks that the dataset is usable and returns its name; for a script to override.

        Args:
            previous: Dataset of the run or checkpoint that this run continues from, if any.
            report: Prints one line for the user.
            may_download: Whether to download missing data. False if the command is refused for
                another reason; `report` then prints nothing.

        Raises:
            UserError: The data is missing or damaged.
        """
        raise NotImplementedError(f"{type(self).__name__}.resolve_dataset")

    def recall(self, earlier: Sequence[Any]) -> None:
        """Receives what earlier runs used, before `resolve_dataset`; for a script to override.

        Args:
            earlier: A sequence of `megakit.job.remembered.EarlierRun`, the first choice first.
        """

    def places(self) -> dict[str, str]:
        """Returns the paths that a run remembers for later commands; for a script to override.

        Returns:
            Absolute paths by name of the option. Later commands get them by `recall`.
        """
        return {}

    def adopt(self, places: Mapping[str, str]) -> None:
        """Sets the options that the command leaves out to the paths of the job's plan."""
        for name, path in places.items():
            if getattr(self, name) is None:
                setattr(self, name, Path(path))

    def adapt(self, stage: Stage) -> Stage:
        """Returns the stage adapted to the options, e.g. renamed; for a script to override."""
        return stage

    def problems(self) -> list[str]:
        """Returns one message per option with an invalid value."""
        return find_problems(self)


@dataclass(kw_only=True)
class TrainingOptions(CommonOptions):
    """Length, learning rate, validation and checkpoints of a training run."""

    max_steps: Count = 1000
    """Optimizer steps to train for."""

    global_batch_size: BatchSize = 256
    """Samples per optimizer step over all ranks, the same for every layout."""

    lr: LearningRate = 1e-3
    """Peak learning rate, between a warm-up and a cosine decay to zero."""

    seed: Seed = 42
    """Seed of initial weights, the order of samples and random operations."""

    val_interval: Count = 250
    """Validate every N steps, and after the last step."""

    save_interval: Count = 250
    """Save a checkpoint every N steps, and after the last step."""

    limit_val_batches: Annotated[int | None, Range(least=1, most=INT32_MAX)] = None
    """Validate on the first N global batches; by default on all validation data."""

    best_by: str = "val_loss"
    """Column of metrics.csv that selects the best checkpoint, for example val_accuracy. last: use
    the last checkpoint."""

    stop_after: Annotated[int | None, Range(least=1, most=INT32_MAX)] = None
    """Stop after N validations in a row without a better value of --best-by; by default never.
    With N, each better value also saves a checkpoint."""

    fresh: bool = False
    """Start over; the old run is kept under another name."""

    keep_changes: bool = False
    """Resume a run although code that its result depends on was changed."""

    harmless: ClassVar[tuple[str, ...]] = (
        *("val_interval", "save_interval", "fresh", "keep_changes", "checkpoint"),
    )

    def identity(self) -> dict[str, Any]:
        """Returns the options that the result depends on: all except the harmless options."""
        harmless = {name for base in type(self).__mro__ for name in vars(base).get("harmless", ())}
        if self.stop_after is not None:  # the last step then depends on when the run validates
            harmless.discard("val_interval")
        return {
            option.name: getattr(self, option.name)
            for option in fields(self)
            if option.name not in harmless
        }

    def choice(self) -> str:
        """Returns the criterion for the best checkpoint; for a script to override."""
        return self.best_by

    def problems(self) -> list[str]:
        """Returns the problems of single options, and of `--best-by` with `--stop-after`."""
        problems = super().problems()
        if self.best_by != "last" and not self.best_by.startswith("val_"):
            problems.append(
                f"--best-by {brief(self.best_by)}: has to be last, or a column of metrics.csv that "
                "begins with val_, for example val_loss."
            )
        if self.choice() != self.best_by != "val_loss":
            problems.append(
                f"--best-by {brief(self.best_by)}: has no effect, since this run always uses its "
                f"{self.choice()} checkpoint. Leave the option out."
            )
        if self.stop_after is None:
            return problems
        if self.choice() == "last":
            problems.append(
                f"--stop-after {self.stop_after}: this run uses its last checkpoint, so no "
                "validation is better than another. Leave the option out, or choose the best "
                "checkpoint by a validated value."
            )
        elif self.val_interval >= self.max_steps:
            problems.append(
                f"--stop-after {self.stop_after}: with --val-interval {self.val_interval} the run "
                f"validates only after its last step, {self.max_steps}. Validate more often, or "
                "leave the option out."
            )
        return problems


def parse_options(options_class: type[OptionsT], argv: Sequence[str] | None = None) -> OptionsT:
    """Parses the command line; prints messages and exits with status 2 if it is invalid.

    Args:
        options_class: Its fields are the options; the fields' docstrings are the help texts.
        argv: Arguments without the program's name; by default the arguments of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = Path(sys.argv[0]).name
    if {"-h", "--help"} & {*arguments}:
        print(format_help(options_class, program))
        sys.exit(0)
    import tyro

    def parse(arguments: Sequence[str]) -> OptionsT:
        with redirect_stderr(io.StringIO()):
            return tyro.cli(
                options_class,
                prog=program,
                args=arguments,
                # --verbose has no --no-verbose
                config=(tyro.conf.FlagCreatePairsOff,),
            )

    groups = _group_by_option(arguments)
    try:
        options = parse(arguments)
        if not any(map(_is_empty, groups)):  # an empty Path would mean the current folder
            return options
    except SystemExit:
        pass  # the messages below name all problems
    for problem in _find_parse_errors(options_class, groups, parse):
        print(f"{program}: {problem}", file=sys.stderr)
    sys.exit(2)


def _find_parse_errors(
    options_class: type, groups: Sequence[list[str]], parse: Callable[[Sequence[str]], Any]
) -> list[str]:
    """Returns one message for each option that cannot be parsed.

    Each option is parsed separately: tyro stops at the first error and prints a long message.
    """
    types = {flag(name): kind for name, kind in get_type_hints(options_class).items()}
    problems = []
    for group in groups:
        name, given = group[0].partition("=")[0], brief(" ".join(group))
        known_name = name.replace("_", "-")
        if known_name not in types:
            close = difflib.get_close_matches(known_name, types, 1, cutoff=0.75)
            remedy = f"Is it {close[0]}? See --help." if close else "See --help."
            problems.append(f"{given}: there is no such option. {remedy}")
        elif _is_empty(group):
            problems.append(
                f"{name} '': the value is empty. Either a variable is not set, or a command in "
                "$(...) failed; its own message says why. Give a value, or leave the option out."
            )
        else:
            try:
                parse(group)
            except SystemExit:
                problems.append(f"{given}: has to be {_describe_type(types[known_name])}.")
    return problems


def _is_empty(group: Sequence[str]) -> bool:
    """Whether an option has an empty value, as from an unset shell variable."""
    return group[1:] == [""] or group[0].endswith("=")


def _group_by_option(arguments: Sequence[str]) -> list[list[str]]:
    """Splits the command line into groups that each begin with an option."""
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") or not groups:
            groups.append([argument])
        else:
            groups[-1].append(argument)
    return groups


def _describe_type(kind: Any) -> str:
    """Describes the values of a type in words."""
    kinds = [part for part in get_args(kind) or (kind,) if part is not type(None)]
    if all(isinstance(part, str) for part in kinds):
        return "one of " + ", ".join(kinds)
    words = {int: "a whole number", float: "a number", bool: "without a value", Path: "one path"}
    return words.get(kinds[0], "one value")
