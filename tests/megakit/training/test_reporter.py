"""Warnings about the project's own code, on the console."""

import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megakit.job.console import Console

pytestmark = pytest.mark.usefixtures("megatron")


def test_warnings_about_the_project_reach_the_console_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Other warnings are in the log only, which is the console if it is not diverted."""
    from megakit.training.reporter import show_warnings

    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "scripts" / "model_predict.py")])
    own = tmp_path / "models" / "mine.py"
    places = [
        (UserWarning, own),
        (RuntimeWarning, own),
        (DeprecationWarning, own),
        (UserWarning, tmp_path / ".venv" / "lib" / "site-packages" / "torch" / "nn.py"),
        (UserWarning, tmp_path / "megakit" / "strategy.py"),
        (UserWarning, tmp_path.parent / "elsewhere.py"),
        (UserWarning, torch.__file__),
        (UserWarning, "<frozen importlib._bootstrap>"),
    ]

    def warn(text: object) -> None:
        warnings.warn_explicit(str(text), UserWarning, str(own), 9)

    for is_diverted in (True, False):
        console = Console()
        console.is_diverted = is_diverted
        with warnings.catch_warnings(record=True) as log:
            warnings.simplefilter("always")
            show_warnings(console)
            samples: Any = ["from a loader's worker"]
            loader: Any = DataLoader(samples, num_workers=1, collate_fn=warn)
            assert len([*loader]) == 1
            # `./run tutorial` forks its scripts.
            fork = multiprocessing.get_context("fork").Process(target=warn, args=["a fork"])
            fork.start()
            fork.join()
            for number, (category, path) in enumerate(places):
                warnings.warn_explicit(f"note {number}\033", category, str(path), 7)
        fork_shown = "Warning: mine.py, line 9: a fork\n"
        shown = f"{fork_shown}Warning: mine.py, line 7: note 0\\x1b\n" if is_diverted else ""
        assert capfd.readouterr().err == shown
        # Python 3.12 also warns about the fork.
        assert len([one for one in log if "note" in str(one.message)]) == len(places)
