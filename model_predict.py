"""Stage 3: run the classifier on every test image, each exactly once, or on pictures of yours."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

if sys.flags.safe_path:  # Python then leaves out the folder that the script lies in
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from megakit.errors import UserError
from megakit.job.options import CommonOptions
from megakit.job.script import Run, run_script
from megakit.job.stage import Stage
from mnist.files import DataOptions
from mnist.own_pictures import Pictures, read_pictures
from model_finetune import FINETUNE

PREDICT = Stage(
    name="predict",
    script="model_predict.py",
    model="ExampleFineTuneModel",
    title="a classifier",
    before=FINETUNE,
    width="hidden_size",
    num_pipeline_stages=2,
)


@dataclass(kw_only=True)
class PredictOptions(DataOptions, CommonOptions):
    """Predict the digit on every test image, or on pictures of yours."""

    checkpoint: str | None = None
    """Checkpoint of a classifier; by default fine-tuning's best."""

    input: Path | None = None
    """Pictures of yours instead of the test images: a PNG or JPEG file, a folder of them,
    or a .npy array (N, 28, 28). Other sizes, colour, and dark ink on light paper will do."""

    def problems(self) -> list[str]:
        """What is wrong with single options, one message each."""
        found = super().problems()
        if self.checkpoint == "none":
            found.append(
                "--checkpoint none: prediction needs a trained classifier. Name one, or leave the "
                "option out for fine-tuning's best."
            )
        return found

    @cached_property
    def pictures(self) -> Pictures | None:
        """The user's pictures in the form of the training images, if there are any."""
        return read_pictures(self.input) if self.input else None

    def adapt(self, stage: Stage) -> Stage:
        """Keeps the user's pictures apart from the test images."""
        return replace(stage, name="predict-input") if self.input else stage

    def resolve_dataset(
        self, previous: Any, report: Callable[[str], None], may_download: bool = True
    ) -> Any:
        """Reads the user's pictures, or else finds the images that the classifier was trained for.

        Raises:
            UserError: What there is cannot be used.
        """
        if self.pictures is None:
            return super().resolve_dataset(previous, report, may_download)
        remarks = list(self.pictures.remarks)
        if previous == "digits":
            remarks.append(
                "The classifier was trained on digits, coarse scans that fill their frame: it "
                "misreads most other pictures. Train on mnist to have yours read."
            )
        for remark in remarks:
            report(remark)
        # Each rank reads them anew, and all ranks have to predict the same.
        return self.pictures.name


def predict(run: Run[PredictOptions]) -> Path:
    """Predicts; returns the path of predictions.csv."""
    pictures: Pictures | None = run.options.pictures
    if pictures and pictures.name != run.plan.dataset:
        raise UserError(
            f"--input {run.options.input}: changed since this command began. Start it again."
        )

    from megakit.data import MegatronDataModule
    from megakit.training import predict_stage
    from mnist.dataset import MNISTCustom
    from model_components import BionemoLightningModule, ExampleFineTuneConfig, MNISTDataModule

    micro_batch_size = run.layout.micro_batch_size
    sizes: dict[str, Any] = {
        "global_batch_size": run.layout.global_batch_size,
        "num_workers": run.options.num_workers,
    }
    data: MegatronDataModule
    if pictures:
        data = MegatronDataModule(micro_batch_size, **sizes)
        data.test_set = MNISTCustom.from_arrays(pictures.images, pictures.labels)
    else:
        dataset = run.plan.dataset
        data = MNISTDataModule(run.options.data_dir, micro_batch_size, dataset=dataset, **sizes)
    # No prefix is skipped: model and checkpoint have to hold the same weights.
    checkpoint = run.plan.start or ""
    module = BionemoLightningModule(config=ExampleFineTuneConfig(initial_ckpt_path=checkpoint))

    def write_report(path: Path, predictions: Any) -> None:
        from mnist.report import write_digit_report

        images = data.test_set.images
        write_digit_report(path, predictions, images, Path(checkpoint), run.plan.dataset)

    sources = pictures.sources if pictures else None
    return predict_stage(run, module, data, sources, write_report)


if __name__ == "__main__":
    run_script(PREDICT, PredictOptions, predict)
