"""What surrounds the scripts: a half set job, damaged variables, limits of Python and the system.

Each is refused as bad input is, or does no harm. What single variables may be is in
tests/megakit/job/test_cluster.py; these processes show that the scripts ask.
"""

import json
import os
import resource
import subprocess
import sys
from typing import Any

import pytest

from megakit.job.plan import PLAN_VARIABLE
from tests.refusals import FINETUNE_PY, PREDICT_PY, PRETRAIN_PY, SCRIPTS, Refusals
from tests.scripts import REPOSITORY, environment, run_script

HUGE = str(10**30)


class TestJob:
    @pytest.mark.parametrize("rank", ["0", "1"])
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_half_set(self, refused, script, rank):
        """Rank 0 trained alone without a word, and rank 1 ended with a traceback."""
        (problem,) = refused.problems(script, RANK=rank, WORLD_SIZE="2")
        assert problem.startswith(f"RANK={rank} WORLD_SIZE=2: torchrun also sets ")

    def test_together_with_the_options(self, refused):
        first, second, third = refused.problems(
            *(PRETRAIN_PY, "--lr", "nan"),
            **{"SLURM_PROCID": "", "SLURM_NNODES": "0", "SLURM_JOB_NAME": "train"},
        )
        assert first.startswith("SLURM_NNODES=0: ")
        assert second.startswith("SLURM_PROCID='': ")
        assert third.startswith("--lr nan: ")

    @pytest.mark.parametrize("plan", ["{", json.dumps({"launcher": 1, "plan": "{}"})])
    def test_a_plan_that_no_launcher_of_this_process_made(self, refused, plan):
        problem = refused.problem(PRETRAIN_PY, **{PLAN_VARIABLE: plan})
        assert problem.startswith(f"the environment variable {PLAN_VARIABLE}: cannot be read (")
        assert problem.endswith(f"Unset {PLAN_VARIABLE}.")


class TestOptions:
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_everything_beyond_all_sense(self, refused, script):
        """No check may hang or fail of such numbers."""
        names = ["devices", "num-nodes", "tensor-parallel", "pipeline-parallel"]
        names += ["micro-batch-size", "num-workers", "timeout"]
        if script != PREDICT_PY:
            names += ["max-steps", "global-batch-size", "val-interval", "save-interval", "seed"]
        given = [part for name in names for part in (f"--{name}", HUGE)]
        problems = refused.problems(script, *given, "--output-dir", refused.folder / "a\nb")
        for name in names:
            rule = f"--{name} {HUGE}: has to be at most "
            assert len([text for text in problems if text.startswith(rule)]) == 1
        assert any("contains a control character" in problem for problem in problems)

    @pytest.mark.parametrize("script", SCRIPTS)
    def test_empty_paths(self, refused, script):
        """As a path, nothing is the current folder."""
        options = ["--output-dir", "--data-dir"]
        options += {FINETUNE_PY: ["--checkpoint"], PREDICT_PY: ["--checkpoint", "--input"]}.get(
            script, []
        )
        problems = refused.problems(script, *(part for name in options for part in (name, "")))
        assert [problem.split(" '': ")[0] for problem in problems] == options

    @pytest.mark.parametrize("script", SCRIPTS)
    def test_bytes_that_are_no_text(self, refused, script):
        problems = refused.problems(script, "--data-dir", os.fsdecode(b"\xff"))
        assert [problem.startswith("--data-dir \\udcff: is not valid") for problem in problems] == [
            True
        ]


class TestPython:
    def test_without_docstrings(self, refused):
        """NeMo does not import then."""
        problem = refused.problem(PRETRAIN_PY, PYTHONOPTIMIZE="2")
        assert problem.startswith("python -OO (PYTHONOPTIMIZE=2) removes docstrings")

    @pytest.mark.parametrize("script", [*SCRIPTS, "mnist/tutorial.py"])
    def test_safe_path(self, script):
        result = run_script(script, "--help", PYTHONSAFEPATH="1")
        assert result.status == 0, result.err

    # Where Python optimizes, it compiles all modules of the frameworks at each start.
    @pytest.mark.parametrize("optimize", ["", pytest.param("1", marks=pytest.mark.long)])
    def test_whatever_can_do_no_harm(self, tmp_path, optimize):
        """Everything that a surrounding program may set, all at once."""
        harmless: Any = {
            **{
                "PYTHONWARNINGS": "default, error",
                "PYTHONSAFEPATH": "1",
                "PYTHONOPTIMIZE": optimize,
            },
            **{"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONDEVMODE": "1"},
            **{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
            **{"HOME": "/proc/1/none", "TMPDIR": str(tmp_path / "none")},
            **{"MASTER_ADDR": "no-such-machine", "MASTER_PORT": "abc", "NODE_RANK": "x"},
            **{"RANK": "0", "WORLD_SIZE": "1", "SLURM_NTASKS": "", "SLURM_NNODES": "0"},
            **{"TORCHELASTIC_RUN_ID": "old", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "abc"},
            **{"SLURM_JOB_NAME": "bash", "SLURM_PROCID": "1"},
        }
        arguments = ("--dataset", "digits", "--accelerator", "cpu", "--max-steps", "2")
        result = run_script(PRETRAIN_PY, *arguments, "--output-dir", tmp_path / "runs", **harmless)
        assert result.status == 0, result.err
        assert "Traceback" not in result.err


class TestLimits:
    """Set with `ulimit`, by a user or a batch system."""

    def limited(self, refused, limit, value, *arguments):
        done = subprocess.run(
            [
                *(sys.executable, REPOSITORY / PRETRAIN_PY, "--output-dir", refused.runs),
                *("--dataset", "digits", "--accelerator", "cpu", *arguments),
            ],
            env=environment(PYTHONPATH=str(refused.traps)),
            preexec_fn=lambda: resource.setrlimit(limit, value),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not refused.runs.exists()
        return done

    @pytest.mark.parametrize(("workers", "needed"), [("0", 144), ("4", 208)])
    def test_open_files(self, refused, workers, needed):
        limit = (needed - 1, needed - 1)
        done = self.limited(refused, resource.RLIMIT_NOFILE, limit, "--num-workers", workers)
        assert done.returncode == 2
        assert done.stderr.startswith(f"{PRETRAIN_PY}: ulimit -n {needed - 1}: ")
        assert done.stderr.endswith(f"Raise the limit to at least {needed}.\n")

    def test_open_files_that_the_system_would_allow(self, tmp_path):
        """A low soft limit is raised."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        done = subprocess.run(
            [
                *(sys.executable, "-c"),
                "import resource; from megakit.runtime.interpreter import adapt_interpreter; "
                "adapt_interpreter(); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])",
            ],
            cwd=REPOSITORY,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (32, hard)),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert int(done.stdout) == hard

    def test_address_space(self, refused):
        size = 2_500_000 << 10
        done = self.limited(refused, resource.RLIMIT_AS, (size, size))
        assert done.returncode == 2
        assert done.stderr.startswith(f"{PRETRAIN_PY}: ulimit -v 2500000: ")
        assert len(done.stderr.splitlines()) == 1


class TestChecksThatFail:
    """Whatever a check raises is a message and status 2; --verbose shows where it comes from."""

    @pytest.fixture
    def failing(self, refused, tmp_path_factory):
        """Has every script's check of the data raise."""

        def fail(error):
            folder = tmp_path_factory.mktemp("hook")
            (folder / "sitecustomize.py").write_text(
                "from mnist import files as mnist_files\n"
                "def find_dataset(*args):\n"
                f"    raise {error}\n"
                "mnist_files.find_dataset = find_dataset\n"
            )
            return {"PYTHONPATH": f"{folder}:{REPOSITORY}:{refused.traps}", "light": False}

        return fail

    @pytest.mark.parametrize(
        "error",
        ["KeyError('x')", "MemoryError", "RecursionError", "OverflowError('too large')"],
    )
    def test_one_message_beside_the_others(self, refused: Refusals, failing, error):
        name = error.partition("(")[0]
        first, second = refused.problems(PRETRAIN_PY, "--lr", "0", **failing(error))
        assert first.startswith("--lr 0.0: ")
        assert second.startswith(f"the data: the check failed ({name}")
        assert second.endswith("--verbose shows where.")

    def test_verbose(self, failing, tmp_path):
        settings = failing("KeyError('x')")
        result = run_script(
            *(PRETRAIN_PY, "--verbose", "--output-dir", tmp_path / "none"),
            PYTHONPATH=settings["PYTHONPATH"],
        )
        assert result.status == 2
        assert "Traceback" in result.err
        assert "in find_dataset" in result.err
        assert not (tmp_path / "none").exists()

    def test_what_fails_before_the_checks(self, traps, tmp_path):
        """A rank that cannot import torch, which the ranks meet by."""
        job: Any = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train"}
        result = run_script(
            *(PRETRAIN_PY, "--output-dir", tmp_path / "none"), PYTHONPATH=str(traps), **job
        )
        assert result.status == 2
        (line,) = result.err.splitlines()
        assert line.startswith(f"{PRETRAIN_PY} (rank 0): the start: the check failed (ImportError")
