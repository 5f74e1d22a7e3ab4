"""Step 3 of the ladder on a later Megatron-Core, in an environment of its own."""

import re
import sys
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, run

SCRIPT = REPOSITORY / "ladder/newest.sh"
PAGE = (REPOSITORY / "docs/porting.md").read_text()


@pytest.mark.long
@pytest.mark.usefixtures("newest_venv")
def test_a_later_megatron_trains_equally_and_continues_a_checkpoint(mnist_dir: Path) -> None:
    done = run(SCRIPT, "--data-dir", mnist_dir, timeout=1100, VENV=sys.prefix)
    head, *rows, last = done.output().splitlines()
    assert re.findall(r"[\d.]{5,}", head)[:2] == ["0.15.3", "0.19.2"]
    steps = [[float(number) for number in row.split()] for row in rows]
    assert [step for step, *_ in steps] == [*range(1, 51)]
    # One process on both; three layouts; from step 26 on, also the continued checkpoint.
    assert [len(losses) for _, *losses in steps] == [5] * 25 + [6] * 25
    assert all(abs(loss - losses[0]) < 1e-6 for _, *losses in steps for loss in losses)
    assert steps[-1][1] < 0.6 * steps[0][1]
    assert float(last.rpartition(" ")[2]) < 1e-6

    shown = PAGE.split(f"```text\n{head}\n")[1].split("```")[0]
    lines = [[float(n) for n in row.split()] for row in re.findall(r"^ *\d.*", shown, re.MULTILINE)]
    assert len(lines) == 4
    assert all(line == pytest.approx(steps[int(line[0]) - 1], abs=1e-6) for line in lines)


@pytest.mark.long
def test_a_wrong_option_is_refused_before_anything_is_installed() -> None:
    done = run(SCRIPT, "--steps", "few", VENV=sys.prefix)
    assert (done.status, done.out) == (2, "")
    assert "--steps few: has to be a whole number." in done.err
    assert "Setting up" not in done.err
