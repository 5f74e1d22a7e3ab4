"""Warnings about the project's own code, on the console."""

import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megakit.job.console import Console

pytestmark = pytest.mark.usefixtures("megatron")


def test_warnings_about_the_project_reach_the_console_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other warnings are in the log only, which is the console if it is not diverted."""
    from megakit.training.first_look import show_warnings

    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "scripts" / "model_predict.py")])
    own = tmp_path / "models" / "mine.py"
    places = [
        (UserWarning, own),
        (DeprecationWarning, own),
        (UserWarning, tmp_path / ".venv" / "lib" / "site-packages" / "torch" / "nn.py"),
        (UserWarning, tmp_path / "megakit" / "strategy.py"),
        (UserWarning, tmp_path.parent / "elsewhere.py"),
        (UserWarning, torch.__file__),
        (UserWarning, "<frozen importlib._bootstrap>"),
    ]

    for is_diverted in (True, False):
        console = Console()
        console.is_diverted = is_diverted
        with warnings.catch_warnings(record=True) as log:
            warnings.simplefilter("always")
            show_warnings(console)
            for number, (category, path) in enumerate(places):
                warnings.warn_explicit(f"note {number}\033", category, str(path), 7)
        shown = "Warning: mine.py, line 7: note 0\\x1b\n" if is_diverted else ""
        assert capfd.readouterr().err == shown
        assert len(log) == len(places)


@pytest.mark.parametrize(
    ("draw", "workers", "names"),
    [
        (torch.rand, 0, ["torch"]),
        (lambda n: np.random.rand(n) + random.random(), 0, ["numpy", "random"]),
        (np.random.rand, 1, []),  # a file that is opened here must not be the workers', too
        (np.random.default_rng(1).random, 0, []),
        (lambda n: {"note": None}, 0, []),  # which only the data module's own collation takes
    ],
)
def test_samples_that_draw_from_a_global_generator_are_noticed(
    draw: Any, workers: int, names: list[str]
) -> None:
    from megakit.training.first_look import generators_changed_by

    class Noise:
        def __getitem__(self, index: int) -> Any:
            return draw(3)

    data = SimpleNamespace(train_set=Noise(), num_workers=workers)
    assert generators_changed_by(data) == names
    assert generators_changed_by(SimpleNamespace()) == []  # of a data module of another kind
