"""Stage 3: classify every test image exactly once."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

# Python adds the folder of this file; the modules of the tutorial are two folders above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.megatron.model_finetune import FINETUNE
from megakit.job import CommonOptions, Run, Stage, run_script
from mnist.files import DataOptions
from mnist.sizes import NUM_PARTS

PREDICT = Stage("predict", before=FINETUNE)


@dataclass(kw_only=True)
class PredictOptions(DataOptions, CommonOptions):
    """Predict the digit on every test image."""

    num_layers: ClassVar[int] = NUM_PARTS

    output_dir: Path = Path("runs/megatron")
    """Folder that contains the runs."""

    checkpoint: str | None = None
    """Checkpoint of a classifier, or the folder of a fine-tuning, for its best one; by default that
    of --output-dir."""


def predict(run: Run[PredictOptions]) -> Path:
    """Predicts the digits; returns the path of predictions.csv."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from torch import Tensor

    from examples.megatron.model_components import (
        Classifier,
        micro_batches,
        model_config,
        on_device,
    )
    from examples.megatron.training_loop import start_process_groups
    from megakit.checkpoints import read_model_settings
    from megakit.job.finish import finish_prediction
    from megakit.models import load_model_weights
    from megakit.runtime.atomic_files import partial_path
    from megakit.training import OutputsOfRanks
    from mnist.dataset import MnistBatch, MNISTCustom
    from mnist.files import read_splits

    assert run.start is not None, "a prediction starts from a checkpoint"
    start, layout = Path(run.start), run.layout
    start_process_groups(run)
    images = read_splits(
        run.options.data_dir or Path("data"), run.dataset, MNISTCustom.from_arrays
    )[2]
    settings = read_model_settings(start)
    model = Classifier(model_config(run, settings["hidden_size"], settings["latent_size"]))
    load_model_weights(model, start)
    model = on_device(model).eval()
    run.begin()
    began, collected = time.perf_counter(), OutputsOfRanks(partial_path(run.path / "outputs"))
    loader = micro_batches(run, images, pad=True)
    batches, num_steps = iter(loader), len(loader) // layout.num_micro_batches

    def forward_step(batches: Iterator[MnistBatch], model: Any) -> tuple[Tensor, Any]:
        batch = next(batches)

        def keep(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            collected.add({"output": logits, **batch}, len(loader) * layout.data)
            return logits.sum(), {}

        return model(batch["data"]), keep

    with torch.inference_mode():
        for _ in range(num_steps):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=[model],
                num_microbatches=layout.num_micro_batches,
                seq_length=1,
                micro_batch_size=layout.micro_batch_size,
                forward_only=True,
            )
    return finish_prediction(run, collected, len(images), time.perf_counter() - began)


if __name__ == "__main__":
    run_script(PREDICT, PredictOptions, predict, uses_nemo=False)
