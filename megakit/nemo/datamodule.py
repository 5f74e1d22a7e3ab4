"""Defines a Lightning data module whose training resumes at the next unconsumed sample."""

from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from nemo.lightning.data import WrappedDataLoader as WrappedDataLoader
from nemo.lightning.pytorch.plugins import MegatronDataSampler

from megakit.data.blending import BlendedDataset
from megakit.data.epochs import MultiEpochDataset, MultiEpochDatasetResampler
from megakit.nemo.data_sampler import ExactDataSampler


class MegatronDataModule(pl.LightningDataModule):
    """Provides the loaders of each rank, and resumes training after the last consumed sample.

    A subclass assigns its datasets in `setup`: `train_set`, usually from `resample`, `val_set` and
    `test_set`. The loader methods return loaders of these datasets. A subclass may also override
    Lightning's loader methods and return one loader or several. The training loader resumes; all
    other loaders start at sample 0. Of NeMo's own data sampler, training resumes exactly if its
    dataset is as long as the training.

    Args:
        micro_batch_size: Samples per rank and forward pass. Without it, the subclass assigns
            `data_sampler` itself.
        global_batch_size: Samples per step over all ranks; by default one micro batch.
        seed: Seed for the order of the training samples.
        num_workers: Processes per rank that prefetch batches.
        output_log: Whether NeMo's sampler logs its own metrics.

    Attributes:
        data_sampler: NeMo's data sampler. NeMo's strategy reads the batch sizes from it, and it
            selects the samples of each rank.
        init_global_step: The step at which `data_sampler.init_consumed_samples` were consumed.
        train_set: Training samples, in the order of training.
        val_set: Validation samples, each read once per validation; None for no validation.
        test_set: Samples for test and prediction, each read once.
    """

    data_sampler: MegatronDataSampler

    def __init__(
        self,
        micro_batch_size: int | None = None,
        global_batch_size: int | None = None,
        *,
        seed: int = 42,
        num_workers: int = 0,
        output_log: bool = False,
    ) -> None:
        super().__init__()
        self.init_global_step = 0
        self.seed, self.num_workers = seed, num_workers
        self.train_set: Any = None
        self.val_set: Any = None
        self.test_set: Any = None
        if micro_batch_size is not None:
            self.micro_batch_size = micro_batch_size
            self.global_batch_size = global_batch_size or micro_batch_size
            self.data_sampler = ExactDataSampler(
                seq_len=1,  # required by pipeline stages, used by token models only
                micro_batch_size=self.micro_batch_size,
                global_batch_size=self.global_batch_size,
                output_log=output_log,
            )

    def resample(self, dataset: MultiEpochDataset[Any]) -> MultiEpochDatasetResampler[Any]:
        """Returns the training samples of all epochs, shuffled differently in each epoch.

        The result is as long as the training, so for Lightning the training is one epoch. Without a
        trainer, or without `max_steps`, the result is one pass over the dataset.

        Args:
            dataset: Indexed by `EpochIndex`: a dataset in one of `megakit.data`'s wrappers.
        """
        num_samples = self._num_training_samples or len(dataset)
        return MultiEpochDatasetResampler(dataset, None, num_samples, seed=self.seed)

    def blend(self, members: Sequence[tuple[Any, float]]) -> BlendedDataset:
        """Returns the training samples of several datasets, in proportion to weights.

        The result is as long as the training, like the result of `resample`.

        Args:
            members: Pairs of a dataset and its weight, see `BlendedDataset`.
        """
        return BlendedDataset(members, self._num_training_samples, seed=self.seed)

    @property
    def _num_training_samples(self) -> int | None:
        """The number of samples in `max_steps` steps; None without a trainer or `max_steps`."""
        steps = self.trainer.max_steps if self.trainer is not None else -1
        return steps * self.data_sampler.global_batch_size if steps > 0 else None

    def train_dataloader(self) -> Any:
        """Returns a loader of `train_set`."""
        return self._loader("train_set", "train")

    def val_dataloader(self) -> Any:
        """Returns a loader of `val_set`."""
        return self._loader("val_set", "validation")

    def test_dataloader(self) -> Any:
        """Returns a loader of `test_set`."""
        return self._loader("test_set", "test")

    def predict_dataloader(self) -> Any:
        """Returns a loader of `test_set`."""
        return self._loader("test_set", "predict")

    def _loader(self, name: str, mode: Literal["train", "validation", "test", "predict"]) -> Any:
        dataset = getattr(self, name)
        if dataset is None:
            raise ValueError(
                f"{type(self).__name__}.{name} is None. Assign a dataset to it in setup(), or "
                "override the method that returns the loader."
            )
        # Without a trainer, the loader gives these batches. NeMo's strategy replaces the batches by
        # those of `data_sampler`; NeMo's own sampler reads the mode.
        sampler = getattr(self, "data_sampler", None)
        size = sampler.micro_batch_size if sampler is not None else 1
        return WrappedDataLoader(
            mode, dataset=dataset, batch_size=size, num_workers=self.num_workers
        )

    def update_init_global_step(self) -> None:
        """Does nothing: code written for NeMo calls this in its loader methods."""

    @property
    def consumed_samples(self) -> int:
        """Training samples consumed so far, over all data-parallel ranks."""
        sampler = self.data_sampler
        if sampler.rampup_batch_size is not None:
            raise ValueError("MegatronDataModule needs a constant global batch size, no ramp-up.")
        steps = self._global_step - self.init_global_step
        return int(sampler.init_consumed_samples + steps * sampler.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: the number of consumed samples, and the step."""
        return {"consumed_samples": self.consumed_samples, "global_step": self._global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after the samples that were consumed when the checkpoint was saved."""
        sampler, consumed = self.data_sampler, int(state_dict["consumed_samples"])
        # Lightning restores the step after this call. NeMo's own data modules do not save the step.
        step = state_dict.get("global_step", consumed // sampler.global_batch_size)
        self.init_global_step = sampler.init_global_step = step
        sampler.init_consumed_samples = sampler.prev_consumed_samples = consumed
        sampler.if_first_step = 1

    def reconfigure_limit_batches(self) -> None:
        """Makes `limit_val_batches=5` mean 5 global batches; NeMo's strategy calls this.

        Lightning counts micro batches, so it could end an evaluation within a global batch; then
        pipeline stages would wait for each other without end. Without a `val_set`, the limit of
        validation becomes 0.

        Raises:
            ValueError: If a limit is a share of the batches, which could end within a global batch.
        """
        trainer, factor = self.trainer, self.data_sampler.num_microbatches
        if trainer is None:
            return
        follows = type(self).val_dataloader is MegatronDataModule.val_dataloader
        if follows and self.val_set is None:
            trainer.limit_val_batches = 0  # Lightning then skips validation
        if factor == 1 or getattr(trainer, "limits_in_micro_batches", False):
            return
        vars(trainer)["limits_in_micro_batches"] = True  # prevents a second multiplication
        for name in ("train", "val", "test", "predict"):
            limit = getattr(trainer, f"limit_{name}_batches")
            if isinstance(limit, float) and limit not in (0.0, 1.0):
                raise ValueError(
                    f"limit_{name}_batches={limit}: with {factor} micro batches per step this has "
                    "to be a number of global batches, 0.0, or 1.0."
                )
            if isinstance(limit, int):
                setattr(trainer, f"limit_{name}_batches", limit * factor)
        trainer.num_sanity_val_steps *= factor

    @property
    def _global_step(self) -> int:
        return self.trainer.global_step if self.trainer is not None else 0


def another_name(attribute: str) -> Any:
    """Returns a property that reads and sets an attribute under another name."""
    return property(
        lambda self: getattr(self, attribute),
        lambda self, value: setattr(self, attribute, value),
    )
