"""Defines NeMo's data sampler that reads every sample of an evaluation exactly once."""

from typing import Any

from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader, RandomSampler

from megakit.data.device import CPU
from megakit.data.loader import make_loader
from megakit.data.sampler import GlobalBatchSampler


class ExactDataSampler(MegatronDataSampler):
    """A data sampler for NeMo that reads every sample of an evaluation exactly once.

    NeMo's own sampler drops an incomplete last batch in validation. In prediction, its batches can
    have different sizes on different ranks, or be missing. This sampler pads the last global batch,
    so that all ranks have equally many batches of equal shape, and marks the padding in
    `batch["loss_mask"]`. The mask averages 1 over all batches, so that means of `mask * loss` over
    micro batches, ranks and steps are the mean over samples, under every layout.
    """

    def transform_dataloader(self, dataloader: DataLoader, consumed_samples: int = 0) -> DataLoader:
        """Returns a loader with this rank's sampler; it fetches whole batches if possible.

        What the loader is for, the trainer says: it makes a validation's loader while it validates.

        Raises:
            ValueError: If the loader shuffles or has less than one global batch, or if the batch
                size ramps up.
        """
        from megatron.core import parallel_state

        if isinstance(dataloader.sampler, RandomSampler):
            raise ValueError(
                "a DataLoader with shuffle=True: each rank would draw another order. Remove "
                "shuffle=True, and wrap the dataset in MultiEpochDatasetResampler."
            )
        if self.rampup_batch_size is not None:
            raise ValueError("ExactDataSampler needs a constant global batch size, no ramp-up.")
        trainer: Any = self.trainer
        is_training = trainer.state.stage.dataloader_prefix == "train"
        num_ranks = parallel_state.get_data_parallel_world_size()
        dataset: Any = dataloader.dataset
        num_samples, weight = len(dataset), None
        # The weights of the samples have to fit the number of samples that the trainer reads.
        limit = getattr(trainer, f"limit_{trainer.state.stage.dataloader_prefix}_batches", None)
        slice_size = self.micro_batch_size * num_ranks
        if isinstance(limit, int) and limit and not is_training:
            num_samples = min(num_samples, limit * slice_size)
        sampler = GlobalBatchSampler(
            num_samples,
            self.micro_batch_size,
            self.global_batch_size,
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=num_ranks,
            start=self._consumed_samples if is_training else lambda: 0,
            pad=not is_training,
        )
        if not is_training:
            # Of a share of the batches, Lightning reads whole ones.
            padded = int(len(sampler) * (limit if isinstance(limit, float) else 1)) * slice_size
            weight = padded / max(1, min(padded, num_samples))
        device = getattr(trainer.strategy, "root_device", CPU)
        return make_loader(dataloader, sampler, weight, device)

    def _consumed_samples(self) -> int:
        steps = self.trainer.global_step - self.init_global_step
        return self.init_consumed_samples + steps * self.global_batch_size
