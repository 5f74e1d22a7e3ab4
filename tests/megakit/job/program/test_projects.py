"""Which files belong to a script's project, how its call is found, and that every Python agrees."""

import os
from pathlib import Path

import pytest

from megakit.job.program import code_of
from tests.megakit.job.program.written import GUARD, F, written
from tests.scripts import REPOSITORY, run


def test_the_script_s_name_does_not_count(tmp_path: Path) -> None:
    before = written(tmp_path, {"train.py": "import torch\ntorch.x = 1\ndef f(): pass"}, "f")
    (tmp_path / "train.py").rename(tmp_path / "other.py")
    assert code_of(tmp_path / "other.py") == before


def test_a_script_below_a_folder_that_it_adds_to_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(F)
    monkeypatch.syspath_prepend(tmp_path)
    code = written(tmp_path / "examples" / "vit", {"train.py": "from own import f"}, "f")
    assert "f" in code


def test_installed_packages_and_those_beside_the_project_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's containers have NeMo and Megatron outside of site-packages."""
    project = tmp_path / "project"
    (project / "scripts").mkdir(parents=True)
    (project / "pyproject.toml").touch()
    (project / "own.py").write_text("import ours\ndef one():\n    return ours.two()\n")
    script = project / "scripts" / "train.py"
    script.write_text("import own\nrun_script(None, own.one)\n")
    monkeypatch.syspath_prepend(tmp_path / "opt")
    monkeypatch.syspath_prepend(project)
    for folder, installed in (
        ("opt", True),
        ("project/.venv/site-packages", True),
        ("project", False),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "ours.py").write_text("def two():\n    return 2\n")
        monkeypatch.syspath_prepend(tmp_path / folder)
        assert ("two" in code_of(script)) is not installed
        (tmp_path / folder / "ours.py").unlink()


def test_a_folder_with_its_own_history_is_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules above it belong to another one."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "above.py").write_text(F)
    files = {"train.py": "from above import f\ndef g(): return f()"}
    assert [*written(tmp_path / "project", files, "g")] == ["g", "main block of the script"]


@pytest.mark.parametrize(
    ("imported", "call"),
    [
        ("from megakit.job.script import run_script", "run_script(None, None, f)"),
        ("from megakit.job.script import run_script as go", "go(None, None, f)"),
        ("from megakit.job import script", "script.run_script(None, None, f)"),
        ("import megakit.job.script", "megakit.job.script.run_script(*JOB)"),
    ],
)
def test_the_call_is_found_by_any_name(tmp_path: Path, imported: str, call: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{imported}\n{F}\nJOB = None, None, f\n{GUARD}{call}\n")
    assert "f" in code_of(script)
    script.write_text("run_script()\n")  # Python says what is wrong with it
    code_of(script)


def test_a_script_that_runs_nothing_has_no_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f():\n    pass\n")
    assert code_of(tmp_path / "a.py") == {}


SCRIPTS = sorted(
    path.relative_to(REPOSITORY)
    for path in [*REPOSITORY.glob("model_*.py"), *REPOSITORY.glob("examples/*/model_*.py")]
    if "run_script(" in path.read_text()
)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_gives_the_same(version: str) -> None:
    """A run that one Python began may go on under another."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    ours = {str(path): code_of(REPOSITORY / path) for path in SCRIPTS}
    assert len(ours) >= 5
    program = (
        "import sys, types; from pathlib import Path; "
        # The one package that `megakit.job` itself imports; other Pythons do not have it.
        "lazy = types.SimpleNamespace(attach_stub=lambda *_: (None, None, None)); "
        "sys.modules['lazy_loader'] = lazy; "
        "from megakit.job.program import code_of; "
        f"print({{str(p): code_of(Path({str(REPOSITORY)!r}) / p) for p in {[*ours]!r}}})"
    )
    assert run(python, "-c", program, cwd=REPOSITORY).output().strip() == str(ours)


def find_python(version: str) -> Path | None:
    """Another Python of this machine: on the path, or one of pyenv's."""
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    folders += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin"))
    for folder in folders:
        python = folder / f"python{version}"
        if python.is_file() and not run(python, "-c", "").status:
            return python
    return None
