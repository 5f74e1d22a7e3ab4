"""Data, checkpoints and pictures that the scripts refuse: real processes that end with status 2.

None of them may load torch or NeMo, whose place folders of the same names take that leave a mark.
"""

import gzip

import numpy as np
import pytest

from megakit.job.run_lock import lock
from mnist.files import MNIST_SHA256
from model_finetune import FINETUNE
from model_pretrain import PRETRAIN
from tests.fabricate import make_checkpoint, make_run
from tests.refusals import FINETUNE_PY, PREDICT_PY, PRETRAIN_PY


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

    def test_a_run_instead_of_a_checkpoint(self, refused, pretrain_options):
        directory = make_run(PRETRAIN, pretrain_options, (10,))
        problem = refused.problem(FINETUNE_PY, "--checkpoint", directory.path)
        assert str(directory.path) in problem
        assert "checkpoints/step=" in problem

    @pytest.mark.parametrize(
        ("script", "found", "expected"),
        [(FINETUNE_PY, FINETUNE, PRETRAIN), (PREDICT_PY, PRETRAIN, FINETUNE)],
    )
    def test_one_of_another_model(self, refused, script, found, expected):
        checkpoint = make_checkpoint(refused.folder, 10, stage=found.name, model=found.model)
        problem = refused.problem(script, "--checkpoint", checkpoint)
        for part in (str(checkpoint), found.model, expected.model, expected.script):
            assert part in problem

    def test_prediction_starts_from_something(self, refused):
        problem = refused.problem(PREDICT_PY, "--checkpoint", "none")
        assert problem.startswith("--checkpoint none: prediction needs a trained classifier.")


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
            f"--input {folder / 'drawing.svg'}: cannot be read (neither PNG nor JPEG nor WEBP)"
        )
        assert second.startswith(
            f"--input {folder / 'empty.png'}: cannot be read (neither PNG nor JPEG nor WEBP)"
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
