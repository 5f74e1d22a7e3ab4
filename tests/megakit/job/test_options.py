"""Options: defaults, the command line, help from docstrings, and what single options refuse."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import pytest

from megakit.job.options import TrainingOptions, parse_options
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
    paths = ["--output-dir", "elsewhere", "--precision", "32"]
    options = parse_options(TrainingOptions, [*paths, "--devices", "4", "--lr", "3e-2", "--fresh"])
    expected: Any = {"output_dir": Path("elsewhere"), "precision": "32", "devices": 4}
    assert options == TrainingOptions(**expected, lr=0.03, fresh=True)


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


def test_misspelt(capsys):
    assert "Is it --tensor-parallel?" in refused(["--tensor_parallell", "2"], capsys)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["engage"], ["engage"]),
        (["--accelerator", "tpu"], ["--accelerator", "tpu", "auto", "cpu", "gpu"]),
        (["--max_steps", "many"], ["--max_steps many", "a whole number"]),
        (["--output-dir", "a", "b"], ["--output-dir a b", "one path"]),
        (["--verbose", "yes"], ["--verbose yes", "without a value"]),
        (["--best-by"], ["--best-by", "one value"]),
    ],
)
def test_a_command_line_that_cannot_be_understood(argv, named, capsys):
    message = refused(argv, capsys)
    for part in named:
        assert part in message
    assert "<class" not in message


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
    def problems(value):
        given: Any = {name: value}
        return TrainingOptions(**given).problems()

    least, most = BOUNDS[name]
    assert problems(least) == problems(most) == []
    for value, rule in ((least - 1, f"least {least}"), (most + 1, f"most {most:,}")):
        assert problems(value) == [f"{flag(name)} {value}: has to be at {rule}."]


@pytest.mark.parametrize(("lr", "rule"), [(0.0, "a positive number"), (101, "at most 100")])
def test_learning_rates(lr, rule):
    assert TrainingOptions(lr=lr).problems() == [f"--lr {lr}: has to be {rule}."]


@dataclass(kw_only=True)
class BentOptions(WarpOptions):
    """Options of a script that gives some of them other defaults."""

    timeout: int = 60
    bend: Annotated[float, Range(least=-1, below=1)] = 0.0
    course: Path | None = None
    crew: str | None = None


def test_a_range_outlives_another_default():
    (problem,) = BentOptions(timeout=10**15).problems()
    assert problem == f"--timeout {10**15}: has to be at most 604,800."


@pytest.mark.parametrize("name", ["bend", "lr"])
def test_every_decimal_number_is_a_number(name):
    given: Any = {name: float("nan")}
    (problem,) = BentOptions(**given).problems()
    assert problem == f"{flag(name)} nan: has to be a finite number."


def test_ranges():
    assert [BentOptions(bend=bend).problems() for bend in (-1.0, 0.5)] == [[], []]
    assert BentOptions(bend=1.0).problems() == ["--bend 1.0: has to be below 1."]
    assert BentOptions(bend=-1.5).problems() == ["--bend -1.5: has to be at least -1."]


@pytest.mark.parametrize("argv", [["--course", ""], ["--crew="]])
def test_an_empty_value_is_refused(argv, capsys):
    """As a path it would be the current folder."""
    message = refused([*argv, "--warp-factor", "x", "--bent"], capsys, BentOptions)
    option = argv[0].rstrip("=")
    assert f"{option} '': the value is empty. Either a variable is not set, or a" in message
    assert "command in $(...) failed" in message
    assert message.count(option) == 1
    assert "--warp-factor x: has to be a number" in message
    assert "--bent: there is no such option" in message


def test_all_problems_are_found_at_once():
    options = TrainingOptions(devices=0, timeout=0, num_workers=-1, max_steps=0, seed=-1, lr=0)
    named = [problem.split()[0] for problem in options.problems()]
    wanted = ["--devices", "--lr", "--max-steps", "--num-workers", "--seed", "--timeout"]
    assert sorted(named) == wanted


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
