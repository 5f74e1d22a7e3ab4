"""The tutorial at its defaults on the bundled digits, run once for all tests."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from tests.once import once
from tests.scripts import Result, run_script


@dataclass(frozen=True)
class Chain:
    """What `./run tutorial` left behind and said; it is to be read, not to be changed."""

    runs: Path
    result: Result


def trained_chain(factory: pytest.TempPathFactory) -> Chain:
    """Runs the tutorial, unless another process of the tests has run it."""

    def make(folder: Path) -> None:
        options = ("--data-dir", folder / "no-data", "--output-dir", folder / "runs")
        result = run_script("mnist/tutorial.py", "--dataset", "digits", *options)
        assert result.status == 0, result.err
        (folder / "result.json").write_text(json.dumps(asdict(result)))

    folder = once(factory, "chain", make)
    result = Result(**json.loads((folder / "result.json").read_text()))
    return Chain(folder / "runs", result)
