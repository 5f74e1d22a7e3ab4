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
[[ $* != *"$WORKS_ON"* ]] || { trap 'sleep 0.3; exit 143' USR1 TERM
  echo $$ > "$LOG.new"; mv "$LOG.new" "$LOG.working"
  for ((i = 0; i < 1000; i++)); do sleep 0.05; done; }
[[ $* != *"$FAILS_ON"* ]] || exit 1
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
  show) echo "   PreemptEligibleTime=2030-01-01T00:00:00 PreemptTime=$PREEMPTED" ;;
  *) echo "scontrol $*" >> "$LOG" ;;
esac
"""


def start(folder, stderr=None, **environment):
    """Starts the batch script as Slurm would, with programs that write down what is asked."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    defaults = {"WORKS_ON": "nothing", "FAILS_ON": "nothing", "LOG": str(folder / "log")}
    defaults["PREEMPTED"] = "None"
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_SUBMIT_DIR": str(folder)}
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    every = {**os.environ, **path, **defaults, **slurm, **environment}
    every.pop("PYTHON", None)  # it would choose another one than the default
    # In a group of its own, to which Slurm sends its signals as a whole.
    return subprocess.Popen(
        ["bash", SBATCH], env=every, stderr=stderr, text=True, start_new_session=True
    )


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


def test_an_example_s_scripts(tmp_path):
    batch = start(tmp_path, SCRIPTS="examples/megatron")
    started = [REPOSITORY / line.split()[2] for line in asked(batch, tmp_path, 0)]
    assert started == [REPOSITORY / "examples" / "megatron" / script for script in SCRIPTS]
    assert all(script.is_file() for script in started)


def test_options_are_read_as_a_shell_reads_them(tmp_path):
    """So the tasks of an array can have seeds and folders of their own."""
    options = '--output-dir "two words/seed-$SLURM_ARRAY_TASK_ID"'
    seed = "--seed $SLURM_ARRAY_TASK_ID"
    batch = start(tmp_path, OPTIONS=options, PRETRAIN_OPTIONS=seed, SLURM_ARRAY_TASK_ID="3")
    first, *_ = asked(batch, tmp_path, 0)
    assert first.endswith("--tensor-parallel 2 --output-dir two words/seed-3 --seed 3")


def working(batch, folder):
    """Waits until the batch script's step works."""
    while not (folder / "log.working").exists():
        assert batch.poll() is None
        time.sleep(0.02)


def test_a_task_of_an_array_requeues_itself_alone(tmp_path):
    """Also if only one stage's own options name the folder in which it saves."""
    array = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "2"}
    options = {"PRETRAIN_OPTIONS": '--output-dir "two words/$SLURM_ARRAY_TASK_ID"'}
    batch = start(tmp_path, subprocess.PIPE, WORKS_ON="model_pretrain.py", **array, **options)
    working(batch, tmp_path)
    (tmp_path / "two words/2/pretrain/checkpoints/step=000007").mkdir(parents=True)
    batch.send_signal(signal.SIGUSR1)
    assert asked(batch, tmp_path, 143)[1:] == ["scontrol requeue 4711_2"]
    assert "requeueing job 4711_2." in batch.stderr.read()


@pytest.mark.parametrize(
    ("ends_by", "preempted", "saves", "told"),
    [
        # Before the time limit, Slurm signals the batch script alone.
        ("the limit", "None", True, "Stopped before the time limit; requeueing job 4711."),
        ("the limit", "None", False, "Job 4711 is not requeued: give it more --time."),
        ("scancel", "None", True, ""),
        # With a grace time, Slurm signals the steps, but not the batch script.
        ("its step", "2030-01-01T00:00:00", False, "Stopped for a job of a higher priority;"),
    ],
)
def test_only_a_time_limit_after_progress_and_a_preemption_requeue(
    tmp_path, ends_by, preempted, saves, told
):
    """In each case, the script waits until its step has saved."""
    (tmp_path / "runs/pretrain/checkpoints/step=000250").mkdir(parents=True)
    batch = start(tmp_path, subprocess.PIPE, WORKS_ON="model_finetune.py", PREEMPTED=preempted)
    working(batch, tmp_path)
    if saves:
        (tmp_path / "runs/finetune/checkpoints/step=000007").mkdir(parents=True)
    if ends_by == "the limit":
        batch.send_signal(signal.SIGUSR1)
    elif ends_by == "scancel":
        os.killpg(batch.pid, signal.SIGTERM)
    else:
        os.kill(int((tmp_path / "log.working").read_text()), signal.SIGTERM)
    lines = asked(batch, tmp_path, 143)
    assert ("scontrol requeue 4711" in lines) == ("requeueing" in (err := batch.stderr.read())), err
    assert told in err
    assert ("Stopped" in err) == bool(told)
    assert [line.split()[2] for line in lines[:2]] == SCRIPTS[:2]


def test_a_failing_step_ends_the_job_with_its_status(tmp_path):
    batch = start(tmp_path, FAILS_ON="model_finetune.py")
    assert [line.split()[2] for line in asked(batch, tmp_path, 1)] == SCRIPTS[:2]
