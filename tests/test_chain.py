"""The chain as a user runs it, on the bundled digits; tests/test_readme.py runs it on MNIST."""

import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from mnist import files as mnist_files
from tests.left_behind import LOCK, curves, list_checkpoints, read_whole
from tests.once import Chain
from tests.scripts import accuracy, read_csv, read_json, run_script

#: Samples per step, number of steps, peak of the learning rate and steps until it.
TRAININGS = {"pretrain": (128, 500, 2e-3, 50), "finetune": (256, 1500, 6e-2, 450)}
training_stages = pytest.mark.parametrize("stage", TRAININGS)


def test_every_digit_is_predicted_once_in_order(chain: Chain):
    assert chain.result.out == f"{chain.runs}/predict/predictions.csv\n"
    rows = read_csv(chain.runs / "predict" / "predictions.csv")
    assert list(rows[0]) == ["idx", "label", "prediction", *(f"p{k}" for k in range(10))]
    assert [int(row["idx"]) for row in rows] == list(range(300))
    _, labels = mnist_files.read_digits("test")
    assert [int(row["label"]) for row in rows] == labels.tolist()
    shares = np.array([[float(row[f"p{k}"]) for k in range(10)] for row in rows])
    assert np.allclose(shares.sum(axis=1), 1, atol=1e-4)
    assert shares.argmax(axis=1).tolist() == [int(row["prediction"]) for row in rows]


def test_it_learned(chain: Chain):
    right = accuracy(chain.runs / "predict" / "predictions.csv")
    assert right >= 0.90
    assert read_json(chain.runs / "predict" / "summary.json")["accuracy"] == pytest.approx(right)
    images = mnist_files.read_digits("validation")[0] / 255
    error_of_the_mean_image = ((images - images.mean(axis=0)) ** 2).mean()
    pretrain = read_json(chain.runs / "pretrain" / "summary.json")
    assert pretrain["val_loss"]["last"] < 0.8 * error_of_the_mean_image


@training_stages
def test_summary_of_a_training(chain: Chain, stage: str):
    summary = read_json(chain.runs / stage / "summary.json")
    assert (summary["stage"], summary["dataset"], summary["seed"]) == (stage, "digits", 42)
    assert summary["parallel"] == {"tensor": 1, "pipeline": 1, "data": 1}
    assert summary["accelerator"] == "cpu"
    assert {"torch", "lightning", "nemo_toolkit", "megatron-core"} <= summary["versions"].keys()
    # A step includes its wait for a batch, but no validation and no save.
    times, speed = summary["times"], summary["steps_per_second"]
    stepping = summary["seconds"] - times["validation"] - times["checkpoints"]
    assert speed == pytest.approx(summary["steps"] / stepping)
    assert summary["samples_per_second"] == pytest.approx(TRAININGS[stage][0] * speed)
    assert stepping == pytest.approx(times["training"] + times["data"])


def test_the_console_tells_results_and_the_next_command_and_no_more(chain: Chain):
    text = chain.result.err
    for stage, next_verb in (("pretrain", "finetune"), ("finetune", "predict")):
        assert f"{stage}: digits on" in text
        summary = read_json(chain.runs / stage / "summary.json")
        table = text.partition(f"\n{stage} is done.\n")[2].partition("model_")[0]
        loss = f"{summary['val_loss']['last']:.4f}"
        command = f"./run {next_verb} --output-dir {chain.runs}"
        for part in (loss, summary["checkpoint"], "./run tensorboard --logdir", command):
            assert part in table
    assert f"Starting from {chain.runs}/pretrain/checkpoints/step=000500." in text
    assert re.search(r"accuracy +9\d\.\d\d%", text)
    assert not re.search(r"warn|nemo|deprecat|traceback|rank0|gloo", text, re.IGNORECASE)
    assert "NeMo" in (chain.runs / "pretrain" / "log.txt").read_text()


@training_stages
def test_metrics(chain: Chain, stage: str):
    batch_size, steps, peak, warm_up = TRAININGS[stage]
    rows = read_csv(chain.runs / stage / "metrics.csv")
    further = ["val_accuracy"] if stage == "finetune" else []
    assert list(rows[0]) == [
        *("step", "consumed_samples", "train_loss", "val_loss", "lr", "grad_norm"),
        *further,
    ]
    summary = read_json(chain.runs / stage / "summary.json")
    assert list(summary["metrics"] or ()) == further
    told = {**summary, **(summary["metrics"] or {})}
    for name in ("train_loss", "val_loss", *further):
        values = [float(row[name]) for row in rows if row[name]]
        assert told[name] == {"first": values[0], "last": values[-1]}
    numbers = [int(row["step"]) for row in rows]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == steps
    assert [int(row["consumed_samples"]) for row in rows] == [batch_size * n for n in numbers]
    validated = [int(row["step"]) for row in rows if row["val_loss"]]
    assert validated == list(range(250, steps + 1, 250))
    # The learning rate rises over a part of the steps, and falls by half a cosine.
    for row, step in zip(rows, numbers, strict=True):
        fall = (1 + math.cos(math.pi * (step - 1 - warm_up) / (steps - warm_up))) / 2
        factor = step / (warm_up + 1) if step <= warm_up else fall
        assert float(row["lr"]) == pytest.approx(peak * factor, rel=1e-3)


@training_stages
def test_best_and_last_checkpoint_are_kept_whole(chain: Chain, stage: str):
    summary = read_json(chain.runs / stage / "summary.json")
    folder = chain.runs / stage / "checkpoints"
    best, last = Path(summary["checkpoint"]), Path(summary["last_checkpoint"])
    assert set(folder.iterdir()) == {best, last}
    assert last == list_checkpoints(folder)[-1]
    rows = read_csv(chain.runs / stage / "metrics.csv")
    manifest = read_whole(best)
    lowest = min(float(row["val_loss"]) for row in rows if row["val_loss"])
    assert manifest["val_loss"] == pytest.approx(lowest)
    parts = {name.split("/")[0] for name in manifest["files"]}
    assert parts == {"weights", "context", "metrics.csv"}


@training_stages
def test_tensorboard_has_the_values_of_metrics_csv(chain: Chain, stage: str):
    rows = read_csv(chain.runs / stage / "metrics.csv")
    found = curves(chain.runs / stage / "tensorboard")
    for column in ("train_loss", "lr", "val_loss"):
        points = {int(row["step"]): float(row[column]) for row in rows if row[column]}
        assert dict(found[f"{stage}/{column}"]) == pytest.approx(points)
    pictures = {
        name.rpartition("/")[2]: [step for step, _ in points]
        for name, points in found.items()
        if "_pictures/" in name
    }
    validated = [int(row["step"]) for row in rows if row["val_loss"]]
    every = {"reconstructions": validated}
    assert pictures == (every if stage == "pretrain" else {"mistakes": validated[-1:]})


def test_what_a_run_leaves_behind(chain: Chain):
    training = {".lock", "checkpoints", "log.txt", "metrics.csv", "run.json", "summary.json"}
    figures = {"confusion_matrix.png", "latent_space.png", "mistakes.png", "report.html"}
    expected = {
        **dict.fromkeys(("pretrain", "finetune"), training | {"tensorboard"}),
        "predict": figures | {".lock", "log.txt", "predictions.csv", "summary.json"},
    }
    found = {path.name: {file.name for file in path.iterdir()} for path in chain.runs.iterdir()}
    assert found == expected


def test_a_second_start(chain: Chain, tmp_path: Path):
    """A training says that it is done, and a prediction replaces its file."""
    runs = Path(shutil.copytree(chain.runs, tmp_path / "runs"))
    files = [path for path in runs.rglob("*") if path.name != LOCK]
    before = {path: path.stat().st_mtime_ns for path in files}
    for stage in TRAININGS:
        again = run_script(f"model_{stage}.py", "--output-dir", runs)
        assert (again.status, "done" in again.err) == (0, True), again.err
        best = Path(read_json(runs / stage / "summary.json")["checkpoint"])
        assert again.out == f"{runs / best.relative_to(chain.runs)}\n"
    assert {path: path.stat().st_mtime_ns for path in files} == before

    path = runs / "predict" / "predictions.csv"
    expected = path.read_bytes()
    run_script("model_predict.py", "--output-dir", runs, "--micro-batch-size", 77).output()
    assert path.read_bytes() == expected
    assert path.stat().st_mtime_ns > before[path]
