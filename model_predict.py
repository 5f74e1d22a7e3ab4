"""Stage 3: classify every test image exactly once, or classify your own pictures."""

import sys
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if sys.flags.safe_path:  # with this flag, sys.path lacks the folder of the script
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from megakit.errors import UserError
from megakit.job import CommonOptions, Run, Stage, run_script
from mnist.files import DataOptions
from mnist.sizes import NUM_PARTS
from model_finetune import FINETUNE

if TYPE_CHECKING:
    from mnist.own_pictures import Pictures

PREDICT = Stage("predict", before=FINETUNE)


@dataclass(kw_only=True)
class PredictOptions(DataOptions, CommonOptions):
    """Predict the digit on every test image, or on your own pictures."""

    num_layers: ClassVar[int] = NUM_PARTS

    checkpoint: str | None = None
    """Checkpoint of a classifier, or the folder of a fine-tuning, for its best one; by default that
    of --output-dir."""

    input: Path | None = None
    """Your own pictures instead of the test images: a PNG, JPEG or WebP file, a folder of such
    files, or a .npy array (N, 28, 28). Photos of paper and drawings of any size and colour. Ink may
    be dark or bright."""

    def problems(self) -> list[str]:
        """Returns one message for each option that cannot be used."""
        found = super().problems()
        if self.checkpoint == "none":
            found.append(
                "--checkpoint none: prediction needs a trained classifier. Name its checkpoint, "
                "or omit the option to use the best one of fine-tuning."
            )
        return found

    @cached_property
    def pictures(self) -> "Pictures | None":
        """Returns the user's pictures in the form of training images; None without --input."""
        if self.input is None:
            return None
        from mnist.own_pictures import read_pictures  # slow to import

        return read_pictures(self.input)

    def run_name(self, stage: str) -> str:
        """Returns the name of the run directory; the user's own pictures have one of their own."""
        return "predict-input" if self.input else stage

    def fingerprint(self) -> str:
        """Reads the user's pictures, or else finds the classifier's dataset; returns its name.

        Raises:
            UserError: The pictures or the dataset cannot be used.
        """
        if self.pictures is None:
            return super().fingerprint()
        remarks = list(self.pictures.remarks)
        if self.start_dataset == "digits":
            remarks.append(
                "The classifier was trained on digits, which are coarse scans. It misclassifies "
                "most other pictures. To classify your own pictures, train on mnist."
            )
        for remark in remarks:
            self.say(remark)
        # Each rank reads the pictures again; `predict` compares this name to detect a change.
        return self.pictures.name


def predict(run: Run[PredictOptions]) -> Path:
    """Predicts the digits; returns the path of predictions.csv.

    For the user's pictures, `inputs.png` shows what the classifier saw of each picture.
    """
    pictures: Pictures | None = run.options.pictures
    if pictures and pictures.name != run.dataset:
        raise UserError(
            f"--input {run.options.input}: changed since this command began. Start the command "
            "again."
        )

    from megakit.data import MegatronDataModule
    from mnist.dataset import MNISTCustom
    from mnist.results import show_results
    from model_components import BionemoLightningModule, ExampleFineTuneConfig, MNISTDataModule
    from model_trainer import build_trainer

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
        dataset = run.dataset
        data = MNISTDataModule(run.options.data_dir, micro_batch_size, dataset=dataset, **sizes)
    checkpoint = run.start or ""  # no prefix is skipped: it has to have the model's weights
    module = BionemoLightningModule(config=ExampleFineTuneConfig(initial_ckpt_path=checkpoint))
    trainer = build_trainer(run)
    trainer.predict(module, data)
    sources = pictures.sources if pictures else None
    show = partial(  # draws pictures and report.html; predictions.csv does not need it
        show_results,
        images=data.test_set.images,
        sources=sources,
        checkpoint=Path(checkpoint),
        dataset=run.dataset,
    )
    return run.finish(trainer, sources=sources, show=show)


if __name__ == "__main__":
    run_script(PREDICT, PredictOptions, predict)
