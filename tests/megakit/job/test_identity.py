"""Which files of a project count as a script's code. What a run says: tests/test_changes.py."""

import hashlib
import sys
from pathlib import Path

import pytest

from megakit.checkpoints.manifest import same_run
from megakit.errors import UserError
from megakit.job.identity import changed_files, files_of, refuse

FILES = {
    "scripts/train.py": "def work():\n    import kit.deeper as deeper\n    from parts import f\n",
    "parts.py": "raise SystemExit  # nothing is imported\nimport megakit.job, installed\n",
    "kit/__init__.py": "",
    "kit/deeper.py": "from . import side\nfrom .parts import *\n",
    "kit/side.py": "# coding: latin-1\nname = 'é'\n",
    "kit/parts.py": "import scripts.train\n",
}
NOT_IMPORTED = {"pyproject.toml": "", "other.py": "", "kit/other.py": "", "megakit/job.py": ""}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in a project that is reached by a link, as many home folders are."""
    project, link = tmp_path / "project", tmp_path / "link"
    for name, text in {**FILES, **NOT_IMPORTED}.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, "latin-1")
    link.symlink_to(project)
    monkeypatch.syspath_prepend(link)
    return link / "scripts" / "train.py"


def test_the_script_and_what_it_imports_count(script: Path) -> None:
    expected = {name: hashlib.sha256(FILES[name].encode("latin-1")) for name in sorted(FILES)}
    assert [*files_of(script).items()] == [(name, h.hexdigest()) for name, h in expected.items()]


@pytest.mark.parametrize(
    "folder", ["link/.venv/lib", "link/.local/site-packages", "link/own", "NeMo"]
)
def test_installed_packages_and_those_beside_the_project_do_not_count(
    folder: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's containers have NeMo and Megatron outside of site-packages."""
    top = script.parents[1]
    path = top.parent / folder
    path.mkdir(parents=True)
    (path / "installed.py").touch()
    monkeypatch.syspath_prepend(path)
    monkeypatch.setattr(sys, "prefix", str(top / ".venv"))
    found = {*files_of(script)} - FILES.keys()
    assert found == ({"own/installed.py"} if path.name == "own" else set())


def test_changed_added_and_removed_files_are_named() -> None:
    before = {"files": {"a.py": "1", "b.py": "2", "c.py": "3"}}
    assert changed_files(before, {"a.py": "1", "b.py": "9", "d.py": "4"}) == [
        "b.py",
        "c.py",
        "d.py",
    ]
    assert changed_files(before, {}) == changed_files({}, {"a.py": "1"}) == []  # a notebook


def test_a_script_of_a_package_counts_what_it_imports_from_above(tmp_path: Path) -> None:
    """`python -m kit.scripts.train`, in a folder without pyproject.toml."""
    script, above = tmp_path / "kit" / "scripts" / "train.py", tmp_path / "kit" / "parts.py"
    script.parent.mkdir(parents=True)
    script.write_text("from ..parts import f\n")
    above.touch()
    assert [*files_of(script)] == ["../parts.py", "train.py"]


def test_an_earlier_release_wrote_other_entries_about_the_code() -> None:
    """Its runs are resumed, and are not refused because of these entries."""
    before = {"lr": 1.0, "code": {"f": "1"}, "changes": [{"step": 1, "names": ["f"]}]}
    assert same_run(before, {"lr": 1.0, "files": {"a.py": "1"}, "changes": []})
    assert not same_run(before, {"lr": 2.0, "files": {}, "changes": []})
    with pytest.raises(UserError) as error:
        refuse(Path("run"), before, {"lr": 2.0, "files": {}, "start": None}, None)
    assert "--lr was 1.0, now 2.0" in str(error.value)
    assert "code" not in str(error.value)
