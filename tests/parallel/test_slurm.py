"""The sbatch example with a made-up srun and scontrol: its order, signals and exit statuses."""

import os
import signal
import subprocess
import time

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


def start(folder, **environment):
    """Starts the batch script as Slurm would, with programs that write down what is asked."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    defaults = {"WORKS_ON": "nothing", "FAILS_ON": "nothing", "LOG": str(folder / "log")}
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": str(folder)}
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    every = {**os.environ, **path, **defaults, **slurm, **environment}
    every.pop("PYTHON", None)  # it would choose another one than the default
    return subprocess.Popen(["bash", SBATCH], env=every)


def asked(process, folder, status):
    """What the programs were asked, once the script has ended with its status."""
    assert process.wait(60) == status
    return (folder / "log").read_text().splitlines()


def test_three_steps_in_order(tmp_path):
    """Each with options of its own."""
    options = {"LAYOUT": "--pipeline-parallel 2", "OPTIONS": "--dataset digits"}
    own = ["--max-steps 20 --lr 0.1", "--max-steps 30", "--precision 32"]
    names = ("PRETRAIN_OPTIONS", "FINETUNE_OPTIONS", "PREDICT_OPTIONS")
    batch = start(tmp_path, **options, **dict(zip(names, own, strict=True)))
    assert [line.split("python ")[1] for line in asked(batch, tmp_path, 0)] == [
        f"{script} --pipeline-parallel 2 --dataset digits {options}"
        for script, options in zip(SCRIPTS, own, strict=True)
    ]


def test_before_the_time_limit_it_waits_for_the_save_and_goes_back_into_the_queue(tmp_path):
    batch = start(tmp_path, WORKS_ON="model_finetune.py")
    while not (tmp_path / "log.working").exists():
        assert batch.poll() is None
        time.sleep(0.02)
    batch.send_signal(signal.SIGUSR1)
    *steps, last = asked(batch, tmp_path, 143)
    assert last == "scontrol requeue 4711"
    assert [line.split()[2] for line in steps] == SCRIPTS[:2]


def test_a_failing_step_ends_the_job_with_its_status(tmp_path):
    batch = start(tmp_path, FAILS_ON="model_finetune.py")
    assert [line.split()[2] for line in asked(batch, tmp_path, 1)] == SCRIPTS[:2]
