"""The tutorial's command, with scripts that only tell what they were given."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import Result, run_python

PROGRAM = """
import sys
from pathlib import Path
from mnist import tutorial

tutorial.PROJECT = Path(sys.argv.pop(1))
sys.exit(tutorial.main())
"""
SCRIPT = """
import json, os, sys
from pathlib import Path

folder = Path(__file__).parent
(folder / f"{Path(__file__).stem}.json").write_text(json.dumps(sys.argv))
print(Path(__file__).stem)
sys.exit(7 if (folder / "fails").exists() and "finetune" in __file__ else 0)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("model_pretrain", "model_finetune", "model_predict"):
        (tmp_path / f"{name}.py").write_text(SCRIPT)
    return tmp_path


def start(project: Path, *options: object) -> tuple[Result, dict[str, Any]]:
    """What came of the command, and the arguments of each script that it started."""
    # With two processes, the tutorial does not import the frameworks beforehand.
    result = run_python("-c", PROGRAM, project, "--devices", 2, *options, cwd=project)
    given = {path.stem: json.loads(path.read_text()) for path in project.glob("*.json")}
    return result, given


def test_each_script_gets_the_options_that_it_has(project: Path) -> None:
    options = ("--seed", 7, "--fresh", "--dataset", "digits", "--precision", "auto")
    result, given = start(project, *options)
    assert result.output() == "model_predict\n"  # what the others print is not the result
    common, training = ["--dataset", "digits", "--devices", "2"], ["--fresh", "--seed", "7"]
    for name, (script, *arguments) in given.items():
        assert script == str(project / f"{name}.py")
        expected = common if name == "model_predict" else common + training
        assert sorted(arguments) == sorted(expected)
    for number, name in enumerate(("model_pretrain", "model_finetune", "model_predict"), start=1):
        assert f"[{number}/3] {' '.join([f'{name}.py', *given[name][1:]])}\n" in result.err


def test_it_ends_with_the_script_that_fails(project: Path) -> None:
    (project / "fails").touch()
    result, given = start(project)
    assert (result.status, result.out) == (7, "")
    assert given.keys() == {"model_pretrain", "model_finetune"}
