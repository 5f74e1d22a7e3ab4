"""Options: defaults, the command line, help from docstrings, and what single options refuse."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megakit.training.options import CommonOptions, TrainingOptions, flag, parse_options


@dataclass(kw_only=True)
class WarpOptions(TrainingOptions):
    """Train a warp drive."""

    warp_factor: float = 9.5
    """How fast it flies."""

    identity: ClassVar[tuple[str, ...]] = (*TrainingOptions.identity, "warp_factor")


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
    assert (options.output_dir, options.precision) == (Path("runs"), "bf16-mixed")
    assert (options.accelerator, options.devices, options.num_nodes) == ("auto", None, None)
    assert (options.tensor_parallel, options.pipeline_parallel) == (1, 1)
    assert (options.num_workers, options.verbose, options.timeout) == (0, False, 600)
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
    assert options.identity == (*TrainingOptions.identity, "warp_factor")


def test_help_comes_from_the_docstrings(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_options(WarpOptions, ["--help"])
    assert stopped.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    text = " ".join(out.replace("│", " ").split())
    for expected in ("Train a warp drive.", "--warp-factor", "How fast it flies.", "9.5"):
        assert expected in text
    for option in fields(WarpOptions):
        assert flag(option.name) in text


def test_a_switch_has_no_opposite(capsys):
    assert "--no-verbose" in refused(["--no-verbose"], capsys)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--warp", "9"], ["--warp"]),
        (["engage"], ["engage"]),
        (["--precision", "16"], ["--precision", "16", "bf16-mixed", "32"]),
        (["--accelerator", "tpu"], ["--accelerator", "tpu", "auto", "cpu", "gpu"]),
        (["--max-steps", "many"], ["--max-steps", "many"]),
        (["--devices", "1.5"], ["--devices", "1.5"]),
        (["--lr"], ["--lr"]),
    ],
)
def test_a_command_line_that_cannot_be_understood(argv, named, capsys):
    message = refused(argv, capsys)
    for part in named:
        assert part in message


def test_all_misunderstood_values_are_named(capsys):
    message = refused(["--precision", "16", "--accelerator", "tpu"], capsys)
    assert "16" in message
    assert "tpu" in message


LEAST = {
    **dict.fromkeys(("num_workers", "seed"), 0),
    **dict.fromkeys(("devices", "num_nodes", "tensor_parallel", "pipeline_parallel"), 1),
    **dict.fromkeys(("micro_batch_size", "timeout", "max_steps", "global_batch_size"), 1),
    **dict.fromkeys(("val_interval", "save_interval", "limit_val_batches"), 1),
}


def test_every_whole_number_has_a_least_value():
    numbers = {field.name for field in fields(TrainingOptions) if field.type in (int, int | None)}
    assert numbers == LEAST.keys()


@pytest.mark.parametrize(("name", "least"), LEAST.items())
def test_whole_numbers(name, least):
    def problems(value):
        given: Any = {name: value}
        return TrainingOptions(**given).problems()

    assert problems(least) == []
    for value in (least - 1, -7):
        (problem,) = problems(value)
        assert problem == f"{flag(name)} {value}: has to be at least {least}."


@pytest.mark.parametrize("lr", [0.0, -0.1, float("inf"), float("-inf"), float("nan")])
def test_learning_rates_that_are_none(lr):
    (problem,) = TrainingOptions(lr=lr).problems()
    assert problem.startswith(f"--lr {lr}: ")


def test_all_problems_are_found_at_once():
    options = TrainingOptions(devices=0, timeout=0, num_workers=-1, max_steps=0, seed=-1, lr=0)
    named = [problem.split()[0] for problem in options.problems()]
    wanted = ["--devices", "--lr", "--max-steps", "--num-workers", "--seed", "--timeout"]
    assert sorted(named) == wanted


def test_what_identifies_a_run_are_options_of_it():
    assert set(TrainingOptions.identity) <= {option.name for option in fields(TrainingOptions)}
    may_change = {
        *("devices", "num_nodes", "tensor_parallel", "pipeline_parallel", "micro_batch_size"),
        *("num_workers", "val_interval", "save_interval", "accelerator", "verbose", "timeout"),
        *("output_dir", "fresh"),
    }
    assert may_change.isdisjoint(TrainingOptions.identity)
    assert may_change | set(TrainingOptions.identity) == {
        option.name for option in fields(TrainingOptions)
    }


def test_a_script_says_where_its_data_is():
    with pytest.raises(NotImplementedError, match=r"CommonOptions\.resolve_dataset"):
        CommonOptions().resolve_dataset(None, print)


def test_flag():
    assert flag("tensor_parallel") == "--tensor-parallel"


def test_nothing_of_a_dataset_in_the_library():
    assert not {"data_dir", "dataset"} & {option.name for option in fields(TrainingOptions)}
