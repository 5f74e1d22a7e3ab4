"""The GPT of ladder/gpt: equal losses and norms in plain PyTorch, with FSDP2, in every layout."""

import contextlib
import io
import runpy
import sys
from functools import cache
from typing import Any

import pytest

from ladder.climb import ROUNDING
from ladder.programs import GPT, Program
from tests.scripts import REPOSITORY, run


def train(path: str, arguments: list[str]) -> str:
    """Runs a program of the ladder as one rank of a job; returns what it prints."""
    sys.argv = [path, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def values_of(ranks: Any, program: Program, *options: str) -> list[list[float]]:
    """The loss and the norm of each step."""
    arguments = [*program.options.split(), *options]
    last = ranks.run(train, str(program.file), arguments, world_size=program.ranks)[-1]
    return [[float(value) for value in line.split()[1:]] for line in last.splitlines()]


@pytest.fixture(scope="module")
def plain(ranks):
    """What plain PyTorch prints, without and with experts."""
    return cache(lambda has_experts: values_of(ranks, FIRST[has_experts]))


FIRST = {"experts" in program.options: program for program in GPT if program.is_first}
SHORT = ("2 ranks", "PP2, interleaved", "experts: CP2 x EP2")
ROWS = [
    pytest.param(
        program,
        id=f"{program.file.stem} {program.options}",
        marks=[] if program.row in SHORT else pytest.mark.long,
    )
    for program in GPT
    if not program.is_first
]


@pytest.mark.parametrize("program", ROWS)
def test_losses_and_norms_are_those_of_plain_torch(program, ranks, plain):
    """A factor of all gradients is seen in the norms alone: clipping and Adam hide it."""
    values = values_of(ranks, program)
    assert len(values) == 50
    expected = plain("experts" in program.options)
    losses, norms = zip(*values, strict=True)
    expected_losses, expected_norms = zip(*expected, strict=True)
    assert losses == pytest.approx(expected_losses, rel=ROUNDING[0])
    assert norms == pytest.approx(expected_norms, rel=ROUNDING[1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "least"),
    [
        ("--pipeline-parallel 2 --chunks 2 --batch-p2p", 0.1),
        ("--context-parallel 2 --two-value-loss", 0.99),
    ],
)
def test_two_silent_faults_of_megatron(options, least, ranks, plain):
    """Options of the file that show them: no error occurs, and the first gradient is wrong."""
    program = Program("ladder/gpt/3_megatron.py", options=options, ranks=2)
    (_, norm), *_ = values_of(ranks, program, "--steps", "2")
    (_, expected), *_ = plain(False)
    assert norm / expected - 1 > least


@pytest.mark.long
def test_ranks_end_without_an_abort(tmp_path):
    """Without the wait before their end, more than half of the tries fail on two cores."""
    code = "import runpy, sys; sys.setswitchinterval(100); del sys.argv[0]"  # the threads' worst
    code += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    program = (sys.executable, "-c", code, REPOSITORY / "ladder/gpt/2_fsdp.py", "--steps", 2)
    for _ in range(3):
        done = run(sys.executable, *torchrun, "--no-python", *program, cwd=tmp_path)
        assert len(done.output().splitlines()) == 2


@pytest.mark.long
def test_a_checkpoint_continues_under_another_layout(plain, tmp_path):
    """In processes of their own, because Megatron saves in processes that import the program."""
    tensor, pipeline = ("--tensor-parallel", 2), ("--pipeline-parallel", 2, "--chunks", 2)
    for options in (*tensor, "--save", "half"), (*pipeline, "--load", "half"):
        printed = run(
            REPOSITORY / "run", "ladder", "gpt", 3, *options, cwd=tmp_path, VENV=sys.prefix
        ).output()
    losses = [float(line.split()[1]) for line in printed.splitlines()]
    assert losses == pytest.approx([loss for loss, _ in plain(False)[25:]], rel=1e-6)


def test_wrong_options(tmp_path):
    done = run(REPOSITORY / "run", "ladder", "gpt", "4", cwd=tmp_path, VENV=sys.prefix)
    assert done.status == 2
    assert "4: the steps have the numbers 1 to 3." in done.err
