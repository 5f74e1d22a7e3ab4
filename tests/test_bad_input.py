"""What the three scripts refuse, read as a user reads it: real processes that end with status 2.

None of them may load torch or NeMo, whose place folders of the same names take that leave a mark.
"""

import gzip
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakit.checkpoints.folders import MANIFEST, checkpoint_name
from megakit.job.run_lock import lock
from megakit.job.runs import RUN_FILE
from mnist.files import MNIST_SHA256
from model_finetune import FINETUNE, FinetuneOptions
from model_pretrain import PRETRAIN, PretrainOptions
from tests.fabricate import make_checkpoint, make_run
from tests.scripts import run_script

PRETRAIN_PY, FINETUNE_PY, PREDICT_PY = "model_pretrain.py", "model_finetune.py", "model_predict.py"
SCRIPTS = (PRETRAIN_PY, FINETUNE_PY, PREDICT_PY)
#: The checkpoint of a finished pretraining's last step, its best in the runs made up here.
LAST = checkpoint_name(PretrainOptions.max_steps)
HAS_GPU_DRIVER = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))

EVERYWHERE = {
    *("--help", "--data-dir", "--dataset", "--output-dir", "--precision", "--accelerator"),
    *("--devices", "--num-nodes", "--tensor-parallel", "--pipeline-parallel"),
    *("--micro-batch-size", "--num-workers", "--verbose", "--timeout"),
}
TRAINING = {
    *("--max-steps", "--global-batch-size", "--lr", "--seed", "--val-interval"),
    *("--save-interval", "--limit-val-batches", "--fresh", "--keep-changes"),
    *("--best-by", "--stop-after"),
}
SIZES = {"--hidden-size", "--latent-size"}
OPTIONS = {
    PRETRAIN_PY: EVERYWHERE | TRAINING | SIZES | {"--corruption"},
    FINETUNE_PY: EVERYWHERE | TRAINING | SIZES | {"--checkpoint", "--num-labels"},
    PREDICT_PY: EVERYWHERE | {"--checkpoint", "--input"},
}


@pytest.fixture
def pretrain_options(tmp_path):
    return PretrainOptions(output_dir=tmp_path / "runs", dataset="digits", accelerator="cpu")


@pytest.fixture
def finetune_options(tmp_path):
    return FinetuneOptions(output_dir=tmp_path / "runs", dataset="digits", accelerator="cpu")


def is_quick(run):
    """Whether a process takes less than half a second of the processor.

    A busy or slow machine stretches that time too: there, five times what Python and the parser
    of options take beside it. One quick run of three shows it.
    """
    parser = [sys.executable, "-P", "-c", "import tyro"]
    for _ in range(3):
        needed = processor_time(run)
        if needed < 0.5 or needed < 5 * processor_time(lambda: subprocess.run(parser, check=True)):
            return True
    return False


def processor_time(run):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_read_only(folder):
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write everywhere")


def spoil(checkpoint):
    (checkpoint / "weights" / "__0_0.distcp").write_bytes(b"spoilt")


def test_the_traps_work(traps, tmp_path):
    """A process that is not refused goes on to its work, loads a framework, and is caught."""
    given = ("--output-dir", tmp_path, "--dataset", "digits", "--accelerator", "cpu")
    assert run_script(PRETRAIN_PY, *given, PYTHONPATH=str(traps)).status == 1
    assert list(traps.glob("*.loaded"))


class TestHelp:
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_quick_and_complete(self, script, traps):
        given: Any = {"PYTHONPATH": str(traps), "COLUMNS": "80"}
        result = run_script(script, "--help", **given)
        assert (result.status, result.err) == (0, "")
        named = re.findall(r"^\W*(?:-h, )?(--[\w-]+)", result.out, re.MULTILINE)
        assert len(named) == len(set(named))
        assert set(named) == OPTIONS[script]
        assert list(traps.glob("*.loaded")) == []
        assert is_quick(lambda: run_script(script, "--help", **given))


class TestOptions:
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_unknown(self, refused, script):
        message = refused(script, "--warp", "9")
        assert "--warp" in message
        assert "--help" in message
        assert "Is it" not in message

    @pytest.mark.parametrize(
        ("meant", "written"),
        [
            ("--max-steps", "--max-step"),
            ("--micro-batch-size", "--microbatch-size"),
            ("--tensor-parallel", "--tensor_parallell"),
        ],
    )
    def test_misspelt(self, refused, meant, written):
        assert f"Is it {meant}?" in refused(PRETRAIN_PY, written, "2")

    @pytest.mark.parametrize(
        ("script", "option"),
        [
            *((PRETRAIN_PY, "--num-labels"), (PRETRAIN_PY, "--checkpoint")),
            *((FINETUNE_PY, "--corruption"), (PREDICT_PY, "--seed"), (PREDICT_PY, "--fresh")),
        ],
    )
    def test_of_another_script(self, refused, script, option):
        assert option in refused(script, option, "1")

    @pytest.mark.parametrize(
        ("option", "value", "rule"),
        [
            ("--precision", "16", "bf16-mixed.*32"),
            ("--max-steps", "many", "int|number"),
            ("--devices", "two", "int|number"),
        ],
    )
    def test_values_of_the_wrong_kind(self, refused, option, value, rule):
        message = refused(PRETRAIN_PY, option, value)
        for part in (option, value, rule):
            assert re.search(part, message, re.IGNORECASE)
        assert len(message.splitlines()) <= 10
        assert "<class" not in message

    def test_all_values_of_the_wrong_kind_together(self, refused):
        message = refused(PRETRAIN_PY, "--precision", "16", "--dataset", "cifar", "--warp", "9")
        for part in ("16", "cifar", "--warp"):
            assert part in message

    @pytest.mark.parametrize("script", SCRIPTS)
    def test_numbers_out_of_range_all_together(self, refused, script):
        wrong = {
            **dict.fromkeys(("--devices", "--num-nodes", "--tensor-parallel"), "0"),
            **dict.fromkeys(("--pipeline-parallel", "--micro-batch-size", "--timeout"), "0"),
            "--num-workers": "-1",
        }
        if script != PREDICT_PY:
            wrong |= dict.fromkeys(("--max-steps", "--global-batch-size", "--val-interval"), "0")
            wrong |= dict.fromkeys(("--save-interval", "--limit-val-batches"), "0")
            wrong |= {"--seed": "-1", "--lr": "-0.5"}
        if script == PRETRAIN_PY:
            wrong |= {"--corruption": "1.0"}
        if script == FINETUNE_PY:
            wrong |= {"--num-labels": "9", "--checkpoint": "none"}
        problems = refused.problems(script, *(part for pair in wrong.items() for part in pair))
        wrong.pop("--checkpoint", None)
        for option, value in wrong.items():
            (problem,) = (text for text in problems if text.startswith(f"{option} "))
            assert problem.startswith(f"{option} {value}: has to be ")
        others = [text for text in problems if text.split()[0] not in wrong]
        # prediction has nothing to start from either, and says so
        assert len(others) == (script == PREDICT_PY)

    def test_nothing_is_downloaded_for_a_command_that_is_refused_anyway(self, refused):
        """11 MB in the data folder are something written, too."""
        asked = []
        with socket.create_server(("127.0.0.1", 0)) as server:

            def answer():
                while True:
                    try:
                        connection, _ = server.accept()
                    except OSError:
                        return
                    with connection:
                        asked.append(connection.recv(1000))

            threading.Thread(target=answer, daemon=True).start()
            proxy = f"http://127.0.0.1:{server.getsockname()[1]}"
            refused(
                *(PRETRAIN_PY, "--lr", "-1", "--dataset", "auto"),
                **{"https_proxy": proxy, "HTTPS_PROXY": proxy},
            )
            server.shutdown(socket.SHUT_RDWR)
        assert asked == []


class TestLayouts:
    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (
                ("--devices", 6, "--tensor-parallel", 2, "--pipeline-parallel", 2),
                ["--tensor-parallel 2 x --pipeline-parallel 2 = 4", "6 x 1 = 6", "--devices 4"],
            ),
            (("--devices", 3, "--tensor-parallel", 3), ["--tensor-parallel 3", "width", "64"]),
            (("--devices", 4, "--pipeline-parallel", 4), ["--pipeline-parallel 4", "2 stages"]),
            (
                ("--devices", 4, "--global-batch-size", 30),
                ["--global-batch-size 30", "data-parallel ranks, 4", "32"],
            ),
            (
                ("--devices", 2, "--global-batch-size", 24, "--micro-batch-size", 5),
                ["--micro-batch-size 5 x 2", "= 10", "--global-batch-size 24", "Try 4"],
            ),
            (("--micro-batch-size", 100), ["--micro-batch-size 100", "256", "Try 64"]),
            (("--num-nodes", 2), ["--num-nodes 2", "torchrun", "srun"]),
        ],
        ids=lambda value: " ".join(map(str, value)),
    )
    def test_impossible(self, refused, arguments, parts):
        problem = refused.problem(PRETRAIN_PY, *arguments)
        for part in parts:
            assert part in problem

    @pytest.mark.parametrize("script", [FINETUNE_PY, PREDICT_PY])
    def test_the_other_scripts_check_as_well(
        self, refused, pretrain_options, finetune_options, script
    ):
        make_run(PRETRAIN, pretrain_options, (10,))
        make_run(FINETUNE, finetune_options, (5,))
        problem = refused.problem(script, "--devices", 4, "--pipeline-parallel", 4)
        assert "--pipeline-parallel 4" in problem

    @pytest.mark.parametrize(
        ("starter", "environment"),
        [
            (
                "torchrun",
                {
                    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
                    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
                },
            ),
            (
                "srun",
                {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"},
            ),
        ],
    )
    def test_options_that_contradict_the_starter(self, refused, starter, environment):
        problems = refused.problems(
            PRETRAIN_PY, "--devices", 2, "--num-nodes", 3, "--global-batch-size", 6, **environment
        )
        assert len(problems) == 2
        for problem, asked in zip(problems, ("--devices 2", "--num-nodes 3"), strict=True):
            for part in (asked, starter, "with 1"):
                assert part in problem


class TestAccelerator:
    @pytest.mark.skipif(HAS_GPU_DRIVER, reason="this machine has a GPU, or its driver at least")
    def test_no_gpu(self, refused):
        problem = refused.problem(PRETRAIN_PY, "--accelerator", "gpu")
        for part in ("--accelerator gpu", "no NVIDIA GPU", "--accelerator cpu"):
            assert part in problem


class TestData:
    def test_no_mnist(self, refused):
        problem = refused.problem(PRETRAIN_PY, "--dataset", "mnist")
        for part in (
            *("--dataset mnist", str(refused.data / "MNIST" / "raw"), *MNIST_SHA256),
            *("cannot be downloaded", "--data-dir", "--dataset digits"),
        ):
            assert part in problem

    def test_truncated_and_altered_and_missing_files_together(self, refused):
        raw = refused.data / "MNIST" / "raw"
        raw.mkdir(parents=True)
        images, labels, test_images, test_labels = MNIST_SHA256
        (raw / images).write_bytes(b"\0" * 1000)
        (raw / f"{labels}.gz").write_bytes(gzip.compress(b"\0" * 100)[:-7])
        (raw / test_labels).write_bytes(b"\0" * 10_008)
        problems = refused.problems(PRETRAIN_PY, "--dataset", "mnist")
        assert len(problems) == 4
        for name, parts in {
            images: ["1,000 bytes, expected 47,040,016"],
            f"{labels}.gz": ["cannot be read"],
            test_labels: ["sha256", MNIST_SHA256[test_labels]],
            test_images: ["missing"],
        }.items():
            (problem,) = (text for text in problems if text.startswith(f"{raw / name}: "))
            for part in (*parts, "ownload"):
                assert part in problem

    @pytest.mark.parametrize("dataset", ["auto", "mnist"])
    def test_damaged_mnist_is_not_replaced_by_digits(self, refused, dataset):
        raw = refused.data / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for name in MNIST_SHA256:
            (raw / name).write_bytes(b"")
        problems = refused.problems(PRETRAIN_PY, "--dataset", dataset)
        assert len(problems) == 4
        assert all("0 bytes, expected" in problem for problem in problems)

    def test_a_root_that_is_a_file(self, refused):
        refused.data.write_text("")
        problem = refused.problem(PRETRAIN_PY, "--dataset", "mnist")
        for part in (str(refused.data), "--data-dir"):
            assert part in problem


class TestStart:
    @pytest.mark.parametrize(
        ("script", "stage", "maker"),
        [(FINETUNE_PY, "pretrain", PRETRAIN_PY), (PREDICT_PY, "finetune", FINETUNE_PY)],
    )
    def test_no_checkpoint_of_the_stage_before(self, refused, script, stage, maker):
        problem = refused.problem(script)
        for part in (str(refused.runs / stage), "no checkpoint", maker, "--checkpoint"):
            assert part in problem

    @pytest.mark.parametrize("script", [FINETUNE_PY, PREDICT_PY])
    def test_nothing_else_is_said_where_no_dataset_is_named(self, refused, script):
        assert "no checkpoint" in refused.problem(script, "--dataset", "auto")

    @pytest.mark.parametrize("script", [FINETUNE_PY, PREDICT_PY])
    def test_a_named_one_that_is_not_there(self, refused, script):
        missing = refused.runs / "step=000001"
        problem = refused.problem(script, "--checkpoint", missing)
        assert str(missing) in problem
        assert "no such checkpoint" in problem

    def test_unfinished(self, refused):
        checkpoint = make_checkpoint(refused.folder, 10)
        (checkpoint / MANIFEST).unlink()
        problem = refused.problem(FINETUNE_PY, "--checkpoint", checkpoint)
        for part in (str(checkpoint), "not a complete checkpoint", MANIFEST):
            assert part in problem

    def test_a_run_instead_of_a_checkpoint(self, refused, pretrain_options):
        directory = make_run(PRETRAIN, pretrain_options, (10,))
        problem = refused.problem(FINETUNE_PY, "--checkpoint", directory.path)
        assert str(directory.path) in problem
        assert "checkpoints/step=" in problem

    @pytest.mark.parametrize("by_name", [True, False], ids=["named", "default"])
    def test_damaged(self, refused, pretrain_options, by_name):
        """An error both times, and never the one before without a word."""
        folder = make_run(PRETRAIN, pretrain_options, (10, 20)).checkpoints
        best = folder / LAST
        spoil(best)
        named = ("--checkpoint", best) if by_name else ()
        problem = refused.problem(FINETUNE_PY, *named)
        for part in (str(best), "damaged", "__0_0.distcp", "another checkpoint"):
            assert part in problem

    @pytest.mark.parametrize("content", ["", "{", '{"format_version": 2}'])
    def test_damaged_manifest(self, refused, pretrain_options, content):
        best = make_run(PRETRAIN, pretrain_options, (10,)).checkpoints / LAST
        (best / MANIFEST).write_text(content)
        problem = refused.problem(FINETUNE_PY)
        assert str(best / MANIFEST) in problem
        assert "cannot be read" in problem

    def test_a_classifier_is_said_to_be_one(self, refused):
        checkpoint = make_checkpoint(refused.folder, 10, stage=FINETUNE.name, model=FINETUNE.model)
        problem = refused.problem(FINETUNE_PY, "--checkpoint", checkpoint)
        for part in (str(checkpoint), "ExampleFineTuneModel", "PretrainModel", PRETRAIN_PY):
            assert part in problem

    def test_prediction_starts_from_something(self, refused):
        problem = refused.problem(PREDICT_PY, "--checkpoint", "none")
        assert problem.startswith("--checkpoint none: prediction needs a trained classifier.")

    def test_an_autoencoder_cannot_predict(self, refused):
        checkpoint = make_checkpoint(refused.folder, 10)
        problem = refused.problem(PREDICT_PY, "--checkpoint", checkpoint)
        for part in (str(checkpoint), "PretrainModel", "ExampleFineTuneModel", FINETUNE_PY):
            assert part in problem


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

    def test_below_a_file(self, refused):
        (refused.folder / "file").write_text("")
        below = refused.folder / "file" / "runs"
        problem = refused.problem(PRETRAIN_PY, "--output-dir", below)
        assert f"--output-dir {below}" in problem

    def test_a_file_in_the_stage_s_place(self, refused):
        refused.runs.mkdir()
        (refused.runs / "pretrain").write_text("")
        problem = refused.problem(PRETRAIN_PY)
        assert str(refused.runs / "pretrain") in problem

    def test_a_name_that_no_folder_can_have(self, refused):
        problem = refused.problem(PRETRAIN_PY, "--output-dir", refused.folder / ("x" * 300))
        assert "--output-dir" in problem

    def test_a_folder_without_permission(self, refused):
        make_read_only(refused.runs)
        problem = refused.problem(PRETRAIN_PY)
        for part in (f"--output-dir {refused.runs}", "cannot be written"):
            assert part in problem

    def test_a_stage_without_permission(self, refused):
        refused.runs.mkdir()
        make_read_only(refused.runs / "pretrain")
        assert str(refused.runs / "pretrain") in refused.problem(PRETRAIN_PY)


class TestAnotherRun:
    def test_every_option_that_differs_is_named_with_both_values(self, refused, pretrain_options):
        directory = make_run(PRETRAIN, pretrain_options, (10,), done=False)
        problem = refused.problem(
            *(PRETRAIN_PY, "--seed", 1, "--lr", 0.5, "--max-steps", 7, "--precision", 32),
            *("--global-batch-size", 128, "--corruption", 0.25, "--limit-val-batches", 3),
        )
        old = pretrain_options
        for part in (
            *(str(directory.path), "--fresh", f"--seed was {old.seed}, now 1"),
            *(f"--lr was {old.lr}, now 0.5", f"--max-steps was {old.max_steps}, now 7"),
            *(
                f"--precision was {old.precision}, now 32",
                f"--corruption was {old.corruption}, now 0.25",
            ),
            f"--global-batch-size was {old.global_batch_size}, now 128",
            "--limit-val-batches was None, now 3",
        ):
            assert part in problem

    def test_a_finished_one_too(self, refused, pretrain_options):
        make_run(PRETRAIN, pretrain_options, (10,))
        assert "--seed was 42, now 1" in refused.problem(PRETRAIN_PY, "--seed", 1)

    def test_only_options_that_exist_are_named(self, refused, pretrain_options, finetune_options):
        """What follows from --num-labels, the choice of the best checkpoint, is no option."""
        make_run(PRETRAIN, pretrain_options, (10,))
        make_run(FINETUNE, finetune_options, (5,), done=False)
        problem = refused.problem(FINETUNE_PY, "--num-labels", 100)
        assert "--num-labels was None, now 100" in problem
        assert set(re.findall(r"--[\w-]+", problem)) <= OPTIONS[FINETUNE_PY]

    def test_a_newer_result_of_the_stage_before(self, refused, pretrain_options, finetune_options):
        before = make_run(PRETRAIN, pretrain_options, (10,))
        make_run(FINETUNE, finetune_options, (5,))
        run = before.identity()
        newer = make_checkpoint(before.checkpoints, 20, val_loss=0.0001, run=run)
        problem = refused.problem(FINETUNE_PY)
        for part in (str(refused.runs / "finetune"), str(newer), "previous stage", "--fresh"):
            assert part in problem

    def test_a_fresh_trunk_is_another_run(self, refused, pretrain_options, finetune_options):
        make_run(PRETRAIN, pretrain_options, (10,))
        make_run(FINETUNE, finetune_options, (5,))
        problem = refused.problem(FINETUNE_PY, "--checkpoint", "none")
        for part in (str(refused.runs / "finetune"), "--checkpoint", "--fresh"):
            assert part in problem

    @pytest.mark.parametrize("content", ["", "{", "[]"])
    def test_nobody_knows_whose_it_is(self, refused, pretrain_options, content):
        """Without a checkpoint nothing else tells."""
        directory = make_run(PRETRAIN, pretrain_options, (), done=False)
        (directory.path / RUN_FILE).write_text(content)
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


class TestInput:
    def test_everything_wrong_with_pictures(self, refused, pretrain_options, finetune_options):
        make_run(PRETRAIN, pretrain_options, (10,))
        make_run(FINETUNE, finetune_options, (5,))
        folder = refused.folder / "scans"
        folder.mkdir()
        (folder / "drawing.svg").write_text("<svg/>")
        (folder / "empty.png").touch()
        first, second = refused.problems(PREDICT_PY, "--input", folder)
        assert first.startswith(
            f"--input {folder / 'drawing.svg'}: cannot be read (neither PNG nor JPEG)"
        )
        assert second.startswith(
            f"--input {folder / 'empty.png'}: cannot be read (neither PNG nor JPEG)"
        )

    def test_missing_and_whatever_else_is_wrong(self, refused):
        nowhere = refused.folder / "nowhere.png"
        problems = refused.problems(PREDICT_PY, "--input", nowhere, "--devices", "0")
        assert [problem.split()[0] for problem in problems] == [
            *("--devices", f"{refused.runs / 'finetune' / 'checkpoints'}:", "--input")
        ]
        assert str(nowhere) in problems[-1]

    def test_in_use(self, refused, pretrain_options, finetune_options):
        make_run(PRETRAIN, pretrain_options, (10,))
        make_run(FINETUNE, finetune_options, (5,))
        picture = refused.folder / "one.npy"
        np.save(picture, np.eye(28)[None])
        with lock(refused.runs / "predict-input").file:
            lines = refused(PREDICT_PY, "--input", picture).splitlines()
        assert lines[-1].startswith(f"{PREDICT_PY}: {refused.runs / 'predict-input'} is in use")


def test_problems_of_every_kind_are_told_together(refused, pretrain_options):
    folder = make_run(PRETRAIN, pretrain_options, (10,)).checkpoints
    spoil(folder / LAST)
    problems = refused.problems(
        *(FINETUNE_PY, "--num-labels", 3, "--lr", 0, "--devices", 4, "--pipeline-parallel", 4),
        *("--dataset", "mnist"),
    )
    text = "\n".join(problems)
    for part in ("--num-labels 3", "--lr 0.0", "--pipeline-parallel 4", "__0_0.distcp"):
        assert text.count(part) == 1, part


def test_a_refusal_takes_less_than_half_a_second(refused):
    assert is_quick(lambda: refused(FINETUNE_PY))


def test_a_run_is_what_the_script_would_make(pretrain_options):
    """The runs made up for these tests go on: nothing but what they spoil is refused."""
    directory = make_run(PRETRAIN, pretrain_options, (10,))
    result = run_script(
        *(PRETRAIN_PY, "--output-dir", pretrain_options.output_dir),
        *("--dataset", "digits", "--accelerator", "cpu"),
    )
    assert result.status == 0, result.err
    assert result.out == f"{directory.checkpoints / LAST}\n"
    assert json.loads((directory.path / RUN_FILE).read_text())["seed"] == 42
