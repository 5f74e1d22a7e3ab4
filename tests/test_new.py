"""`./run new`: a project of one's own that runs, passes its tests, and has megakit as a library."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import megakit
from tests.scripts import REPOSITORY, Result, run

VENV = Path(sys.prefix)


def start(*command: object, **options: Any) -> Result:
    """A command to its end; what pip may find is only what is here."""
    # What CI exports for this project is not for the new one.
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "VENV": None, "PYTHON": None}
    return run(*command, timeout=1200, **{**own, **options})


# ---- What is refused, before anything is written -----------------------------------------------


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds nothing."""
    folder = tmp_path_factory.mktemp("venvs") / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs the folder to create: ./run new ../my-model"),
        (["<tmp>/full"], "<tmp>/full exists and is not an empty folder"),
        (["<tmp>/full/file"], "<tmp>/full/file exists and is not an empty folder"),
        ([REPOSITORY / "mine"], "mine is inside this project"),
        ([REPOSITORY], "is inside this project"),
        (["<tmp>/full/file/below"], "<tmp>/full/file/below cannot be written"),
        (["<tmp>/made", "--fresh"], "takes PATH and --venv DIR, not --fresh"),
        (["<tmp>/made", "<tmp>/another"], "takes one PATH, not also <tmp>/another"),
        (["<tmp>/made", "--venv"], "--venv takes a folder"),
        (["<tmp>/made", "--venv", "<tmp>/full"], "--venv <tmp>/full: has no bin/python"),
        (["--venv", "<bare>", "<tmp>/made"], "--venv <bare>: holds NeMo - and Megatron-Core -"),
    ],
)
def test_refused(tmp_path: Path, bare_venv: Path, arguments: list[object], message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    places = {"<tmp>": str(tmp_path), "<bare>": str(bare_venv)}

    def placed(text: object) -> str:
        return re.sub("|".join(places), lambda found: places[found[0]], str(text))

    done = start(REPOSITORY / "run", "new", *map(placed, arguments))
    assert done.status == 2, done.err
    assert done.err.startswith("run: ")
    assert placed(message) in done.err
    assert done.out == ""
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "full", tmp_path / "full/file"]
    assert not (REPOSITORY / "mine").exists()


# ---- What is made ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project, not yet set up."""
    path = tmp_path_factory.mktemp("new") / "My model"
    done = start(sys.executable, REPOSITORY / "template/new.py", path, PATH="/nowhere")  # no git
    assert done.status == 0, done.err
    return path


@pytest.mark.long
def test_the_lock_pins_the_wheel_that_goes_along(made: Path) -> None:
    (wheel,) = (made / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("megakit/__init__.py") == Path(megakit.__file__).read_bytes()
    digest = start("sha256sum", wheel).out.split()[0]
    theirs, ours = ((folder / "requirements.lock").read_text() for folder in (made, REPOSITORY))
    pin = f"megakit=={megakit.__version__} \\\n    --hash=sha256:{digest}\n"
    assert theirs == ours + pin


@pytest.mark.long
def test_a_project_of_its_own(made: Path) -> None:
    assert not (made / "megakit").exists()
    assert not (made / "template").exists()
    for text in (made / "README.md", made / "pyproject.toml"):
        assert "{{" not in text.read_text()
    project = tomllib.loads((made / "pyproject.toml").read_text())["project"]
    assert project["name"] == "my-model"
    assert project["dependencies"] == [f"megakit=={megakit.__version__}"]
    listed = re.findall(r"^  (\w+) ", start(made / "run").out, flags=re.MULTILINE)
    assert " ".join(listed) == "tutorial tests pretrain finetune predict tensorboard setup"
    for verb in ("new", "notebook", "benchmarks"):
        refused = start(made / "run", verb)
        assert refused.status == 2
        assert f"no verb '{verb}' in this project" in refused.err
    # What git would leave out: nothing that the project needs.
    subprocess.run(["git", "init", "--quiet", made], check=True)
    ignored = start("git", "status", "--short", "--ignored", cwd=made).out
    assert "!!" not in ignored


@pytest.mark.long
def test_what_its_readme_names_is_there(made: Path) -> None:
    text = (made / "README.md").read_text()
    named = set(re.findall(r"`((?:tests/)?\w+\.(?:py|html|toml|lock))`", text))
    assert {"model_components.py", "tests/test_data.py"} <= named
    for name in named:
        assert (made / name).is_file(), name


@pytest.mark.long
def test_it_runs_and_passes_its_tests_at_once(tmp_path: Path) -> None:
    """With another environment's packages, without a network, and with its own megakit."""
    if (VENV / ".setup-done").read_text() != (REPOSITORY / "requirements.lock").read_text():
        pytest.skip("this environment is not as ./run sets it up, and is to stay as it is")
    project = tmp_path / "my model"
    project.mkdir()
    (packages,) = VENV.glob("lib/python3*/site-packages")
    before = sorted(packages.iterdir())
    command = (REPOSITORY / "run", "new", ".", "--venv", VENV)
    made = start(*command, cwd=project, VENV=str(VENV))  # as in CI
    assert made.status == 0, made.err
    assert sorted(packages.iterdir()) == before

    tests = start("./run", "tests", cwd=project)
    assert tests.status == 0, tests.out
    assert re.search(r"\d\d passed, 1 skipped", tests.out)
    tutorial = start("./run", "tutorial", "--dataset", "digits", cwd=project)
    assert tutorial.status == 0, tutorial.err
    assert tutorial.out == "runs/predict/predictions.csv\n"
    where = start(".venv/bin/python", "-c", "import megakit; print(megakit.__file__)", cwd=project)
    assert where.out.startswith(f"{project}/.venv/")

    (project / "requirements.lock").open("a").write("# changed\n")
    again = start("./run", "setup", cwd=project)
    assert again.status == 0, again.err
    assert f"uses the packages of {VENV.resolve()}" in again.err
