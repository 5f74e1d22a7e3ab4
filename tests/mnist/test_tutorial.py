"""The tutorial's command, with scripts that only tell what they were given; a chain's sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from megakit.checkpoints.model_settings import read_model_settings
from tests.scripts import Result, read_csv, run_python, run_script

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
    options = ("--seed", 7, "--fresh", "--data-dir", "a folder", "--precision", "auto")
    result, given = start(project, *options)
    assert result.output() == "model_predict\n"  # what the others print is not the result
    common, training = ["--data-dir", "a folder", "--devices", "2"], ["--fresh", "--seed", "7"]
    for name, (_, *arguments) in given.items():
        expected = common if name == "model_predict" else common + training
        assert sorted(arguments) == sorted(expected)
    for number, name in enumerate(("model_pretrain", "model_finetune", "model_predict"), start=1):
        assert f"[{number}/3] {' '.join([f'{name}.py', *given[name][1:]])}\n" in result.err


def test_it_ends_with_the_script_that_fails(project: Path) -> None:
    (project / "fails").touch()
    result, given = start(project)
    assert (result.status, result.out) == (7, "")
    assert given.keys() == {"model_pretrain", "model_finetune"}


@pytest.mark.long
def test_a_chain_with_other_sizes(tmp_path: Path) -> None:
    """With a latent space of one dimension, which no picture shows."""
    common = ("--dataset", "digits", "--accelerator", "cpu", "--output-dir", tmp_path)
    short = (*common, "--max-steps", 30, "--val-interval", 30)
    first = run_script("model_pretrain.py", *short, "--hidden-size", 12, "--latent-size", 1)
    second = run_script("model_finetune.py", *short)
    for path in (first.output(), second.output()):
        settings = read_model_settings(Path(path.strip()))
        assert (settings["hidden_size"], settings["latent_size"]) == (12, 1)
    (tmp_path / "predict").mkdir(exist_ok=True)
    (tmp_path / "predict" / "latent_space.png").write_text("of an earlier prediction")
    run_script("model_predict.py", *common).output()
    assert len(read_csv(tmp_path / "predict" / "predictions.csv")) == 300
    names = {path.name for path in (tmp_path / "predict").iterdir()}
    assert {"report.html", "confusion_matrix.png"} <= names
    assert "latent_space.png" not in names
