"""The chain as a user runs it, on the bundled digits; tests/test_readme.py runs it on MNIST."""

import math
import re
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from mnist import files as mnist_files
from tests.left_behind import LOCK, curves, hyperparameters, list_checkpoints, read_whole
from tests.once import Chain
from tests.scripts import accuracy, read_csv, read_json, run_script

#: Samples per step of each stage.
BATCH_SIZES = {"pretrain": 128, "finetune": 256}
#: Peak of the learning rate and steps until it.
SCHEDULES = {"pretrain": (2e-3, 50), "finetune": (6e-2, 450)}
FIGURES = {"confusion_matrix.png", "latent_space.png", "mistakes.png"}
SUMMARY_FIELDS = {
    *("stage", "dataset", "accelerator", "device", "precision", "parallel", "seed", "steps"),
    *("seconds", "steps_per_second", "samples_per_second", "times", "train_loss", "val_loss"),
    *("metrics", "checkpoint", "last_checkpoint", "changes", "versions"),
    *("num_samples", "accuracy", "cross_entropy", "per_class_accuracy"),
}


@pytest.fixture(scope="module")
def copied(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the runs, for predictions to write into."""
    return Path(shutil.copytree(chain.runs, tmp_path_factory.mktemp("copied") / "runs"))


def probabilities(rows: list[dict[str, str]]) -> np.ndarray:
    return np.array([[float(row[f"p{k}"]) for k in range(10)] for row in rows])


def test_one_line_on_standard_output(chain: Chain):
    assert chain.result.out == f"{chain.runs}/predict/predictions.csv\n"


def test_every_digit_is_predicted_once_in_order(chain: Chain):
    rows = read_csv(chain.runs / "predict" / "predictions.csv")
    assert list(rows[0]) == ["idx", "label", "prediction", *(f"p{k}" for k in range(10))]
    assert [int(row["idx"]) for row in rows] == list(range(300))
    _, labels = mnist_files.read_digits("test")
    assert [int(row["label"]) for row in rows] == labels.tolist()
    shares = probabilities(rows)
    assert np.allclose(shares.sum(axis=1), 1, atol=1e-4)
    assert shares.argmax(axis=1).tolist() == [int(row["prediction"]) for row in rows]


def test_it_learned(chain: Chain):
    assert accuracy(chain.runs / "predict" / "predictions.csv") >= 0.90
    images = mnist_files.read_digits("validation")[0] / 255
    error_of_the_mean_image = ((images - images.mean(axis=0)) ** 2).mean()
    pretrain = read_json(chain.runs / "pretrain" / "summary.json")
    assert pretrain["val_loss"]["last"] < 0.8 * error_of_the_mean_image


@pytest.mark.parametrize("stage", ["pretrain", "finetune", "predict"])
def test_summary(chain: Chain, stage: str):
    summary = read_json(chain.runs / stage / "summary.json")
    assert summary.keys() == SUMMARY_FIELDS
    assert (summary["stage"], summary["dataset"]) == (stage, "digits")
    assert summary["parallel"] == {"tensor": 1, "pipeline": 1, "data": 1}
    assert (summary["accelerator"], summary["seed"]) == ("cpu", None if stage == "predict" else 42)
    assert summary["device"] in chain.result.err
    assert {"torch", "lightning", "nemo_toolkit", "megatron-core"} <= summary["versions"].keys()
    only_training = ("seed", "steps", "steps_per_second", "times", "train_loss", "val_loss")
    only_prediction = ("num_samples", "accuracy", "cross_entropy", "per_class_accuracy")
    predicts = stage == "predict"
    assert {summary[name] for name in (only_training if predicts else only_prediction)} == {None}
    present = only_prediction if predicts else only_training
    assert None not in [summary[name] for name in present]
    assert Path(summary["checkpoint"]).is_dir()


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_times_and_speeds_of_training(chain: Chain, stage: str):
    summary = read_json(chain.runs / stage / "summary.json")
    times = summary["times"]
    # A step includes its wait for a batch, but no validation and no save.
    stepping = summary["seconds"] - times["validation"] - times["checkpoints"]
    assert summary["steps_per_second"] == pytest.approx(summary["steps"] / stepping)
    assert summary["samples_per_second"] == pytest.approx(
        BATCH_SIZES[stage] * summary["steps_per_second"]
    )
    assert times["training"] < stepping < times["training"] + times["data"]
    assert min(times.values()) > 0

    rows = console_table(chain, f"{stage} is done.")
    assert rows["speed"] == f"{summary['steps_per_second']:.0f} steps/s"
    total, parts = rows["time"].split(" s: ")
    assert float(total) == pytest.approx(sum(times.values()), abs=0.06)
    assert float(total) < chain.result.seconds
    assert parts == ", ".join(
        f"{name.replace('_', '-')} {seconds:.1f}" for name, seconds in times.items()
    )


@pytest.mark.parametrize(
    ("stage", "next_verb", "columns"),
    [
        ("pretrain", "finetune", ["val_loss", "train_loss"]),
        ("finetune", "predict", ["val_loss", "val_accuracy", "train_loss"]),
    ],
)
def test_the_console_tells_results_and_the_next_command(
    chain: Chain, stage: str, next_verb: str, columns: list[str]
):
    summary = read_json(chain.runs / stage / "summary.json")
    rows = console_table(chain, f"{stage} is done.")
    words = {"val": "validation", "train": "training"}
    last = (summary["metrics"] or {}) | summary
    expected = {
        " ".join([words[part], name]): f"{last[f'{part}_{name}']['last']:.4f}"
        for part, _, name in (column.partition("_") for column in columns)
    }
    assert list(rows.items())[: len(columns)] == list(expected.items())
    assert rows["best checkpoint"] == summary["checkpoint"]
    assert rows["curves"] == f"./run tensorboard --logdir {chain.runs}"
    assert rows["next"] == f"./run {next_verb} --output-dir {chain.runs}"


def console_table(chain: Chain, heading: str) -> dict[str, str]:
    """The table after a line, by name; a value of several lines is joined."""
    _, _, after = chain.result.err.partition(f"\n{heading}\n")
    rows: dict[str, str] = {}
    for line in after.splitlines():
        if not line.startswith("  "):
            break
        name, _, value = line.strip().partition("  ")
        if line.startswith("   "):
            rows[next(reversed(rows))] += f" {line.strip()}"
        else:
            rows[name] = value.strip()
    return rows


def test_summary_agrees_with_predictions(chain: Chain):
    summary = read_json(chain.runs / "predict" / "summary.json")
    assert summary["num_samples"] == 300
    assert summary["seconds"] * summary["samples_per_second"] == pytest.approx(300)
    assert summary["seconds"] < chain.result.seconds
    assert summary["accuracy"] == pytest.approx(
        accuracy(chain.runs / "predict" / "predictions.csv")
    )


@pytest.mark.parametrize(("stage", "steps"), [("pretrain", 500), ("finetune", 1500)])
def test_metrics(chain: Chain, stage: str, steps: int):
    rows = read_csv(chain.runs / stage / "metrics.csv")
    further = ["val_accuracy"] if stage == "finetune" else []
    assert list(rows[0]) == [
        *("step", "consumed_samples", "train_loss", "val_loss", "lr", "grad_norm"),
        *further,
    ]
    summary = read_json(chain.runs / stage / "summary.json")
    assert list(summary["metrics"] or ()) == further
    for name in ("train_loss", "val_loss", *further):
        values = [float(row[name]) for row in rows if row[name]]
        told = summary["metrics"][name] if name in further else summary[name]
        assert told == {"first": values[0], "last": values[-1]}
        if name not in further:
            continue
        # Shares of the 200 digits, each counted once.
        assert all(abs(200 * value - round(200 * value)) < 1e-3 for value in values)
        assert values[-1] > 0.9
    numbers = [int(row["step"]) for row in rows]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == steps
    assert all(
        int(row["consumed_samples"]) == BATCH_SIZES[stage] * int(row["step"]) for row in rows
    )
    validated = [int(row["step"]) for row in rows if row["val_loss"]]
    assert validated == list(range(250, steps + 1, 250))
    # It rises over a part of the steps, and falls by half a cosine.
    peak, warm_up = SCHEDULES[stage]
    for row in rows:
        step = int(row["step"])
        fall = (1 + math.cos(math.pi * (step - 1 - warm_up) / (steps - warm_up))) / 2
        factor = step / (warm_up + 1) if step <= warm_up else fall
        assert float(row["lr"]) == pytest.approx(peak * factor, rel=1e-4)


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_best_and_last_checkpoint_are_kept_whole(chain: Chain, stage: str):
    summary = read_json(chain.runs / stage / "summary.json")
    folder = chain.runs / stage / "checkpoints"
    best, last = Path(summary["checkpoint"]), Path(summary["last_checkpoint"])
    assert set(folder.iterdir()) == {best, last}
    assert last == list_checkpoints(folder)[-1]
    losses = [
        float(row["val_loss"])
        for row in read_csv(chain.runs / stage / "metrics.csv")
        if row["val_loss"]
    ]
    manifest = read_whole(best)
    assert manifest["val_loss"] == pytest.approx(min(losses))
    assert (manifest["stage"], manifest["dataset"]) == (stage, "digits")
    parts = {name.split("/")[0] for name in manifest["files"]}
    assert parts == {"weights", "context", "metrics.csv"}


@pytest.mark.parametrize(("stage", "lr"), [("pretrain", 0.002), ("finetune", 0.06)])
def test_tensorboard_has_the_values_of_metrics_csv_and_the_settings(
    chain: Chain, stage: str, lr: float
):
    folder = chain.runs / stage / "tensorboard"
    rows, found = read_csv(chain.runs / stage / "metrics.csv"), curves(folder)
    columns = {"train/loss": "train_loss", "train/lr": "lr", "validation/loss": "val_loss"}
    for name, column in columns.items():
        part, _, name = name.partition("/")
        points = {int(row["step"]): float(row[column]) for row in rows if row[column]}
        assert dict(found[f"{part}/{stage}/{name}"]) == pytest.approx(points)
    settings = hyperparameters(folder)
    expected = {"stage": stage, "dataset": "digits", "lr": lr, "seed": 42, "data_parallel": 1}
    expected |= dict.fromkeys(("global_batch_size", "micro_batch_size"), BATCH_SIZES[stage])
    assert expected.items() <= settings.items()


def test_console_says_what_a_person_wants_and_no_more(chain: Chain):
    text = chain.result.err
    for wanted in (
        "pretrain: digits on",
        "finetune: digits on",
        "predict: digits on",
    ):
        assert wanted in text
    # Which of the two depends on the processor: tests/test_precision.py.
    assert re.search(r", (bf16-mixed|32 \(this CPU only emulates bfloat16\))$", text, re.MULTILINE)
    assert re.search(r"500/500  loss 0\.\d+  validation 0\.\d+", text)
    assert re.search(r"accuracy +9\d\.\d\d%", text)
    assert str(chain.runs / "finetune" / "checkpoints") in text
    assert not re.search(r"warn|nemo|deprecat|traceback|rank0|gloo", text, re.IGNORECASE)
    assert "NeMo" in (chain.runs / "pretrain" / "log.txt").read_text()


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_a_second_start_says_that_it_is_done(chain: Chain, copied: Path, stage: str):
    def times() -> dict[Path, int]:
        """Of all files but the lock, which names its last holder."""
        files = [path for path in (copied / stage).rglob("*") if path.name != LOCK]
        return {path: path.stat().st_mtime_ns for path in files}

    before = times()
    again = run_script(f"model_{stage}.py", "--output-dir", copied)
    assert again.status == 0
    assert "done" in again.err
    best = Path(read_json(copied / stage / "summary.json")["checkpoint"])
    assert again.out == f"{copied / best.relative_to(chain.runs)}\n"
    assert again.seconds < 30
    assert times() == before


def test_what_a_run_leaves_behind(chain: Chain):
    training = {".lock", "checkpoints", "log.txt", "metrics.csv", "run.json", "summary.json"}
    figures = {*FIGURES, "report.html"}
    expected = {
        **dict.fromkeys(("pretrain", "finetune"), training | {"tensorboard"}),
        "predict": figures | {".lock", "log.txt", "predictions.csv", "summary.json"},
    }
    found = {path.name: {file.name for file in path.iterdir()} for path in chain.runs.iterdir()}
    assert found == expected


def test_fine_tuning_starts_from_the_best_of_pretraining(
    chain: Chain, tmp_path: Path, components: ModuleType
):
    """With a rate that changes nothing; with few labels the last checkpoint counts."""
    from megakit.models import load_for_inference

    shutil.copytree(chain.runs / "pretrain", tmp_path / "pretrain")
    still = ("--lr", 1e-12, "--max-steps", 2, "--val-interval", 1, "--save-interval", 1)
    options = ("--num-labels", 100, "--precision", 32, "--output-dir", tmp_path)
    run_script("model_finetune.py", *still, *options).output()
    summary = read_json(tmp_path / "finetune" / "summary.json")
    assert summary["checkpoint"] == summary["last_checkpoint"]
    assert summary["checkpoint"].endswith("/step=000002")
    best = Path(read_json(chain.runs / "pretrain" / "summary.json")["checkpoint"])
    pretrained = load_for_inference(best, components.PretrainConfig()).state_dict()
    finetuned = load_for_inference(summary["checkpoint"]).state_dict()
    trunk = [name for name in pretrained if name.startswith(("linear1.", "linear2."))]
    assert len(trunk) == 4
    for name in trunk:
        assert np.allclose(finetuned[name], pretrained[name], rtol=0, atol=1e-6), name


def test_predictions_are_those_of_the_best_classifier(chain: Chain, components: ModuleType):
    import torch

    from megakit.models import load_for_inference

    model = load_for_inference(read_json(chain.runs / "finetune" / "summary.json")["checkpoint"])
    images = torch.from_numpy(mnist_files.read_digits("test")[0]).float().div(255).unsqueeze(1)
    expected = model(images).softmax(dim=1).numpy()
    rows = read_csv(chain.runs / "predict" / "predictions.csv")
    found = probabilities(rows)
    assert np.abs(found - expected).mean() < 0.005  # the scripts may compute in bfloat16
    assert (found.argmax(1) == expected.argmax(1)).mean() > 0.98


def test_predicting_again_replaces_the_file(copied: Path):
    path = copied / "predict" / "predictions.csv"
    before, written = path.read_bytes(), path.stat().st_mtime_ns
    again = run_script("model_predict.py", "--output-dir", copied, "--micro-batch-size", 77)
    assert again.status == 0
    assert path.read_bytes() == before
    assert path.stat().st_mtime_ns > written


def test_a_folder_of_photos(copied: Path, tmp_path: Path):
    """Blank photos and other files are skipped; at most 20 answers are printed.

    No figure of an earlier prediction stays: without labels, a prediction draws none.
    """
    images = mnist_files.read_digits("test")[0][:23]
    light = np.linspace(1, 0.6, 280)
    for number, image in enumerate(images):
        photo = (230 - 0.7 * image.repeat(10, 0).repeat(10, 1)) * light
        suffix = (".jpg", ".png", ".webp")[number % 3]
        Image.fromarray(photo.astype(np.uint8)).save(tmp_path / f"{number:02}{suffix}")
    Image.new("L", (200, 200), 230).save(tmp_path / "blank.png")
    (tmp_path / "list.txt").write_text("of the photos")
    folder = copied / "predict-input"
    folder.mkdir()
    for name in (*FIGURES, "report.html"):
        (folder / name).write_text("of an earlier prediction")
    (folder / "notes.txt").write_text("of the user")
    result = run_script("model_predict.py", "--input", tmp_path, "--output-dir", copied)
    assert result.status == 0, result.err
    rows = read_csv(folder / "predictions.csv")
    assert [row["source"][:2] for row in rows] == [f"{number:02}" for number in range(23)]
    for said in (
        "23 of 23 pictures: uneven light and noise of the paper removed.",
        "Skipped 1 of 25 files, which contain no ink: blank.png.",
        "Skipped 1 of 25 files, which cannot be read: list.txt.",
        "and          3 more in predictions.csv",
        "trained on digits",
    ):
        assert said in result.err
    answers = [f"{row['source']:11}  {row['prediction']}, probability" for row in rows]
    assert [answer in result.err for answer in answers] == [True] * 20 + [False] * 3
    drawn = Image.open(folder / "inputs.png")
    assert drawn.height > 4 * 140 > drawn.height / 2
    assert {path.name for path in folder.iterdir()} == {
        *("predictions.csv", "summary.json", "log.txt", LOCK, "notes.txt", "inputs.png")
    }


@pytest.mark.long
def test_pictures_get_what_the_same_images_get(chain: Chain, tmp_path: Path):
    """And the figures of the test set are the same under a pipeline, whose second stage gets
    latents from the first.
    """
    common = ("--output-dir", shutil.copytree(chain.runs, tmp_path / "runs"), "--precision", 32)
    run_script("model_predict.py", *common).output()
    folder = tmp_path / "runs" / "predict"
    plain = read_csv(folder / "predictions.csv")
    drawn = {name: (folder / name).read_bytes() for name in FIGURES}
    run_script("model_predict.py", *common, "--devices", 2, "--pipeline-parallel", 2).output()
    assert drawn == {name: (folder / name).read_bytes() for name in FIGURES}

    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number, image in enumerate(mnist_files.read_digits("test")[0]):
        Image.fromarray(image).save(pictures / f'{number:03}, "scan".png')
    layout = ("--devices", 2, "--micro-batch-size", 7)
    run_script("model_predict.py", *common, *layout, "--input", pictures).output()
    folder = tmp_path / "runs" / "predict-input"
    own = read_csv(folder / "predictions.csv")
    assert list(own[0]) == ["idx", "source", *list(plain[0])[1:]]
    assert [row["source"] for row in own] == sorted(path.name for path in pictures.iterdir())
    assert {row["label"] for row in own} == {""}
    assert [row["prediction"] for row in own] == [row["prediction"] for row in plain]
    assert np.allclose(probabilities(own), probabilities(plain), atol=1e-5)
    summary = read_json(folder / "summary.json")
    assert summary["num_samples"] == 300
    assert {summary[name] for name in ("accuracy", "cross_entropy", "per_class_accuracy")} == {None}
    assert summary["dataset"].startswith(f"{pictures} (sha256 ")
