"""A pickle read without Python's unpickler: plain values come back.

What is refused: test_safe_reading.py.
"""

import enum
import pickle
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import pytest

from megakit.runtime.plain_pickle import (
    Enumeration,
    Function,
    Record,
    Vocabulary,
    get_member,
    load,
)


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


@dataclass(frozen=True)
class Index:
    name: str
    offset: int = 0


@dataclass
class Entry:
    size: tuple[int, ...] = ()
    parts: list[Any] = field(default_factory=list)


HERE = __name__
VOCABULARY: Vocabulary = {
    ("builtins", "getattr"): Function(get_member),
    (HERE, "Color"): Enumeration(Color),
    (HERE, "Index"): Record(Index, ("name", "offset")),
    (HERE, "Entry"): Record(Entry, ("size", "parts")),
    ("collections", "OrderedDict"): Function(OrderedDict),
}
PLAIN = {
    "numbers": [0, 1, -1, 255, 65536, 2**31, 2**40, -(2**62), 1.5, True, False, None],
    "text": ["", "a", "é" * 300, b"", b"\x00\xff", b"x" * 300],
    "containers": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, {1: {2: []}}),
    "records": {Index("a", 3): Entry((1, 2), [Color.RED, Color.BLUE])},
    "ordered": OrderedDict(a=1),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_back(protocol: int) -> None:
    plain = PLAIN if protocol > 2 else PLAIN | {"text": ["", "a"]}
    assert load(pickle.dumps(plain, protocol), VOCABULARY) == plain


def test_enums_as_python_3_11_2_pickles_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, through `getattr`; other versions call the class with the value."""
    monkeypatch.setattr(
        enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self._name_))
    )
    data = pickle.dumps(Color.BLUE)
    assert b"getattr" in data
    assert load(data, VOCABULARY) is Color.BLUE
