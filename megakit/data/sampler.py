"""Divides the samples of each step among the ranks, and pads the last batch of an evaluation."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from nemo.lightning.data import MegatronPretrainingSampler
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader, RandomSampler

from megakit.data.device import CPU
from megakit.data.indices import IntArray
from megakit.data.loader import make_loader

PADDING = -1


class GlobalBatchSampler(MegatronPretrainingSampler):
    """NeMo's sampler in arrays: divides the samples 0, 1, 2, ... into one rank's micro batches.

    Global batch n has the samples `n * global` up to `(n + 1) * global`, for any number of ranks
    and any micro batch size. Slice m of a global batch has `micro * ranks` samples: the micro batch
    m of each data-parallel rank, in the order of the ranks.

    Args:
        num_samples: Length of the dataset.
        micro_batch_size: Samples per rank and forward pass.
        global_batch_size: Samples per step; a multiple of micro batch size times `num_ranks`.
        rank: Data-parallel rank.
        num_ranks: Data-parallel size.
        start: Returns the number of samples consumed so far; called at the start of each iteration.
            After a first pass over the dataset, this number exceeds the dataset's length.
        pad: Whether to fill an incomplete last global batch with `PADDING`, instead of dropping it.

    Yields:
        Arrays of `micro_batch_size` indices, int64.

    Raises:
        ValueError: The dataset has less than one global batch.
        RuntimeError: NeMo's, if the batch sizes do not fit.
    """

    def __init__(
        self,
        num_samples: int,
        micro_batch_size: int,
        global_batch_size: int,
        rank: int = 0,
        num_ranks: int = 1,
        start: Callable[[], int] = lambda: 0,
        pad: bool = False,
    ) -> None:
        if num_samples < (1 if pad else global_batch_size):
            raise ValueError(
                f"a dataset of {num_samples} samples is smaller than a batch of "
                f"{global_batch_size}. MultiEpochDatasetResampler makes it as long as the training."
            )
        super().__init__(
            *(num_samples, 0, micro_batch_size, rank, num_ranks),
            drop_last=not pad,
            global_batch_size=global_batch_size,
            pad_samples_to_global_batch_size=pad,
        )
        self.start = start

    def __iter__(self) -> Iterator[IntArray]:
        slice_size = self.micro_batch_times_data_parallel_size
        end, size = len(self) * slice_size, self.global_batch_size
        first, last = self.get_start_end_idx()
        for begin in range(self.start() % end, end - size + 1, size):
            for place in range(begin, begin + size, slice_size):
                indices = np.arange(place + first, place + last)
                yield np.where(indices < self.total_samples, indices, PADDING)


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
