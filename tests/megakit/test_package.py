"""What `import megakit` gives at once, what its subpackages give, and the wheel it is packed in."""

import importlib
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

import megakit
from tests.scripts import REPOSITORY, output_of, run


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import sys, megakit; print({'torch', 'numpy', 'nemo'} & sys.modules.keys())"
    assert output_of(code) == "set()\n"


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MEGAKIT_CACHE_DIR", raising=False)
    assert tmp_path / ".cache" / "megakit" == megakit.CACHE_DIR
    monkeypatch.setenv("MEGAKIT_CACHE_DIR", str(tmp_path / "mine"))
    assert tmp_path / "mine" == megakit.CACHE_DIR


PACKAGES = sorted(path.parent.name for path in (REPOSITORY / "megakit").glob("*/__init__.pyi"))


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_there(name: str) -> None:
    package = importlib.import_module(f"megakit.{name}")
    assert package.__all__
    for public in package.__all__:
        assert getattr(package, public) is not None, public


@pytest.mark.long
def test_a_wheel_holds_the_library_and_works_alone(tmp_path: Path) -> None:
    """Built as others do, of a copy: setuptools leaves a folder `build` behind."""
    source, alone = tmp_path / "source", tmp_path / "alone"
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(REPOSITORY / "megakit", source / "megakit", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir")
    run(sys.executable, "-m", "pip", "wheel", *options, tmp_path, source).output()
    wheel = tmp_path / f"megakit-{megakit.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(alone)
    packed, files = (
        {path.relative_to(folder) for path in folder.glob("megakit/**/*") if path.is_file()}
        for folder in (alone, source)
    )
    assert packed == files
    assert Path("megakit/py.typed") in packed
    assert {path.suffix for path in alone.iterdir()} == {"", ".dist-info"}
    code = (
        "import sys, importlib.metadata, megakit, megakit.models, megakit.job.options\n"
        "assert megakit.__version__ == importlib.metadata.version('megakit')\n"
        "assert 'torch' not in sys.modules\n"
        "print(megakit.__file__, *megakit.models.__all__)"
    )
    told = output_of(code, cwd=alone, PYTHONPATH=str(alone))
    assert told.startswith(f"{alone}/megakit/__init__.py ")
    assert "load_for_inference" in told
