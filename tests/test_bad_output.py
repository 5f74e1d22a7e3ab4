"""Output folders and runs that the scripts refuse: real processes that end with status 2.

None of them may load torch or NeMo, whose place folders of the same names take that leave a mark.
"""

import json
import os
import re

import pytest

from megakit.job.run_lock import lock
from megakit.job.runs import RUN_FILE
from model_finetune import FINETUNE
from model_pretrain import PRETRAIN
from tests.fabricate import LAST, make_checkpoint, make_run
from tests.refusals import FINETUNE_PY, OPTIONS, PREDICT_PY, PRETRAIN_PY, SCRIPTS
from tests.scripts import run_script


class TestOutput:
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_a_file_in_the_folder_s_place(self, refused, script):
        before = FINETUNE if script == PREDICT_PY else PRETRAIN
        checkpoint = make_checkpoint(refused.folder, 10, stage=before.name, model=before.model)
        refused.runs.write_text("")
        start = () if script == PRETRAIN_PY else ("--checkpoint", checkpoint)
        problem = refused.problem(script, *start)
        for part in (f"--output-dir {refused.runs}", "is a file"):
            assert part in problem


class TestAnotherRun:
    def test_every_option_that_differs_is_named_with_both_values(self, refused, pretrain_options):
        pretrain_options.precision = "bf16-mixed"  # on every CPU
        directory = make_run(PRETRAIN, pretrain_options, (10,), done=False)
        problem = refused.problem(
            *(PRETRAIN_PY, "--seed", 1, "--lr", 0.5, "--max-steps", 7, "--precision", 32),
            *("--global-batch-size", 64, "--corruption", 0.25, "--limit-val-batches", 3),
        )
        old = pretrain_options
        for part in (
            *(str(directory.path), "--fresh", f"--seed was {old.seed}, now 1"),
            *(f"--lr was {old.lr}, now 0.5", f"--max-steps was {old.max_steps}, now 7"),
            *(
                f"--precision was {old.precision}, now 32",
                f"--corruption was {old.corruption}, now 0.25",
            ),
            f"--global-batch-size was {old.global_batch_size}, now 64",
            "--limit-val-batches was None, now 3",
        ):
            assert part in problem

    def test_only_options_that_exist_are_named(self, refused, pretrain_options, finetune_options):
        """What follows from --num-labels, the choice of the best checkpoint, is no option."""
        make_run(PRETRAIN, pretrain_options, (10,))
        make_run(FINETUNE, finetune_options, (5,), done=False)
        problem = refused.problem(FINETUNE_PY, "--num-labels", 100)
        assert "--num-labels was None, now 100" in problem
        assert set(re.findall(r"--[\w-]+", problem)) <= OPTIONS[FINETUNE_PY]

    def test_a_fresh_trunk_is_another_run(self, refused, pretrain_options, finetune_options):
        make_run(PRETRAIN, pretrain_options, (10,))
        make_run(FINETUNE, finetune_options, (5,))
        problem = refused.problem(FINETUNE_PY, "--checkpoint", "none")
        for part in (str(refused.runs / "finetune"), "--checkpoint", "--fresh"):
            assert part in problem

    def test_nobody_knows_whose_it_is(self, refused, pretrain_options):
        """Without a checkpoint nothing else tells."""
        directory = make_run(PRETRAIN, pretrain_options, (), done=False)
        (directory.path / RUN_FILE).write_text("{")
        problem = refused.problem(PRETRAIN_PY)
        for part in (str(directory.path / RUN_FILE), "--fresh"):
            assert part in problem

    @pytest.mark.parametrize("script", SCRIPTS)
    def test_in_use(self, refused, pretrain_options, finetune_options, script):
        make_run(PRETRAIN, pretrain_options, (10,))
        make_run(FINETUNE, finetune_options, (5,))
        stage = script.removeprefix("model_").removesuffix(".py")
        with lock(refused.runs / stage).file:
            problem = refused.problem(script)
            for part in (
                str(refused.runs / stage),
                "in use",
                f"process {os.getpid()} ",
                "--output-dir",
            ):
                assert part in problem


def test_a_run_is_what_the_script_would_make(pretrain_options):
    """The runs made up for these tests go on: nothing but what they spoil is refused."""
    directory = make_run(PRETRAIN, pretrain_options, (10,))
    result = run_script(
        *(PRETRAIN_PY, "--output-dir", pretrain_options.output_dir),
        *("--dataset", "digits", "--accelerator", "cpu"),
    ).output()
    assert result == f"{directory.checkpoints / LAST}\n"
    assert json.loads((directory.path / RUN_FILE).read_text())["seed"] == 42
