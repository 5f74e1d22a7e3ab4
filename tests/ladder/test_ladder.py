"""The ladder: short files, and equal losses."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.refusals import CLOSED_PROXY
from tests.scripts import REPOSITORY, environment, run, run_python

PAGE = (REPOSITORY / "docs/course/01_one_process.md").read_text()
MOST_LINES = {
    **{"1_torch.py": 60, "2_lightning.py": 70, "3_megatron.py": 200, "4_nemo.py": 200},
    **{"gpt/1_torch.py": 120, "gpt/2_fsdp.py": 120, "gpt/3_megatron.py": 320},
}


def ladder(*arguments, cwd, **changes):
    return run(REPOSITORY / "run", "ladder", *arguments, cwd=cwd, VENV=sys.prefix, **changes)


def losses_of(printed):
    return [float(line.split()[1]) for line in printed.splitlines()]


def test_each_step_is_short():
    lines = {
        name: len((REPOSITORY / "ladder" / name).read_text().splitlines()) for name in MOST_LINES
    }
    assert all(lines[name] <= most for name, most in MOST_LINES.items()), lines


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The losses of plain PyTorch on the digits."""
    folder = tmp_path_factory.mktemp("plain")
    return losses_of(ladder(1, "--dataset", "digits", "--steps", 12, cwd=folder).output())


@pytest.mark.long
@pytest.mark.parametrize("step", [2, 4])
def test_the_losses_are_those_of_plain_torch(step, plain, tmp_path):
    done = ladder(step, "--dataset", "digits", "--steps", 12, cwd=tmp_path)
    assert losses_of(done.output()) == pytest.approx(plain, rel=1e-6)
    assert len(plain) == 12
    assert done.err == ""  # what the frameworks report is in a log


@pytest.mark.long
def test_all_steps_agree(mnist_dir, tmp_path):
    """The table of the page, with a run of model_pretrain.py and step 3 under three layouts."""
    done = ladder("--data-dir", mnist_dir, cwd=tmp_path)
    rows = {row[:28].strip(): row[28:].split() for row in done.output().splitlines()[1:9]}
    shown = re.search(r"<!-- printed: ./run ladder -->\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    table = {row[:28].strip(): row[28:].split() for row in shown[1].splitlines()[1:]}
    assert rows.keys() == table.keys()
    for name, row in rows.items():
        assert float(row[-1]) < 1e-6, name
        losses = [
            [float(cell) for cell in cells if len(cell) == 11] for cells in (row, table[name])
        ]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6), name
    assert (tmp_path / "runs/ladder/losses.png").stat().st_size > 10_000


#: The comparison, with losses of which one is another, or with programs that fail.
PLANTED = """
import sys
import climb
from mnist.samples import LadderOptions

other, *fail = sys.argv[1:]

def values_of(program, *_):
    if program.name in fail:
        raise climb.StepFailedError(1)
    return {1: (0.5,), 2: (0.4 + 1e-6 * (program.name == other),)}


climb.values_of = values_of
sys.exit(climb.climb(climb.LADDERS[""], LadderOptions(steps=2), []))
"""


def climb_planted(folder, *names):
    (folder / "runs/ladder").mkdir(parents=True)
    return run_python("-c", PLANTED, *names, cwd=folder, PYTHONPATH=str(REPOSITORY / "ladder"))


def test_other_losses_are_no_success(tmp_path):
    done = climb_planted(tmp_path, "2_lightning.py")
    assert done.status == 1
    assert "Rounding explains differences up to 1e-06" in done.err


@pytest.mark.parametrize("name", ["1_torch.py", "  2 pipeline stages"])
def test_a_program_that_fails_leaves_the_other_rows(name, tmp_path):
    """Also the first, with whose losses the others are compared."""
    done = climb_planted(tmp_path, "none", name)
    assert (done.status, done.err.partition(":")[0]) == (1, "Failed")
    assert name.strip() in done.err
    rows = [row for row in done.out.splitlines()[1:] if row[:28].strip()[:1].isdigit()]
    failed = [row.startswith(name) for row in rows]
    assert (len(rows), sum(failed)) == (7, 1)
    assert [row.endswith("failed") for row in rows] == failed


@pytest.mark.long
def test_a_checkpoint_continues_under_another_layout(tmp_path):
    options = ("--dataset", "digits", "--steps", 12)
    saving = ladder(3, *options, "--tensor-parallel", 2, "--save", "half", cwd=tmp_path)
    assert saving.err == ""  # what the frameworks report is in a log
    for layout in (("--micro-batch-size", 32), ("--pipeline-parallel", 2)):
        loading = ladder(3, *options, *layout, "--load", "half", cwd=tmp_path)
        expected = losses_of(saving.output())[6:]
        assert losses_of(loading.output()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_nemo_resumes_with_the_next_sample(tmp_path):
    """A killed training continues from its checkpoint of step 25 with the losses it had."""
    script = (sys.executable, str(REPOSITORY / "ladder" / "4_nemo.py"))
    command = [*script, "--dataset", "digits", "--steps", "60", "--output-dir", str(tmp_path)]
    quiet = environment(NEMO_REDIRECT_LOGS_TO_STDERR="1")
    lines = []
    with subprocess.Popen(command, env=quiet, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        for line in first.stdout:
            lines.append(line)
            if line.startswith("35 "):
                os.kill(first.pid, signal.SIGKILL)
                break
    second = run(*command, NEMO_REDIRECT_LOGS_TO_STDERR="1").output().splitlines()
    assert second[0].startswith("26 ")
    before, after = losses_of("".join(lines))[25:], losses_of("\n".join(second))
    assert (len(before), len(after)) == (10, 35)
    assert after[:10] == pytest.approx(before, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["5"], "5: the steps have the numbers 1 to 4"),
        (["1", "--steps", "1"], "--steps 1: has to be at least 2."),
        (["3", "--devices", "0"], "--devices 0: has to be at least 1."),
        (["3", "--tensor-parallel", "0"], "--tensor-parallel 0: has to be at least 1."),
        (["--stps", "3"], "--stps: there is no such option"),
    ],
)
def test_wrong_options(arguments, says, tmp_path):
    done = ladder(*arguments, cwd=tmp_path, https_proxy=CLOSED_PROXY)  # a name may take long
    assert done.status == 2
    assert says in done.err


@pytest.mark.long
def test_an_impossible_layout_is_told_in_a_line(tmp_path):
    done = ladder(3, "--tensor-parallel", 3, "--dataset", "digits", cwd=tmp_path)
    assert done.status == 1
    assert re.fullmatch(
        r"\[rank\d\]: AssertionError: 64 is not divisible by 3\n"
        r"The traceback is in runs/ladder/3_megatron.log.\n",
        done.err,
    )
