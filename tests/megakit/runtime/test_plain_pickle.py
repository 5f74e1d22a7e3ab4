"""A pickle read without Python's unpickler: plain values or a refusal, and no class changed."""

import enum
import pickle
import pickletools
import struct
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakit.runtime import plain_pickle
from megakit.runtime.plain_pickle import (
    Argument,
    Constant,
    Enumeration,
    Function,
    Record,
    RefusedError,
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


class Trap:
    """Each way in which Python's unpickler would run something of a class."""

    def __new__(cls, *arguments: Any) -> "Trap":
        raise AssertionError("was called")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError("was called")

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("was called")


HERE = __name__
VOCABULARY: Vocabulary = {
    ("builtins", "getattr"): Function(get_member),
    (HERE, "Color"): Enumeration(Color),
    (HERE, "Index"): Record(Index, ("name", "offset")),
    (HERE, "Entry"): Record(Entry, ("size", "parts")),
    (HERE, "Trap"): Record(Trap, ("value",)),
    ("collections", "OrderedDict"): Function(OrderedDict),
    ("other", "CONSTANT"): Constant(1.5),
    ("other", "argument"): Argument("hidden"),
}
CLASSES = (Color, Index, Entry, Trap, OrderedDict, Path, Record, Enumeration, Function)

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


def test_one_value_in_two_places() -> None:
    shared = [1]
    first, second = load(pickle.dumps([shared, shared]), VOCABULARY)
    assert first is second


def test_enums_as_python_3_11_2_pickles_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, through `getattr`; other versions call the class with the value."""
    monkeypatch.setattr(
        enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self._name_))
    )
    data = pickle.dumps(Color.BLUE)
    assert b"getattr" in data
    assert load(data, VOCABULARY) is Color.BLUE


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


INDEX, ENTRY, COLOR = named(HERE, "Index"), named(HERE, "Entry"), named(HERE, "Color")
GET = named("builtins", "getattr")


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (INDEX + b"}" + text("name") + b"K\x01sb.", "sets attributes of a Record"),
        (COLOR + b"}b.", "sets attributes of a Enumeration"),
        (GET + b"}b.", "sets attributes of a Function"),
        (b"}}b.", "sets attributes of a dict"),
        (INDEX + b")\x81N}" + text("name") + text("a") + b"s\x86b.", "unknown attributes"),
        (INDEX + b")\x81}" + text("__class__") + text("a") + b"sb.", "unknown attributes"),
        (INDEX + b")\x81}bb.", None),
        (INDEX + b")\x81}b}b.", "sets attributes of a Index"),
        (INDEX + b"K\x01\x85\x81.", "creates an object of a Record"),
        (INDEX + b")R.", "calls a Record"),
        (COLOR + b")\x81.", "creates an object of a Enumeration"),
        (b"K\x01)R.", "calls a int"),
        (INDEX + b".", "results in a Record"),
        (b"]" + GET + b"a.", "results in a Function"),
        (named("other", "argument") + b".", "results in a Argument"),
        (GET + INDEX + text("__init__") + b"\x86R.", "calls getattr"),
        (GET + COLOR + text("__init__") + b"\x86R.", "Color.__init__, which does not exist"),
        (GET + COLOR + text("mro") + b"\x86R.", "Color.mro, which does not exist"),
        (GET + GET + text("RED") + b"\x86R.", "calls getattr"),
        (COLOR + b"]\x85R.", "looks up Color by a list"),
        (b"](K\x01K\x02u.", "sets items of a list"),
        (b"}K\x01a.", "appends to a dict"),
        (INDEX + b")\x81K\x01a.", "appends to a Index"),
        (INDEX + b"K\x01K\x02s.", "sets items of a Record"),
        (b"}]K\x01s.", "key that is a list"),
        (b"}" + COLOR + b"K\x01s.", "key that is a Enumeration"),
        (b"}](K\x01\x85\x85K\x01s.", None),
        (b"}])\x85\x85K\x01s.", None),
        (b"})\x85\x85K\x01s.", "tuple of values other than integers"),
        (b"K\x01Q.", "persistent id"),
        (b"Pname\n.", "PERSID"),
        (b"\x82\x01.", "EXT1"),
        (b"(i" + HERE.encode() + b"\nIndex\n.", "INST"),
        (b"(" + INDEX + b"o.", "OBJ"),
        (INDEX + b")}\x92.", "NEWOBJ_EX"),
        (b"\x8f.", "EMPTY_SET"),
        (b"\x96\x00\x00\x00\x00\x00\x00\x00\x00.", "BYTEARRAY8"),
        (b"\x97.", "NEXT_BUFFER"),
        (b"K\x01\x98.", "READONLY_BUFFER"),
        (b"I1\n.", "INT"),
        (b"\x8b\xff\xff\xff\x7f.", None),
        (b"\x8a\x09" + b"\x00" * 8 + b"\x01.", "more than 64 bits"),
        (b"K\x01K\x02.", "results in several values"),
        (b"(K\x01.", "results in several values"),
        (b"K\x01.garbage", "bytes follow"),
        (b"\x94.", None),
        (b"R.", None),
        (b"h\x05.", None),
        (b"", None),
        (b"]q\x00h\x00a.", "contains itself"),
        (b"]q\x00(h\x00ta.", "contains itself"),
        (b"]" + b"]" * 100 + b"a" * 100 + b".", "nested"),
        (b"]2a.", "DUP"),
    ],
    ids=repr,
)
def test_programs_that_do_more(program: bytes, told: str | None) -> None:
    before = [dict(vars(one)) for one in CLASSES]
    with pytest.raises(Exception, match=told) as error:
        load(program, VOCABULARY)
    assert told is None or isinstance(error.value, RefusedError)
    assert [dict(vars(one)) for one in CLASSES] == before


def test_no_method_of_a_class_is_called() -> None:
    made = load(named(HERE, "Trap") + b")\x81}" + text("value") + b"K\x01sb.", VOCABULARY)
    assert type(made) is Trap
    assert vars(made) == {"value": 1}


def test_shared_parts_are_counted_in_each_place() -> None:
    """Sixty lines stand for 2**60 values; nothing may walk through them."""
    doubling = b"".join(
        b"](h" + bytes([k]) + b"h" + bytes([k]) + b"eq" + bytes([k + 1]) for k in range(60)
    )
    with pytest.raises(RefusedError, match="too many"):
        load(b"(]q\x00" + doubling + b"t.", VOCABULARY)


def test_a_shared_list_is_looked_through_once() -> None:
    """In a list of n places each of which is this list of n values, that is n * n otherwise."""
    n = 30_000
    row = b"](" + b"N" * n + b"eq\x00"
    began = time.process_time()
    with pytest.raises(RefusedError, match="too many"):
        load(b"](" + row + b"h\x00" * (n - 1) + b"e.", VOCABULARY)
    assert time.process_time() - began < 10


def test_keys_of_one_hash_are_few() -> None:
    """Their hash is no secret; n of them take n * n steps to be inserted."""
    PRIME = 2**61 - 1  # numbers that differ by it have one hash
    keys = [tuple(PRIME * (bits >> k & 1) for k in range(8)) for bits in range(256)]
    assert len({hash(key) for key in keys}) == 1
    few = dict.fromkeys(keys[: plain_pickle.MAX_EQUAL_HASHES])
    assert load(pickle.dumps(few), VOCABULARY) == few
    with pytest.raises(RefusedError, match="keys of the same hash"):
        load(pickle.dumps(dict.fromkeys(keys)), VOCABULARY)


def test_large_arguments_are_not_used_again_and_again() -> None:
    """A call may copy its argument, which is in the pickle once."""
    function = named("collections", "OrderedDict")
    calls = b"](" + (function + b"h\x00R") * 100 + b"e"
    with pytest.raises(RefusedError, match="in too many calls"):
        load(
            text("x" * 100_000) + b"\x85q\x00" + calls + b"\x86.",
            {("collections", "OrderedDict"): Function(str)},
        )


def test_the_number_of_operations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MAX_OPERATIONS", 10)
    with pytest.raises(RefusedError, match="more than 10 operations"):
        load(pickle.dumps(list(range(10))), VOCABULARY)


OPCODES = [opcode.code.encode("latin1") for opcode in pickletools.opcodes]
ARGUMENTS = [
    *(named(*name) for name in VOCABULARY),
    *(named(*name) for name in (("os", "system"), ("builtins", "eval"), ("pathlib", "Path"))),
    *(text(word) for word in ("name", "offset", "RED", "__class__", "__dict__", HERE, "Index")),
    *(b"K" + bytes([number]) for number in range(4)),
    *(b"q" + bytes([number]) for number in range(4)),
    *(b"h" + bytes([number]) for number in range(4)),
    *(b"N", b")", b"]", b"}", b"(", b"t", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u"),
    *(b"R", b"b", b"\x81", b"\x93", b"\x94"),
]


def plain(value: Any) -> bool:
    """Whether a value, all the way down, is one that the vocabulary may build."""
    if type(value) in (list, tuple):
        return all(plain(part) for part in value)
    if type(value) in (dict, OrderedDict):
        return all(plain(part) for pair in value.items() for part in pair)
    if type(value) in (Index, Entry, Trap):
        return all(plain(part) for part in vars(value).values())
    return type(value) in (type(None), bool, int, float, str, bytes, Color)


@given(st.lists(st.sampled_from(ARGUMENTS) | st.sampled_from(OPCODES), max_size=40))
@settings(max_examples=600, deadline=None)
def test_any_program_gives_plain_values_or_an_error(parts: list[bytes]) -> None:
    before = [dict(vars(one)) for one in CLASSES]
    try:
        value = load(b"".join(parts) + b".", VOCABULARY)
    except Exception:  # which one does not matter: `reading` makes a UserError of each
        value = None
    assert plain(value)
    assert [dict(vars(one)) for one in CLASSES] == before


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_plain_values_or_an_error(data: bytes) -> None:
    try:
        value = load(data, VOCABULARY)
    except Exception:
        value = None
    assert plain(value)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from(Color),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(0, 99), inner)
        | st.builds(lambda parts: Entry((1,), parts), st.lists(inner))
    ),
    max_leaves=20,
)


@given(values, st.integers(3, 5))
@settings(max_examples=150, deadline=None)
def test_whatever_is_plain_comes_back(value: Any, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol), VOCABULARY) == value
