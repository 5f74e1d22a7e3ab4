"""BlendedDataset: shares, epochs, any order, batches that equal samples, errors."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, default_collate

from megakit.data import (
    BlendedDataset,
)
from megakit.testing import assert_elements_equal


class Member(Dataset):
    """Any number of samples: the member's name and the index."""

    def __init__(self, name, length):
        self.name, self.length = name, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        pair = (index, f"number {index}")
        return {"member": self.name, "x": torch.tensor([self.name, index]), "pair": pair}


class Batched(Member):
    def get_batch(self, indices):
        names = torch.full((len(indices),), self.name)
        texts = tuple(f"number {index}" for index in indices)
        x = torch.stack([names, torch.from_numpy(indices)], 1)
        return {"member": names, "x": x, "pair": [torch.from_numpy(indices), texts]}


member_lists = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=5
)  # of length and weight


def blend_of(members, *arguments, cls: Any = Batched, **options):
    pairs = [(cls(name, length), weight) for name, (length, weight) in enumerate(members)]
    return BlendedDataset(pairs, *arguments, **options)


def collated(blend, indices):
    return default_collate([blend[index] for index in indices])


@settings(max_examples=60, deadline=None)
@given(member_lists, st.integers(0, 2**70), st.booleans())
def test_shares_and_epochs(members, seed, shuffle):
    """Each prefix has each member's share; each epoch of a member is a permutation."""
    blend = blend_of(members, 300, seed, shuffle)
    places = [blend.locate(index) for index in range(300)]
    total = sum(weight for _, weight in members)
    orders = set()
    for member, (length, weight) in enumerate(members):
        drawn = np.cumsum([number == member for number, _ in places])
        for size, count in enumerate(drawn.tolist(), start=1):
            assert abs(count - Fraction(size * weight, total)) < 1
        mine = [place for number, place in places if number == member]
        for epoch, start in enumerate(range(0, len(mine), length)):
            part = mine[start : start + length]
            assert {place.epoch for place in part} == {epoch}
            idxs = [place.idx for place in part]
            assert len(set(idxs)) == len(idxs)
            assert set(idxs) <= set(range(length))
            assert shuffle or idxs == list(range(len(idxs)))
            if shuffle and len(idxs) >= 20:
                assert tuple(idxs) not in orders  # another one for each member and epoch
                orders.add(tuple(idxs))


@settings(max_examples=60, deadline=None)
@given(member_lists, st.data(), st.booleans(), st.sampled_from([Member, Batched]))
def test_batches_equal_samples_in_any_order(members, data, shuffle, cls):
    blend = blend_of(members, 100, shuffle=shuffle, cls=cls)
    for _ in range(3):
        indices = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=30))
        assert_elements_equal(blend.get_batch(np.array(indices)), collated(blend, indices))
        for index in indices:
            member, (_, idx) = blend.locate(index)
            assert blend[index]["x"].tolist() == [member, idx]


def test_known_values():
    """What any platform and version must give."""
    blend = blend_of([(5, 0.5), (3, 0.3), (100, 0.2)], 20)
    members, idxs = zip(*(blend[index]["x"].tolist() for index in range(20)), strict=True)
    assert members == (0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1)
    assert idxs == (1, 0, 4, 91, 3, 2, 0, 41, 2, 1, 3, 1, 1, 62, 2, 2, 0, 6, 4, 0)


def test_the_default_length_ends_before_a_repetition():
    assert len(blend_of([(100, 1)])) == 100
    assert len(blend_of([(10**9, 1), (10, 1)])) == 21
    for members in ([(17, 3), (23, 2), (400, 5)], [(1, 1), (1, 1)], [(5, 1), (40, 9)]):
        length = len(blend_of(members))
        longer = blend_of(members, length + 1)
        assert all(longer.locate(index)[1].epoch == 0 for index in range(length))
        assert longer.locate(length)[1].epoch == 1


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([([1], 1), ([1], 1e-5)], "weight 1e-05 of member 1 is too small: the smallest share"),
        ([([1], 1), ([], 1)], "dataset of member 1 is empty"),
    ],
)
def test_wrong_values(members, message):
    with pytest.raises(ValueError, match=message):
        BlendedDataset(members)
    other: Any = [{"x": torch.zeros(3)}]
    blend = BlendedDataset([([{"x": torch.zeros(2)}], 1), (other, 1)], 4)
    with pytest.raises(ValueError, match="members of the blend give different samples"):
        blend.get_batch(np.arange(4))
