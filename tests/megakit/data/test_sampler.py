"""Which samples make a global batch, whatever the layout, the stops between, and the epochs."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.usefixtures("megatron")

GLOBAL = 24
# Ranks and micro batch sizes that make up global batches of 24.
LAYOUTS = [(r, m) for r in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 6, 12, 24) if not 24 % (r * m)]
layouts = st.sampled_from(LAYOUTS)


class Indices(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def get_batch(self, indices):
        return {"idx": torch.from_numpy(indices)}


@settings(deadline=None)
@given(st.integers(1, 12), layouts, st.data())
def test_every_layout_reads_the_same_samples_from_any_step_on(num_steps, layout, data):
    """All ranks together, in the order that the losses are summed in."""
    from megakit.data import GlobalBatchSampler

    num_ranks, micro = layout
    first = GLOBAL * data.draw(st.integers(0, num_steps - 1))
    ranks = [
        GlobalBatchSampler(
            num_steps * GLOBAL, micro, GLOBAL, rank, num_ranks, start=partial(int, first)
        )
        for rank in range(num_ranks)
    ]
    at_once = [np.stack(batches) for batches in zip(*ranks, strict=True)]
    assert {batches.shape for batches in at_once} == {(num_ranks, micro)}
    assert np.concatenate(at_once, axis=None).tolist() == list(range(first, num_steps * GLOBAL))


def test_what_is_refused():
    from megakit.data import ExactDataSampler, GlobalBatchSampler

    with pytest.raises(ValueError, match="23 samples is smaller than a batch of 24"):
        GlobalBatchSampler(23, 4, 24)
    sampler = ExactDataSampler(seq_len=1, micro_batch_size=4, global_batch_size=8)
    with pytest.raises(ValueError, match=r"shuffle=True.*MultiEpochDatasetResampler"):
        sampler.transform_dataloader(DataLoader(Indices(42), shuffle=True))


# --- As NeMo's strategy uses it -------------------------------------------------------------------


def trainer_of(part: str, global_step: int = 0) -> Any:
    """As much of Lightning's as is asked."""
    state = SimpleNamespace(stage=SimpleNamespace(dataloader_prefix=part))
    return SimpleNamespace(global_step=global_step, state=state, strategy=None)


def transformed(
    length: int, trainer: Any, layout: tuple[int, int] = (1, 4), size: int = 8, **options: Any
) -> list[DataLoader]:
    """The loader of each rank."""
    from megatron.core import parallel_state

    from megakit.data import ExactDataSampler

    ranks, micro = layout
    loaders = []
    for rank in range(ranks):
        sampler = ExactDataSampler(seq_len=1, micro_batch_size=micro, global_batch_size=size)
        for name, value in options.items():
            setattr(sampler, name, value)
        sampler.connect(trainer)
        places = {"rank": rank, "world_size": ranks}
        getters: Any = {
            f"get_data_parallel_{n}": partial(int, place) for n, place in places.items()
        }
        with mock.patch.multiple(parallel_state, **getters):
            loaders.append(sampler.transform_dataloader(DataLoader(Indices(length))))
    return loaders


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), layouts, st.sampled_from([1.0, 0.5, 0.8, 0.99]))
def test_mean_loss_is_that_over_samples(num_samples, layout, share):
    """A validation loss as Megatron and Lightning make it: plain means of plain means."""
    losses = torch.rand(num_samples, generator=torch.Generator().manual_seed(1)) + 1
    trainer, read, ranks = trainer_of("val"), set(), []
    trainer.limit_val_batches = share
    for loader in transformed(num_samples, trainer, layout, GLOBAL):
        batches = list(loader)[: int(len(loader) * share)]
        read |= {int(i) for b in batches for i in b["idx"][b["loss_mask"] > 0]}
        ranks.append([(losses[b["idx"]] * b["loss_mask"]).mean() for b in batches])
    assume(read)
    assert len(read) == num_samples or share < 1
    expected = float(losses[list(read)].mean())
    assert float(torch.tensor(ranks).mean()) == pytest.approx(expected, rel=1e-5)


def test_training_starts_where_the_trainer_is_and_evaluation_at_the_first_sample():
    options: dict[str, Any] = {"init_consumed_samples": 16, "init_global_step": 2}
    trainer = trainer_of("train", 3)
    (loader,) = transformed(42, trainer, **options)
    assert next(iter(loader))["idx"].tolist() == [24, 25, 26, 27]
    trainer.global_step = 5  # as many steps as the dataset is long: Lightning's next epoch
    assert next(iter(loader))["idx"][0] == 0
    (loader,) = transformed(42, trainer_of("val", 3), **options)
    assert torch.cat([batch["idx"] for batch in loader])[:42].tolist() == list(range(42))
