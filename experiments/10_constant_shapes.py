"""10. Batches and stage outputs of constant shape.

A validation set has 200 samples, and a global batch has 32. How many samples does NeMo validate?
And what happens if a pipeline stage sends 6 numbers per sample, but `hidden_size` is 4?

NeMo's sampler drops the incomplete last batch. The second stage expects `hidden_size` numbers per
sample, and torch's communication library ends the process when more numbers arrive.

Try: set `latent_size=4` in the last run, then `latent_size=3`. Which of the two is an error, and
does the error name the cause?
"""

from typing import Any

from nemo.lightning import MegatronStrategy
from nemo.lightning.pytorch.plugins import MegatronDataSampler

from experiments.training import GLOBAL_BATCH, MICRO_BATCH, digits, train
from megakit.training import ExactStrategy
from model_components import BionemoLightningModule, PretrainConfig

#: The indices of the validated samples. Each run has processes of its own.
VALIDATED: set[int] = set()


class Recording(BionemoLightningModule):
    """Records which samples are validated; `loss_mask` is 0 for padding."""

    def validation_step(self, batch: Any, batch_idx: int | None = None) -> Any:
        is_sample = batch.get("loss_mask", batch["idx"] >= 0) > 0
        VALIDATED.update(batch["idx"][is_sample].tolist())
        return self(batch, batch_idx)


def with_padding() -> str:
    """The validated samples, with megakit's sampler."""
    train(module=Recording, tensor=2, validate=True)
    return f"{len(VALIDATED)} of 200"


def without_padding() -> str:
    """The validated samples, with NeMo's sampler."""
    data = digits()
    data.data_sampler = MegatronDataSampler(
        1, micro_batch_size=MICRO_BATCH, global_batch_size=GLOBAL_BATCH
    )
    train(module=Recording, data=data, tensor=2, validate=True)
    return f"{len(VALIDATED)} of 200"


def with_stage_shape() -> str:
    """A stage that sends 6 numbers per sample, with a strategy that reads `stage_shape`."""
    config = PretrainConfig(hidden_size=4, latent_size=6)
    return train(config, pipeline=2, strategy=ExactStrategy).loss


def without_stage_shape() -> str:
    """A stage that sends 6 numbers per sample, with NeMo's own strategy."""
    config = PretrainConfig(hidden_size=4, latent_size=6)
    return train(config, pipeline=2, strategy=MegatronStrategy).loss
