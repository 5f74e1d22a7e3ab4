"""The names that a checkpoint's pickles may use: whichever they are, none stands for code."""

import dataclasses
import enum
import itertools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from megakit.runtime import plain_archive, plain_metadata
from megakit.runtime.plain_pickle import Argument, Constant, Enumeration, Record, Vocabulary

#: Arguments with which Python's own functions lead to code.
HOSTILE = (str, Path, Path(), "mro", "__class__", "os", "latin1", 1, (1,), {"a": print})


def is_plain(value: Any) -> bool:
    """Whether a value is a number, text, a path, a tensor, one of their types, or empty."""
    leaves = (*(type(None), bool, int, float, str, bytes), *(torch.dtype, torch.layout))
    others = (torch.device, torch.Size, torch.Tensor, type(Path()))
    return (
        type(value) in (*leaves, *others) or isinstance(value, enum.Enum) or value == OrderedDict()
    )


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("vocabulary", [plain_archive._vocabulary, plain_metadata._vocabulary])
def test_no_name_stands_for_code(vocabulary: Callable[[], Vocabulary]) -> None:
    for name, entry in vocabulary().items():
        if isinstance(entry, Constant | Argument):
            assert is_plain(entry.value), name
            continue
        if isinstance(entry, Record):
            assert set(entry.names) <= {field.name for field in dataclasses.fields(entry.cls)}, name
            continue
        if isinstance(entry, Enumeration):
            assert issubclass(entry.cls, enum.Enum), name
        else:
            assert type(entry.build) is FunctionType, name
            assert entry.build.__module__.startswith("megakit.runtime."), name
        for count in range(4):
            for arguments in itertools.product(HOSTILE, repeat=count):
                try:
                    value = entry.build(*arguments)
                except Exception:  # the loader refuses the pickle for any of them
                    continue
                assert is_plain(value), (name, arguments)
