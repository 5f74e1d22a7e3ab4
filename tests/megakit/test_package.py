"""What `import megakit` gives at once, what its subpackages give, and the wheel it is packed in."""

import ast
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
    assert list(tmp_path.iterdir()) == []


STUBS = sorted((REPOSITORY / "megakit").glob("*/__init__.pyi"))


def public_names(stub: Path) -> list[str]:
    """What a subpackage's stub lists: the names it gives to others."""
    imports = (
        node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)
    )
    return [alias.asname or alias.name for node in imports for alias in node.names]


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.parent.name)
def test_public_names_are_there(stub: Path) -> None:
    package = importlib.import_module(f"megakit.{stub.parent.name}")
    names = public_names(stub)
    assert names
    assert len(names) == len(set(names))
    assert sorted(package.__all__) == sorted(names)
    for name in names:
        assert getattr(package, name) is not None, name
    with pytest.raises(AttributeError):
        package.no_such_name  # noqa: B018


def test_every_subpackage_lists_its_names() -> None:
    folders = {path.parent for path in (REPOSITORY / "megakit").glob("*/__init__.py")}
    assert folders == {stub.parent for stub in STUBS}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as others do, of a copy: setuptools leaves a folder `build` behind."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(REPOSITORY / "megakit", folder / "source" / "megakit", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / "source")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, folder / "source").output()
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.long
def test_a_wheel_holds_the_library_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"megakit-{megakit.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = wheel.parent / "source"
    files = (path for path in (source / "megakit").rglob("*") if path.is_file())
    assert packed == {path.relative_to(source).as_posix() for path in files}
    assert "megakit/py.typed" in packed


@pytest.mark.long
def test_it_works_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys, importlib.metadata, megakit, megakit.models, megakit.job.options\n"
        "assert megakit.__version__ == importlib.metadata.version('megakit')\n"
        "assert 'torch' not in sys.modules\n"
        "print(megakit.__file__, *megakit.models.__all__)"
    )
    told = output_of(code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert told.startswith(f"{tmp_path}/megakit/__init__.py ")
    assert "load_for_inference" in told
