"""What `import megakit` gives at once."""

import subprocess
import sys
from pathlib import Path

import pytest

import megakit
from tests.scripts import REPOSITORY, environment


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, megakit; print({'torch', 'numpy', 'nemo'} & sys.modules.keys())"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "set()"


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MEGAKIT_CACHE_DIR", raising=False)
    assert tmp_path / ".cache" / "megakit" == megakit.CACHE_DIR
    monkeypatch.setenv("MEGAKIT_CACHE_DIR", str(tmp_path / "mine"))
    assert tmp_path / "mine" == megakit.CACHE_DIR
    assert list(tmp_path.iterdir()) == []


def test_other_names_are_missing() -> None:
    with pytest.raises(AttributeError, match="no attribute 'CACHE'"):
        megakit.CACHE  # noqa: B018
