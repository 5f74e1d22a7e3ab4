"""What the scripts refuse: the table of tests/refused_commands.py, and what needs more than a row.

Each command ends with status 2 before a framework is imported, tells every problem on a line of its
own, and changes nothing on the disk (tests/refusals.py).
"""

import fcntl
import shlex
import shutil
from pathlib import Path

import pytest

from tests.once import Chain
from tests.refusals import PRETRAIN_PY, TRAPPED, Refusals, run_forked
from tests.refused_commands import CASES

HAS_GPU_DRIVER = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


@pytest.fixture(scope="module")
def trained(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tutorial's runs, for refusals: they change nothing."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(chain.runs, folder / "runs")
    return folder


@pytest.fixture
def refused(trained: Path, tmp_path: Path) -> Refusals:
    return Refusals(trained, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, trained: Path, tmp_path: Path) -> None:
    case, folder = CASES[name], trained
    if case.is_fresh or case.change:
        folder = tmp_path / "folder"
        folder.mkdir()
        if not case.is_fresh:
            shutil.copytree(trained, folder, dirs_exist_ok=True)
        if case.change:
            case.change(folder)
    options = shlex.split(case.options.replace("{}", str(folder)))
    problems = Refusals(folder, tmp_path).problems(case.script, *options)
    assert len(problems) == len(case.told), problems
    for parts in case.told:
        fitting = [told for told in problems if all(part in told for part in parts.split(" | "))]
        assert len(fitting) == 1, (parts, problems)


def test_the_trap_works(tmp_path: Path) -> None:
    """A command that is not refused goes on to its work, loads a framework, and is caught."""
    options = ("--output-dir", tmp_path, "--dataset", "digits", "--accelerator", "cpu")
    assert run_forked(PRETRAIN_PY, *options, folder=tmp_path, cwd=tmp_path).status == TRAPPED


@pytest.mark.parametrize(("stage", "options"), [("pretrain", ["--fresh"]), ("predict", [])])
def test_a_run_in_use(stage: str, options: list[str], refused: Refusals) -> None:
    with (refused.folder / "runs" / stage / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        problem = refused.problem(f"model_{stage}.py", *options)
    assert f"runs/{stage} is in use" in problem
    assert "--output-dir" in problem


def test_messages_begin_with_what_was_typed(refused: Refusals) -> None:
    """A problem of the command line, and one that the plan finds."""
    for option, value, begin in (("--warp", 9, "--warp"), ("--checkpoint", "a/b", "a/b")):
        told = refused("model_finetune.py", option, value, MEGAKIT_COMMAND="run finetune")
        assert told.startswith(f"run finetune: {begin}: ")


def test_a_relative_path_of_another_folder_is_told_in_full(refused: Refusals) -> None:
    """`./run` is not there, so what a job prints is of use elsewhere."""
    told = refused.problem("model_finetune.py", "--output-dir", "elsewhere")
    assert told.startswith(f"{refused.folder}/elsewhere/pretrain/checkpoints: no checkpoint")


@pytest.mark.skipif(HAS_GPU_DRIVER, reason="this machine has a GPU, or its driver at least")
def test_no_gpu(refused: Refusals) -> None:
    problem = refused.problem(PRETRAIN_PY, "--accelerator", "gpu", "--fresh")
    for part in ("--accelerator gpu", "no NVIDIA GPU", "--accelerator cpu"):
        assert part in problem
