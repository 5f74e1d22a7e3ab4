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
    *("The wheels are for Linux on x86_64 or aarch64", "GB free, this needs"),
    "name 3.11, 3.12 or 3.13, or the path of one",
    *("uv neither found nor fetched Python", "is missing; git has it"),
    "uv is needed, and no Python with pip or venv is here to install it",
    *("can't be written; name a place that can", "has no NeMo that fits any more"),
    "was not made by ./run, and is no virtual environment of Python 3.11 to 3.13",
    *("set-up stopped, for the reason above", "has no bin/python"),
    ", and each process needs its own",
    "depend on the layout, because each pipeline stage draws different random numbers",
    *("is set up already; remove it first", "this machine has no NVIDIA GPU"),
    *("The GPU is not used:", "cannot compute with", "is gone from this version of the stack"),
    *("the check of the GPU ended with status", "this CPU only emulates bfloat16"),
    *("has to divide --global-batch-size", "the gradient's norm is", "MNIST is not in"),
    *("and cannot be downloaded (", "unpacked or as .gz, and they cannot be downloaded"),
    *("does not contain MNIST any more", "was trained on", "the value is empty"),
    "trained nothing under this layout",
    *("changed since this command began", "cannot be read (", "differs when read again"),
    *("contains no ink", "Unlike MNIST's digits"),
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
    "was aborted, probably because it waited for another rank",
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
    python = [text for path in files for text in strings(path)]
    return "\n".join([*python, re.sub(r'" \\\n\s*"', " ", shell())])


def shell() -> str:
    """The text of the scripts that set up."""
    names = ("run", "locks/help.sh", "locks/set_up.sh")
    return "".join((REPOSITORY / name).read_text() for name in names)


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
    *("--gpus-per-node", "--ntasks-per-node"),  # Slurm
    *("--master-addr", "--master-port", "--node-rank", "--standalone"),  # torchrun
    *("--global", "--generate-hashes", "--require-hashes", "--port"),  # git, uv, TensorBoard
}


def test_options_of_remedies_exist():
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE.read_text())) - FOREIGN
    ours = {flag(field.name) for script in SCRIPTS for field in dataclasses.fields(script)}
    set_up = set(re.findall(r"--[a-z][a-z-]+", shell()))
    assert named & ours
    assert not named - ours - set_up
