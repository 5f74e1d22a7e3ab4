"""BlendedDataset: shares, epochs, any order, batches that equal samples, errors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import Dataset

from megakit.data import BlendedDataset, MultiEpochDatasetWrapper
from megakit.testing import assert_dataset_compatible_with_megatron


class Member(Dataset):
    """Any number of samples: the member's name and the index."""

    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {"x": torch.tensor([self.name, index])}


class AddEpoch(MultiEpochDatasetWrapper):
    def apply_transform(self, sample, index):
        return {**sample, "x": sample["x"] + 1000 * index.epoch}


member_lists = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=5
)  # of length and weight


def blend_of(members, *arguments, **options):
    pairs = [(Member(name, length), weight) for name, (length, weight) in enumerate(members)]
    return BlendedDataset(pairs, *arguments, **options)


def drawn_from(blend, count):
    return np.array([blend[index]["x"].tolist() for index in range(count)])


@settings(max_examples=60, deadline=None)
@given(member_lists, st.integers(0, 2**70), st.booleans())
def test_shares_and_epochs(members, seed, shuffle):
    """Each prefix has nearly each member's share; each epoch of a member is a permutation."""
    names, idxs = drawn_from(blend_of(members, 300, seed, shuffle), 300).T
    weights = np.array([weight for _, weight in members])
    shares = np.arange(1, 301)[:, None] * weights / weights.sum()
    drawn = np.cumsum(names[:, None] == np.arange(len(members)), axis=0)
    assert abs(drawn - shares).max() <= (len(members) + 1) / 2 + 0.1  # counts are rounded
    for member, (length, _) in enumerate(members):
        mine = idxs[names == member].tolist()
        for start in range(0, len(mine), length):
            part = mine[start : start + length]
            assert len(set(part)) == len(part)
            assert set(part) <= set(range(length))
            assert shuffle or part == list(range(len(part)))


def test_known_values():
    """What any platform and version must give."""
    names, idxs = drawn_from(blend_of([(5, 0.5), (3, 0.3), (100, 0.2)], 20), 20).T.tolist()
    assert names == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0] * 2
    assert idxs == [2, 2, 90, 0, 4, 1, 1, 83, 0, 3, 0, 0, 52, 1, 4, 1, 3, 17, 2, 2]


def test_the_default_length_is_the_first_epoch():
    assert len(blend_of([(7000, 0.7), (2500, 0.2), (3000, 0.1)])) == 10_000


def test_members_indexed_by_epoch():
    blend = BlendedDataset([(Member(0, 3), 1), (AddEpoch(Member(1, 4)), 1)], num_samples=24)
    x = drawn_from(blend, 24)
    assert x[1::2, 0].tolist() == [1] * 4 + [1001] * 4 + [2001] * 4
    assert_dataset_compatible_with_megatron(blend)


@pytest.mark.parametrize(
    ("members", "options", "message"),
    [
        ([([1], float("nan"))], {}, "each has to be positive"),
        ([([1], 1), ([1], 1e-5)], {}, "at least 1/10000 of their sum"),
        ([([1], 1), ([], 1)], {"num_samples": 4}, "dataset is empty"),
        ([([1], 1)], {"num_samples": 0}, "at least 1 is needed, got 0"),
    ],
)
def test_wrong_values(members, options, message):
    with pytest.raises(ValueError, match=message):
        BlendedDataset(members, **options)
