"""How a command line becomes options; tests/test_refusals.py has what is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from megakit.job import Range, TrainingOptions
from megakit.job.command_line import parse_options


@dataclass(kw_only=True)
class Options(TrainingOptions):
    """Bake a cake, with 100% butter."""

    max_steps: int = 7
    share: Annotated[float | None, Range(least=0)] = None
    """Share of the butter: 50% at least."""

    kind: Literal["plum", "pear"] = "plum"
    folder: Path = Path("kitchen")


def test_values_of_every_type() -> None:
    given = ["--max_steps", "9", "--share=-1e-3", "--kind", "pear", "--folder", "a b", "--fresh"]
    options = parse_options(Options, given)
    assert (options.max_steps, options.share, options.kind) == (9, -0.001, "pear")
    assert (options.folder, options.fresh, options.verbose) == (Path("a b"), True, False)
    assert options.problems() == ["--share -0.001: has to be at least 0."]
    assert parse_options(Options, []) == Options()


@pytest.mark.parametrize("given", [["cake"], ["--fresh", "yes"], ["--lr", "1", "2"], ["--lr=x"]])
def test_what_is_no_value(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_options(Options, given)
    assert " ".join(given).replace("=", " ") in capsys.readouterr().err


def test_problems_of_every_kind_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 tells them; a class attribute is no option."""
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            parse_options(Options, ["--seed", "x", "--max-steps", "-1", "--earlier", "x"])
        err = capsys.readouterr().err
        assert err.count("\n") == (3 if rank == "0" else 0)
    assert "--max-steps -1: has to be at least 1." in err
    assert "--earlier x: there is no such option." in err


def test_help_tells_the_defaults_and_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_options(Options, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Bake a cake, with 100% butter. Options of this script: " in text
    assert "--share FLOAT Share of the butter: 50% at least. --kind {plum,pear}" in text
    assert "--max-steps INT Optimizer steps to train for. (default: 7)" in text  # text of the base
    assert "--fresh Start over; the old run is kept under another name. " in text
