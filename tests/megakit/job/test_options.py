"""Options: defaults, the command line, help from docstrings, and what single options refuse."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import pytest

from megakit.job.help import format_help
from megakit.job.options import CommonOptions, TrainingOptions, parse_options
from megakit.job.ranges import Range, flag


@dataclass(kw_only=True)
class WarpOptions(TrainingOptions):
    """Train a warp drive."""

    warp_factor: float = 9.5
    """How fast it flies."""

    paint: str = "grey"
    """What it looks like."""

    checkpoint: str | None = None
    """Where it starts. What it starts from is compared itself."""

    harmless: ClassVar[tuple[str, ...]] = ("paint",)


def refused(argv, capsys, options_class=TrainingOptions):
    """What the user reads on a command line that cannot be understood."""
    with pytest.raises(SystemExit) as stopped:
        parse_options(options_class, argv)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return " ".join(err.replace("│", " ").split())


def test_no_options_give_the_defaults():
    assert parse_options(TrainingOptions, []) == TrainingOptions()


def test_defaults_as_documented():
    options = TrainingOptions()
    assert (options.output_dir, options.precision) == (Path("runs"), "auto")
    assert (options.accelerator, options.devices, options.num_nodes) == ("auto", None, None)
    assert (options.tensor_parallel, options.pipeline_parallel) == (1, 1)
    assert (options.num_workers, options.verbose, options.timeout) == (0, False, 600)
    assert (options.max_steps, options.global_batch_size, options.lr) == (1000, 256, 1e-3)
    assert (options.val_interval, options.save_interval) == (250, 250)
    assert (options.seed, options.fresh, options.limit_val_batches) == (42, False, None)
    assert options.problems() == []


def test_values_from_the_command_line():
    options = parse_options(
        TrainingOptions,
        [
            *("--output-dir", "elsewhere", "--precision", "32", "--accelerator", "cpu"),
            *("--devices", "4", "--tensor-parallel", "2", "--lr", "3e-2", "--verbose", "--fresh"),
        ],
    )
    assert options == TrainingOptions(
        output_dir=Path("elsewhere"),
        precision="32",
        accelerator="cpu",
        devices=4,
        tensor_parallel=2,
        lr=0.03,
        verbose=True,
        fresh=True,
    )


def test_a_script_adds_options_of_its_own():
    options = parse_options(WarpOptions, ["--warp-factor", "2"])
    assert (options.warp_factor, options.max_steps) == (2.0, TrainingOptions().max_steps)
    assert options.identity() == TrainingOptions().identity() | {"warp_factor": 2.0}


def test_help_comes_from_the_docstrings(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/far/away/model_warp.py"])  # the path is of no interest
    with pytest.raises(SystemExit) as stopped:
        parse_options(WarpOptions, ["--help"])
    assert stopped.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: model_warp.py ")
    text = " ".join(out.replace("│", " ").split())
    for expected in ("Train a warp drive.", "--warp-factor", "How fast it flies.", "9.5"):
        assert expected in text
    for option in fields(WarpOptions):
        assert flag(option.name) in text


def test_help_without_a_docstring_is_of_the_options_alone(capsys):
    """Not what `dataclass` writes in its place: a line of 2,000 characters."""

    @dataclass(kw_only=True)
    class Undocumented(TrainingOptions):
        depth: int = 1

    with pytest.raises(SystemExit):
        parse_options(Undocumented, ["--help"])
    text = capsys.readouterr().out
    assert "--depth" in text
    assert "Undocumented" not in text


HELP_OF_WARP = """\
usage: model_warp.py [options]

Train a warp drive.

Options of this script:
  --warp-factor FLOAT   How fast it flies. (default: 9.5)
  --paint STR           What it looks like. (default: grey)
  --checkpoint STR      Where it starts. What it starts from is compared itself.

Length, learning rate, validation and checkpoints of a training run:
  --max-steps INT       Optimizer steps to train for. (default: 1000)
"""


def test_help_is_wrapped_and_in_words():
    """Metavars without None, defaults in words, and paragraphs in place of the source's lines."""
    text = format_help(WarpOptions, "model_warp.py")
    assert text.startswith(HELP_OF_WARP)
    assert "None" not in text
    assert "False" not in text
    assert max(map(len, text.splitlines())) <= 80
    devices = text.index("  --devices INT")
    assert "1 unless torchrun or" in text[devices : devices + 100]
    assert "{auto,bf16-mixed,32}\n" in text


def test_help_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    lines = format_help(WarpOptions, "model_warp.py").splitlines()
    assert 40 < max(len(line) for line in lines if "{" not in line) <= 50


def test_help_of_a_redefined_option_keeps_its_text_and_place():
    @dataclass(kw_only=True)
    class Redefined(TrainingOptions):
        max_steps: int = 7

    text = format_help(Redefined, "x.py")
    assert "Optimizer steps to train for. (default: 7)" in text
    assert "Options of this script" not in text


@pytest.mark.parametrize(
    ("meant", "written"),
    [
        ("--max-steps", "--max-step"),
        ("--micro-batch-size", "--microbatch-size"),
        ("--tensor-parallel", "--tensor_parallell"),
    ],
)
def test_misspelt(meant, written, capsys):
    assert f"Is it {meant}?" in refused([written, "2"], capsys)


def test_a_switch_has_no_opposite(capsys):
    assert "--no-verbose" in refused(["--no-verbose"], capsys)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--warp", "9"], ["--warp"]),
        (["engage"], ["engage"]),
        (["--precision", "16"], ["--precision", "16", "auto", "bf16-mixed", "32"]),
        (["--accelerator", "tpu"], ["--accelerator", "tpu", "auto", "cpu", "gpu"]),
        (["--max-steps", "many"], ["--max-steps", "many"]),
        (["--devices", "1.5"], ["--devices", "1.5"]),
        (["--lr"], ["--lr"]),
        (["--output-dir", "a", "b"], ["--output-dir a b", "one path"]),
        (["--verbose", "yes"], ["--verbose yes", "without a value"]),
        (["--max_steps", "many"], ["--max_steps many", "a whole number"]),
        (["--best-by"], ["--best-by", "one value"]),
    ],
)
def test_a_command_line_that_cannot_be_understood(argv, named, capsys):
    message = refused(argv, capsys)
    for part in named:
        assert part in message
    assert "<class" not in message


def test_all_misunderstood_values_are_named(capsys):
    message = refused(["--precision", "16", "--accelerator", "tpu"], capsys)
    assert "16" in message
    assert "tpu" in message


BOUNDS = {
    **dict.fromkeys(("max_steps", "val_interval", "save_interval"), (1, 2**31 - 1)),
    **dict.fromkeys(("limit_val_batches", "stop_after"), (1, 2**31 - 1)),
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel"), (1, 2**24)),
    **dict.fromkeys(("micro_batch_size", "global_batch_size"), (1, 2**24)),
    **{"devices": (1, 1024), "num_nodes": (1, 100_000), "num_workers": (0, 256)},
    **{"seed": (0, 2**31 - 1), "timeout": (1, 7 * 24 * 3600)},
}


def test_every_whole_number_has_bounds():
    hints = get_type_hints(TrainingOptions)
    numbers = {name for name, hint in hints.items() if hint in (int, int | None)}
    assert numbers == BOUNDS.keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_whole_numbers(name):
    """10**30 is what frameworks would fail of, in the middle of the work."""

    def problems(value):
        given: Any = {name: value}
        return TrainingOptions(**given).problems()

    least, most = BOUNDS[name]
    assert problems(least) == problems(most) == []
    for value, rule in (
        *((least - 1, f"least {least}"), (-7, f"least {least}")),
        *((most + 1, f"most {most:,}"), (10**30, f"most {most:,}")),
    ):
        assert problems(value) == [f"{flag(name)} {value}: has to be at {rule}."]


@pytest.mark.parametrize(
    ("lr", "rule"),
    [
        *((lr, "a positive number") for lr in (0.0, -0.1)),
        *((lr, "at most 100") for lr in (1e30, 101)),
    ],
)
def test_learning_rates(lr, rule):
    assert TrainingOptions(lr=lr).problems() == [f"--lr {lr}: has to be {rule}."]


@dataclass(kw_only=True)
class BentOptions(WarpOptions):
    """Options of a script that gives some of them other defaults."""

    timeout: int = 60
    bend: Annotated[float, Range(least=-1, below=1)] = 0.0
    course: Path | None = None
    crew: str | None = None
    orbits: int = 3
    height: Annotated[int, Range(least=2)] | None = None


def test_a_range_inside_an_optional_type_counts():
    (problem,) = BentOptions(height=1).problems()
    assert problem == "--height 1: has to be at least 2."


def test_a_range_outlives_another_default():
    (problem,) = BentOptions(timeout=10**15).problems()
    assert problem == f"--timeout {10**15}: has to be at most 604,800."


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["warp_factor", "bend", "lr"])
def test_every_decimal_number_is_a_number(name, value):
    given: Any = {name: value}
    (problem,) = BentOptions(**given).problems()
    assert problem == f"{flag(name)} {value}: has to be a finite number."


def test_ranges():
    assert [BentOptions(bend=bend).problems() for bend in (-1.0, 0.5)] == [[], []]
    assert BentOptions(bend=1.0).problems() == ["--bend 1.0: has to be below 1."]
    assert BentOptions(bend=-1.5).problems() == ["--bend -1.5: has to be at least -1."]


def test_any_whole_number_fits_into_32_bits():
    assert BentOptions(orbits=-(2**31 - 1)).problems() == []
    for value, rule in ((2**31, "at most 2,147,483,647"), (-(2**31), "at least -2,147,483,647")):
        assert BentOptions(orbits=value).problems() == [f"--orbits {value}: has to be {rule}."]


@pytest.mark.parametrize(
    ("value", "shown", "rule"),
    [
        ("a\nb", "a\\nb", "contains a control character"),
        ("a\0b", "a\\x00b", "contains a control character"),
        ("a\u2028b", "a\\u2028b", "contains a control character"),
        ("a\u2029b", "a\\u2029b", "contains a control character"),
        ("a\udcffb", "a\\udcffb", "is not valid UTF-8"),
        ("x" * 300, "x" * 100 + "..." + "x" * 60, "one part of it is longer than 255 bytes"),
        ("\u00e9" * 128, "\u00e9" * 128, "one part of it is longer than 255 bytes"),
    ],
)
@pytest.mark.parametrize("name", ["output_dir", "course", "crew"])
def test_names_that_no_file_can_have(name, value, shown, rule):
    given: Any = {name: value if name == "crew" else Path(value)}
    (problem,) = BentOptions(**given).problems()
    assert problem.startswith(f"{flag(name)} {shown}: {rule}")
    assert len(problem.splitlines()) == 1


def test_a_path_longer_than_the_system_allows():
    (problem,) = BentOptions(course=Path(*["x" * 200] * 20)).problems()
    assert "the absolute path is longer than 3696 bytes" in problem


def test_usual_names_are_usable():
    names = ["runs", "a b", "r\u00e9sum\u00e9", "/", "..", "\u6f22\u5b57", "a\u00a0b"]
    assert [BentOptions(course=Path(name), crew=name).problems() for name in names] == [[]] * 7


@pytest.mark.parametrize("argv", [["--course", ""], ["--course="], ["--crew", ""], ["--crew="]])
def test_an_empty_value_is_refused(argv, capsys):
    """As a path it would be the current folder."""
    message = refused([*argv, "--warp-factor", "x", "--bent"], capsys, BentOptions)
    option = argv[0].rstrip("=")
    assert f"{option} '': the value is empty. Either a variable is not set, or a" in message
    assert "command in $(...) failed" in message
    assert message.count(option) == 1
    assert "--warp-factor x: has to be a number" in message
    assert "--bent: there is no such option" in message
    assert "is empty" in refused(argv, capsys, BentOptions)


def test_all_problems_are_found_at_once():
    options = TrainingOptions(devices=0, timeout=0, num_workers=-1, max_steps=0, seed=-1, lr=0)
    named = [problem.split()[0] for problem in options.problems()]
    wanted = ["--devices", "--lr", "--max-steps", "--num-workers", "--seed", "--timeout"]
    assert sorted(named) == wanted


def test_all_options_identify_a_run_but_those_that_are_listed():
    decide = {
        *("seed", "precision", "global_batch_size", "lr", "max_steps", "limit_val_batches"),
        *("best_by", "stop_after"),
    }
    may_change = {
        *("devices", "num_nodes", "tensor_parallel", "pipeline_parallel", "micro_batch_size"),
        *("num_workers", "val_interval", "save_interval", "accelerator", "verbose", "timeout"),
        *("output_dir", "fresh", "keep_changes"),
    }
    assert decide | may_change == {option.name for option in fields(TrainingOptions)}
    assert TrainingOptions().identity().keys() == decide


def test_the_interval_identifies_a_run_that_may_stop_early():
    added = TrainingOptions(stop_after=3).identity().items() - TrainingOptions().identity().items()
    assert dict(added) == {"stop_after": 3, "val_interval": 250}


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"best_by": "accuracy"}, ["--best-by accuracy", "val_loss", "last"]),
        ({"best_by": "train_loss"}, ["--best-by train_loss", "begins with val_"]),
        ({"stop_after": 3, "best_by": "last"}, ["--stop-after 3", "uses its last checkpoint"]),
        ({"best_by": "val_x", "always_last": True}, ["--best-by val_x", "has no effect"]),
        (
            {"stop_after": 3, "val_interval": 100, "max_steps": 100},
            ["--stop-after 3", "--val-interval 100", "only after its last step, 100"],
        ),
    ],
)
def test_what_cannot_be_chosen_by_or_waited_for(given, parts):
    class LastOptions(TrainingOptions):
        def choice(self):
            return "last"

    given = dict(given)
    kind = LastOptions if given.pop("always_last", False) else TrainingOptions
    (problem,) = kind(**given).problems()
    for part in parts:
        assert part in problem
    assert kind().problems() == []


@pytest.mark.parametrize("given", [{"best_by": "last"}, {"best_by": "val_x", "stop_after": 1}])
def test_what_can_be_chosen_by(given):
    assert TrainingOptions(**given).problems() == []


def test_a_script_says_where_its_data_is():
    with pytest.raises(NotImplementedError, match=r"CommonOptions\.resolve_dataset"):
        CommonOptions().resolve_dataset(None, print)


def test_bases_in_an_order_that_would_leave_out_the_data():
    class Data:
        def resolve_dataset(self, previous, report, may_download=True):
            return "plums"

    class Right(Data, TrainingOptions):
        pass

    assert Right().resolve_dataset(None, print) == "plums"
    with pytest.raises(TypeError, match="class Wrong: Data has to be its first base"):

        class Wrong(TrainingOptions, Data):
            pass
