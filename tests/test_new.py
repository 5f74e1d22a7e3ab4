"""`./run new`: a project of one's own that runs, passes its tests, and has megakit as a library."""

import ast
import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import megakit
from template.sources import IN_FILES, adapted
from tests.scripts import REPOSITORY, Result, run

VENV = Path(sys.prefix)
NEW = (sys.executable, REPOSITORY / "template/new.py")
EXAMPLES = ("gpt", "own_images", "vit")
# No network; and what CI exports for this project is not for the new one.
OWN: dict[str, str | None] = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1", "VENV": None, "PYTHON": None}


def start(*command: object, **options: Any) -> Result:
    """A command to its end."""
    return run(*command, timeout=1200, **{**OWN, **options})


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
        ([REPOSITORY / "mine"], "mine is inside this project"),
        (["<tmp>/full/file/below"], "<tmp>/full/file/below cannot be written"),
        (["<tmp>/made", "--fresh"], "takes PATH, --from NAME, --pictures and --venv DIR, not --f"),
        (["<tmp>/made", "--pictures", "--from", "vit"], "new --pictures: vit has none"),
        (["<tmp>/made", "--from", "slurm"], "takes an example: gpt, megatron, own_images, vit; "),
        (["<tmp>/made", "--venv", "<tmp>/full"], "--venv <tmp>/full: is no environment"),
        (["<tmp>/empty", "--venv", "<bare>"], "--venv <bare>: is no environment of Python 3.11"),
    ],
)
def test_refused(tmp_path: Path, bare_venv: Path, arguments: list[object], message: str) -> None:
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full/file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    places = {"<tmp>": str(tmp_path), "<bare>": str(bare_venv)}

    def placed(text: object) -> str:
        return re.sub("|".join(places), lambda found: places[found[0]], str(text))

    done = start(*NEW, *map(placed, arguments))
    assert done.status == 2, done.err
    assert done.err.startswith("run: ")
    assert done.err.count("\n") == 1
    assert placed(message) in done.err
    assert done.out == ""
    assert sorted(tmp_path.rglob("*")) == before
    assert not (REPOSITORY / "mine").exists()


# ---- What is made ------------------------------------------------------------------------------


def skip_unless_set_up() -> None:
    """Skips a test that would otherwise change this environment."""
    for lock in REPOSITORY.glob("*.lock"):
        held = VENV / ".locks" / lock.name
        if not held.exists() or held.read_bytes() != lock.read_bytes():
            pytest.skip("this environment is not as ./run sets it up, and is to stay as it is")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project, not yet set up."""
    path = tmp_path_factory.mktemp("new") / "My model"
    done = start(*NEW, path, PATH="/nowhere")  # no git
    assert done.status == 0, done.err
    assert done.err == f"Created {path}. To begin: cd '{path}' && ./run tests\n"
    return path


def test_a_rule_that_finds_nothing_is_noticed() -> None:
    """Else a project would import what it does not have."""
    rules = IN_FILES["model_components.py"]
    text = (REPOSITORY / "model_components.py").read_text()
    found = adapted("it.py", text, rules)
    assert "from data import Batch, read_splits\n" in found
    assert "read_splits(self.data_dir)" in found
    with pytest.raises(ValueError, match=r"it\.py: nothing to replace for .*another_name"):
        adapted("it.py", text.replace("another_name", "other_name"), rules)


@pytest.mark.long
def test_pictures_by_option(tmp_path: Path) -> None:
    """Those of a prediction and those in TensorBoard, and nothing else of the tutorial's."""
    skip_unless_set_up()
    project = tmp_path / "model"
    start(*NEW, project, "--pictures", "--venv", VENV).output()
    names = {path.stem for path in (project / "mnist").glob("[!_]*.py")}
    assert names == {"drawing", "figure_style", "figures", "prediction_figures", "views"}
    short = ("--max-steps", 20, "--accelerator", "cpu")
    for verb, options in (("pretrain", short), ("finetune", short), ("predict", short[2:])):
        start("./run", verb, *options, cwd=project).output()
    assert {"confusion_matrix.png", "latent_space.png"} <= {
        path.name for path in (project / "runs/predict").iterdir()
    }
    (events,) = (project / "runs/pretrain").rglob("events.*")
    assert b"reconstructions" in events.read_bytes()


def check_readme(project: Path) -> None:
    """It is filled in, and the files that it names are there."""
    readme = (project / "README.md").read_text()
    assert not re.search(r"\{[{%]", readme)
    for name in set(re.findall(r"`((?:tests/)?\w+\.(?:py|html|toml|lock))`", readme)):
        assert (project / name).is_file(), name


@pytest.mark.long
def test_a_project_of_its_own(made: Path) -> None:
    assert not (made / "megakit").exists()
    assert not (made / "template").exists()
    assert not (made / "mnist").exists()
    assert [path.name for path in (made / "digits").iterdir()] == ["digits.csv.gz"]
    own = [path for path in made.rglob("*.py") if "site-packages" not in path.parts]
    assert not re.search(r"mnist\.|MNISTCustom|LogPictures", "".join(map(Path.read_text, own)))
    assert sum(len(path.read_text().splitlines()) for path in own) <= 1300
    (wheel,) = (made / "wheels").iterdir()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (made / "requirements.lock").read_text().endswith(f"--hash=sha256:{digest}\n")
    check_readme(made)
    assert "{{" not in (made / "pyproject.toml").read_text()
    project = tomllib.loads((made / "pyproject.toml").read_text())["project"]
    assert project["name"] == "my-model"
    assert project["dependencies"] == [f"megakit=={megakit.__version__}"]
    # The commands of its README would renew its locks with these.
    theirs, ours = (
        tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (made, REPOSITORY)
    )
    assert project["requires-python"] == ours["project"]["requires-python"]
    assert theirs["dependency-groups"]["dev"] == ours["dependency-groups"]["copy"]
    assert theirs["tool"]["uv"].items() <= ours["tool"]["uv"].items()
    listed = re.findall(r"^  (\w+) ", start(made / "run").out, flags=re.MULTILINE)
    assert " ".join(listed) == "tutorial tests pretrain finetune predict tensorboard setup"
    # What git would leave out: nothing that the project needs.
    subprocess.run(["git", "init", "--quiet", made], check=True)
    ignored = start("git", "status", "--short", "--ignored", cwd=made).out
    assert "!!" not in ignored


# ---- Without NeMo ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_nemo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project on Megatron-Core alone, and its wheel's files in the folder `wheel`."""
    path = tmp_path_factory.mktemp("new") / "model"
    start(*NEW, path, "--from", "megatron").output()
    (wheel,) = (path / "wheels").iterdir()
    zipfile.ZipFile(wheel).extractall(path.with_name("wheel"))
    return path


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, list[str]]]:
    """The modules that some statements import, and the names that they import from these."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), [alias.name for alias in node.names]


def defines(file: Path, name: str) -> bool:
    """Whether a module defines or imports a name."""
    found = re.search(rf"^(\S[^=\n]*)?\b{name}\b", file.read_text(), re.MULTILINE)
    return found is not None


def test_a_project_without_nemo(without_nemo: Path) -> None:
    """Its scripts and tests import only what it has, and its settings name no NeMo."""
    check_readme(without_nemo)
    for file in without_nemo.rglob("*.py"):
        for module, names in imports(ast.walk(ast.parse(file.read_text()))):
            root, *below = module.split(".")
            assert root not in {"nemo", "lightning", "torchmetrics", "sklearn", "mnist"}, file
            own = without_nemo.joinpath(root, *below).with_suffix(".py")
            if root == "tests" or own.exists():
                assert [name for name in names if not defines(own, name)] == [], file
    text = (without_nemo / "pyproject.toml").read_text()
    assert not re.search("nemo|lightning|3.11", text, re.IGNORECASE)
    theirs = tomllib.loads(text)
    assert theirs["project"]["requires-python"] == ">=3.12,<3.14"
    locks = REPOSITORY / "template/megatron"
    asked = re.findall(r"^\w.*", (locks / "requirements.in").read_text(), re.MULTILINE)
    assert theirs["project"]["dependencies"] == [f"megakit=={megakit.__version__}", *asked]
    groups = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["dependency-groups"]
    assert theirs["dependency-groups"]["dev"] == groups["copy"] + groups["copy-megatron"][1:]
    lock = (without_nemo / "requirements.lock").read_text()
    assert lock.startswith((locks / "requirements.lock").read_text() + "megakit==")
    dev = "requirements-dev.lock"
    assert (without_nemo / dev).read_bytes() == (locks / dev).read_bytes()
    done = start(without_nemo / "run", "setup", PYTHON="3.11")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "PYTHON=3.11: name a Python from 3.12 to 3.13" in done.err
    lent = start(without_nemo / "run", "setup", "--venv", VENV)
    assert "is no environment of Python 3.12 to 3.13 with Megatron-Core 0.19 and torch" in lent.err


def test_its_wheel_has_the_modules_that_it_uses_and_none_of_nemo(without_nemo: Path) -> None:
    wheel = without_nemo.with_name("wheel")
    (metadata,) = wheel.glob("*/METADATA")
    assert "Requires-Dist" not in metadata.read_text()
    library = wheel / "megakit"
    assert {path.name for path in library.iterdir()} >= {"py.typed", "errors.py", "lazy.py"}
    assert not (library / "nemo").exists()
    assert not (library / "job/notebook.py").exists()  # no file of the project imports it
    for file in library.rglob("*.py"):
        for module, _ in imports(ast.parse(file.read_text()).body):
            assert module.split(".")[0] not in {"nemo", "lightning", "torchmetrics", "fiddle"}, file
            if module.startswith("megakit."):
                path = wheel.joinpath(*module.split("."))
                assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), file
    for stub in library.rglob("*.pyi"):
        for module, names in imports(ast.parse(stub.read_text()).body):
            assert all(defines(stub.with_name(f"{module[1:]}.py"), name) for name in names), stub


@pytest.mark.long
def test_without_nemo_it_runs_and_passes_its_tests(newest_venv: Path, tmp_path: Path) -> None:
    """With the packages of its locks, which `ladder/newest.sh` has installed."""
    project = tmp_path / "model"
    start(*NEW, project, "--from", "megatron", "--venv", newest_venv).output()
    tutorial = start("./run", "tutorial", cwd=project)
    assert tutorial.out == "runs/predict/predictions.csv\n", tutorial.err
    tests = start("./run", "tests", cwd=project)
    assert tests.status == 0, tests.out
    held = "from importlib.metadata import distributions as d; print(*(p.name for p in d()))"
    packages = start(".venv/bin/python", "-c", held, cwd=project).output().lower()
    assert not re.search("nemo|lightning|scikit", packages)


# ---- The tutorial and the other examples, with the packages of this environment ----------------


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_from_an_example(tmp_path: Path, name: str) -> None:
    """It passes its tests at once, and lists its scripts in the order of their stages."""
    skip_unless_set_up()
    project = tmp_path / "my model"
    made = start(*NEW, project, "--from", name, "--venv", VENV)
    assert made.status == 0, made.err
    own = "".join(path.read_text() for path in project.glob("*.py"))
    assert "ExampleModelTrunk" not in own, "the project has a model of its own"
    verbs = {"vit": "pretrain finetune predict", "own_images": "train predict"}
    listed = re.findall(r"^  (\w+) ", start(project / "run").out, flags=re.MULTILINE)
    expected = verbs.get(name, "pretrain sample")
    assert " ".join(listed) == f"tests {expected} tensorboard setup"
    assert "no verb 'tutorial'" in start(project / "run", "tutorial").err
    check_readme(project)
    ranks = ("--tensor-parallel", 2, "--devices", 2)
    if name != "own_images":  # has no images yet
        script = project / "model_pretrain.py"
        shares = start(REPOSITORY / "run", "layout", script, *ranks, cwd=project, VENV=str(VENV))
        assert "tensor 2" in shares.output()
    tests = start("./run", "tests", cwd=project)
    assert tests.status == 0, tests.out


@pytest.mark.long
def test_it_runs_and_passes_its_tests_at_once(tmp_path: Path) -> None:
    """With another environment's packages, without a network, and with its own megakit."""
    skip_unless_set_up()
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
    assert re.search(r"\d\d passed", tests.out)
    tutorial = start("./run", "tutorial", cwd=project)
    assert tutorial.out == "runs/predict/predictions.csv\n", tutorial.err
    where = start(".venv/bin/python", "-c", "import megakit; print(megakit.__file__)", cwd=project)
    assert where.out.startswith(f"{project}/.venv/")

    # A head that starts from other weights on another pipeline stage.
    components = project / "model_components.py"
    seeded = 'with seeded(config.seed, "digit_classifier"):'
    assert seeded in components.read_text()
    components.write_text(components.read_text().replace(seeded, "if True:"))
    layouts = start("./run", "tests", "tests/test_layouts.py", "-k", "pipeline", cwd=project)
    assert re.findall(r"^FAILED .*?\[(.*?)\]", layouts.out, re.MULTILINE) == [
        "model_finetune.py-pipeline"
    ], layouts.out

    (project / "requirements.lock").open("a").write("# changed\n")
    again = start("./run", "setup", cwd=project)
    assert again.status == 0, again.err
    assert f"uses the packages of {VENV.resolve()}" in again.err
