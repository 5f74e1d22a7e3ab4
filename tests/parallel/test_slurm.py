"""The sbatch example with a made-up srun and scontrol: its order, signals and exit statuses."""

import os
import signal
import subprocess
import time

import pytest

from tests.scripts import REPOSITORY

SBATCH = REPOSITORY / "examples" / "slurm" / "tutorial.sbatch"
SCRIPTS = ["model_pretrain.py", "model_finetune.py", "model_predict.py"]

# Writes down what it is to run. Where asked to, it works until a signal comes, as ranks do.
SRUN = """#!/usr/bin/env bash
echo "$*" >> "$LOG"
[[ $* != *"$WORKS_ON"* ]] || { touch "$LOG.working"; trap 'sleep 0.3; exit 143' USR1
  for ((i = 0; i < 200; i++)); do sleep 0.05; done; }
[[ $* != *"$FAILS_ON"* ]] || exit 1
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >> "$LOG"
"""


@pytest.fixture
def start(tmp_path):
    """Starts the batch script as Slurm would: (process, what its srun and scontrol were asked)."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
    log = tmp_path / "log"
    log.touch()
    started = []

    def begin(works_on="nothing", fails_on="nothing", **environment):
        # PYTHON would choose another one than the default.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHON"}
        process = subprocess.Popen(
            ["bash", SBATCH],
            env={
                **inherited,
                **{"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log)},
                **{"WORKS_ON": works_on, "FAILS_ON": fails_on},
                **{"SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": str(tmp_path)},
                **environment,
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, lambda: log.read_text().splitlines()

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_three_steps_in_order(start):
    """Each with options of its own."""
    process, asked = start(
        LAYOUT="--pipeline-parallel 2",
        OPTIONS="--dataset digits",
        PRETRAIN_OPTIONS="--max-steps 20 --lr 0.1",
        FINETUNE_OPTIONS="--max-steps 30",
        PREDICT_OPTIONS="--precision 32",
    )
    assert process.wait(60) == 0
    own = ["--max-steps 20 --lr 0.1", "--max-steps 30", "--precision 32"]
    assert [line.split("python ")[1] for line in asked()] == [
        f"{script} --pipeline-parallel 2 --dataset digits {options}"
        for script, options in zip(SCRIPTS, own, strict=True)
    ]


def test_before_the_time_limit_it_waits_for_the_save_and_goes_back_into_the_queue(start, tmp_path):
    process, asked = start(works_on="model_finetune.py")
    wait_for(tmp_path / "log.working")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 143
    *steps, last = asked()
    assert last == "scontrol requeue 4711"
    assert [line.split()[2] for line in steps] == SCRIPTS[:2]


def test_a_failing_step_ends_the_job_with_its_status(start):
    process, asked = start(fails_on="model_finetune.py")
    assert process.wait(60) == 1
    assert [line.split()[2] for line in asked()] == SCRIPTS[:2]
