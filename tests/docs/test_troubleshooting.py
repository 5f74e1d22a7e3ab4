"""docs/troubleshooting.md quotes this project's messages as they are in the source."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megakit.job.ranges import flag
from model_finetune import FinetuneOptions
from model_predict import PredictOptions
from model_pretrain import PretrainOptions
from tests.scripts import REPOSITORY

SCRIPTS = (PretrainOptions, FinetuneOptions, PredictOptions)
PAGE = REPOSITORY / "docs" / "troubleshooting.md"
#: Pieces of entries that are messages of this project; all others are the frameworks' and tools'.
OURS = (
    *("and the wheels are for Linux on x86_64", "no usable Python", "GB free, this needs"),
    *("set-up stopped;", "setup.log says why", "this machine has no NVIDIA GPU"),
    *("The GPU is not used:", "cannot compute with", "is gone from this version of the stack"),
    *("has to divide --global-batch-size", "the gradient's norm is", "MNIST is not in"),
    *("and cannot be downloaded (", "unpacked or as .gz, and they cannot be downloaded"),
    *("changed since this command began", "cannot be read (", "differs when read again"),
    *("the code was changed since its last checkpoint", "has changed since it made"),
    *("no checkpoint to start from", "holds another run", "there is no such validated value"),
    *("does not say whether higher is better", "a named value has to be one number"),
    *("Return the same names in every step.", "no validation is better than another"),
    "validates only after its last step",
    *("is in use by", "not a complete checkpoint:"),
    *("was altered after it was written (its sha256 differs)", "is unsafe:"),
    *("renamed or replaced", "belongs to another run", "while this run was writing to it"),
    *("its weights do not fit", "cannot save", "processes, but rank", "did not connect within"),
    *("rank 0 cannot listen at it", "rank 0 does not reach itself there", "bytes of shared memory"),
    *("could not send a batch, and", "a process of this job opens up to"),
    "so the option has no effect",
    *("its weights fit no other size", "not a positive whole number"),
    *("No rank 0 at", "the loopback interface lo is down", "was killed by"),
    *("and predictions.csv disagree", "cannot be traced:"),
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
)


def strings(path: Path) -> Iterator[str]:
    """A Python file's strings, with `...` where values are put in."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [
                part.value if isinstance(part, ast.Constant) else "..." for part in node.values
            ]
            yield "".join(map(str, parts))


@cache
def messages() -> str:
    """All that this project may say."""
    roots = (REPOSITORY / "megakit", REPOSITORY / "mnist")
    files = [*(path for root in roots for path in root.rglob("*.py")), *REPOSITORY.glob("*.py")]
    shell = re.sub(r'" \\\n\s*"', " ", (REPOSITORY / "run").read_text())
    return "\n".join([*(text for path in files for text in strings(path)), shell])


@pytest.mark.parametrize("piece", OURS)
def test_messages_are_quoted_as_they_are(piece):
    assert piece in PAGE.read_text()
    assert piece in messages()


def test_messages_are_found():
    """Else the test above could not fail."""
    assert "no checkpoint to start from" in messages()
    assert "no checkpoint to begin with" not in messages()


#: Options of other programs, which the page names with the program.
FOREIGN = {
    *("--build-arg", "--gpus", "--name", "--shm-size", "--ulimit", "--user"),  # docker
    *("--master-addr", "--master-port", "--node-rank", "--standalone"),  # torchrun
    *("--global", "--no-strip-extras", "--port"),  # git, uv, TensorBoard
}


def test_options_of_remedies_exist():
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE.read_text())) - FOREIGN
    ours = {flag(field.name) for script in SCRIPTS for field in dataclasses.fields(script)}
    set_up = set(re.findall(r"--[a-z][a-z-]+", (REPOSITORY / "run").read_text()))
    assert named & ours
    assert not named - ours - set_up
