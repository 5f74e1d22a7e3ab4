"""Reads a pickle without Python's unpickler, and returns only plain values.

Python's unpickler calls any function that a pickle names, and sets attributes of any object that a
pickle names. A list of allowed names is not enough: with one allowed class, the opcode `BUILD` can
change this class for the whole process. Here a name in a pickle becomes an entry of a vocabulary,
never a class or a function. The entry checks its arguments and builds one kind of value.
"""

import pickle
import pickletools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_OPERATIONS = 10_000_000
#: Limits of a result: depth of nesting, and number of values; a shared value counts once per use.
MAX_DEPTH = 64
MAX_VALUES = 10_000_000
#: Keys of one dictionary that may have the same hash: inserting n such keys takes n * n steps.
MAX_EQUAL_HASHES = 100
#: Limit of the total length of all call arguments, per byte of the pickle. A pickle can store a
#: large argument once and then use it in any number of calls.
ARGUMENTS_PER_BYTE = 4
#: Upper bound of integers: no size, offset or counter in a checkpoint is larger.
MAX_INT = 1 << 63

_LEAVES = (type(None), bool, int, float, str, bytes)


class RefusedError(pickle.UnpicklingError, ValueError):
    """A pickle does something that no checkpoint needs."""


def require(condition: bool, message: str) -> None:
    """Raises RefusedError with a message unless a condition is true."""
    if not condition:
        raise RefusedError(message)


@dataclass(frozen=True)
class Constant:
    """A name that stands for one immutable value, such as `torch.float32`."""

    value: Any


@dataclass(frozen=True)
class Function:
    """A name that a pickle may call. `build` receives the arguments and checks them."""

    build: Callable[..., Any]


@dataclass(frozen=True)
class Enumeration:
    """An Enum class: a pickle may name its members, by value or through `getattr`."""

    cls: Any

    def build(self, *arguments: Any) -> Any:
        """Returns the member with the given value."""
        (value,) = arguments
        kind = type(value)
        require(kind in (int, str), f"it looks up {self.cls.__name__} by a {kind.__name__}")
        return self.cls(value)


@dataclass(frozen=True)
class Record:
    """A class whose instances a pickle may create, with the given attributes only.

    Attributes:
        cls: The class. Its `__new__`, `__init__` and `__setattr__` are never called.
        names: Names of the attributes.
        from_state: Checks a state that is not a dictionary and converts it to attributes.
    """

    cls: type
    names: tuple[str, ...]
    from_state: Callable[[Any], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Argument:
    """A name that is valid only as an argument of functions and persistent ids, which check it."""

    value: Any


Entry = Constant | Function | Enumeration | Record | Argument
Vocabulary = Mapping[tuple[str, str], Entry]


def _path(*parts: Any) -> Path:
    require(all(type(part) is str for part in parts), "it has a path that is not text")
    return Path(*parts)


#: Paths as values. Python 3.13 names another module than earlier and later versions.
PATHS = {(module, "PosixPath"): Function(_path) for module in ("pathlib", "pathlib._local")}


def get_member(enumeration: Any, name: Any) -> Any:
    """Replaces `builtins.getattr`, with which Python 3.11.2 pickles a member of an Enum."""
    is_lookup = type(enumeration) is Enumeration and type(name) is str
    require(is_lookup, "it calls getattr, which checkpoints need only for members of an Enum")
    cls = enumeration.cls
    require(name in cls.__members__, f"it names {cls.__name__}.{name}, which does not exist")
    return cls.__members__[name]


def load(data: bytes, vocabulary: Vocabulary, storage: Callable[[Any], Any] | None = None) -> Any:
    """Returns the value in a pickle.

    Args:
        data: The pickle.
        vocabulary: The names that the pickle may use.
        storage: Checks and resolves persistent ids; None if persistent ids are not allowed.

    Raises:
        RefusedError: The pickle does something that plain values do not need, or is too large.
        ValueError: The pickle is damaged; other exceptions are possible as well.
    """
    machine = _Machine(vocabulary, storage, ARGUMENTS_PER_BYTE * len(data))
    end = 0
    for count, (opcode, argument, position) in enumerate(pickletools.genops(data)):
        if count >= MAX_OPERATIONS:
            raise RefusedError(f"it has more than {MAX_OPERATIONS:,} operations")
        step = _STEPS.get(opcode.name)
        if step is None:
            raise RefusedError(f"it uses pickle's {opcode.name}, which no checkpoint needs")
        step(machine, argument)
        end = (position or 0) + 1
    require(end == len(data), f"{len(data) - end:,} bytes follow its end")
    is_one = len(machine.stack) == 1 and not machine.marks
    require(is_one, "it results in several values")
    (value,) = machine.stack
    _check_result(value, machine)
    return value


class _Machine:
    """The state of a pickle's program: stack, marks and memo, as in Python's unpickler."""

    def __init__(
        self, vocabulary: Vocabulary, storage: Callable[[Any], Any] | None, arguments_left: int
    ) -> None:
        self.vocabulary = vocabulary
        self.storage = storage
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.arguments_left = arguments_left
        #: Number of keys by dictionary (its id) and hash.
        self.hashes: Counter[tuple[int, int]] = Counter()
        #: Instances whose attributes are not set yet, by id. References prevent reuse of the ids.
        self.fresh: dict[int, tuple[Any, Record]] = {}
        self.records = {one.cls: one for one in vocabulary.values() if isinstance(one, Record)}
        #: Types of plain values, and of values from the vocabulary's constants and functions.
        self.leaves: set[type] = set(_LEAVES)

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_integer(self, value: int) -> None:
        if not -MAX_INT <= value < MAX_INT:
            raise RefusedError("it has an integer of more than 64 bits")
        self.stack.append(value)

    def push_name(self, module: Any, name: Any) -> None:
        """Pushes the vocabulary entry of a name, or the value of the entry if it is a constant."""
        if type(module) is not str or type(name) is not str:
            raise RefusedError("it has a name that is not a string")
        entry = self.vocabulary.get((module, name))
        if entry is None:
            full_name = f"{module}.{name}"[:200]
            raise RefusedError(f"it names {full_name}, which no checkpoint needs")
        value = entry.value if isinstance(entry, Constant) else entry
        if isinstance(entry, Constant):
            self.leaves.add(type(value))
        self.stack.append(value)

    def push_storage(self, _: Any) -> None:
        if self.storage is None:
            raise RefusedError("it has a persistent id, which no checkpoint needs")
        self.stack.append(self.storage(self.stack.pop()))

    def mark(self, _: Any) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Returns the values that were pushed since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def pop(self, count: int) -> list[Any]:
        """Returns the topmost values, the topmost value last."""
        if len(self.stack) < count:
            raise RefusedError("it uses more values than it has")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def memoize(self, number: int | None) -> None:
        self.memo[len(self.memo) if number is None else number] = self.stack[-1]

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in (dict, OrderedDict) or len(items) % 2:
            raise RefusedError(f"it sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            _check_key(key, self.records)
            if type(key) is not str:  # hashes of strings are unpredictable
                place = id(target), hash(key)
                self.hashes[place] += 1
                if self.hashes[place] > MAX_EQUAL_HASHES:
                    raise RefusedError("it has a dictionary with too many keys of the same hash")
            target[key] = value

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise RefusedError(f"it appends to a {type(target).__name__}")
        target.extend(items)

    def call(self, _: Any) -> None:
        function, arguments = self.pop(2)
        if type(function) not in (Function, Enumeration) or type(arguments) is not tuple:
            raise RefusedError(f"it calls a {type(function).__name__}")
        sized = (one for one in arguments if isinstance(one, str | bytes | tuple))
        self.arguments_left -= sum(map(len, sized))
        if self.arguments_left < 0:
            raise RefusedError("it uses large arguments in too many calls")
        value = function.build(*arguments)
        self.leaves.add(type(value))
        self.stack.append(value)

    def new(self, _: Any) -> None:
        """Creates an instance without attributes."""
        record, arguments = self.pop(2)
        if type(record) is not Record or type(arguments) is not tuple or arguments:
            raise RefusedError(f"it creates an object of a {type(record).__name__}")
        value: Any = object.__new__(record.cls)
        self.fresh[id(value)] = (value, record)
        self.stack.append(value)

    def build(self, _: Any) -> None:
        """Sets the attributes of an instance, once."""
        state, target = self.stack.pop(), self.stack[-1]
        made, record = self.fresh.pop(id(target), (None, None))
        if record is None or made is not target:
            raise RefusedError(f"it sets attributes of a {type(target).__name__}")
        if record.from_state is not None:
            state = record.from_state(state)
            self.leaves.update(type(value) for value in state.values())
        if type(state) is not dict or not state.keys() <= set(record.names):
            raise RefusedError(f"it sets unknown attributes of {record.cls.__name__}")
        target.__dict__.update(state)


def _check_key(key: Any, records: Mapping[type, Record]) -> None:
    """Raises RefusedError unless hashing the key runs no code from the pickle."""
    for part in vars(key).values() if type(key) in records else [key]:
        if isinstance(part, tuple):
            if any(type(number) is not int for number in part):
                raise RefusedError("it has a key that is a tuple of values other than integers")
        elif type(part) not in _LEAVES:
            raise RefusedError(f"it has a key that is a {type(part).__name__}")


#: Opcodes that Python's pickler writes for plain values, protocols 2 to 5. All others are refused.
_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, argument: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _Machine.push_integer),
    **dict.fromkeys(("BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"), _Machine.push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES"), _Machine.push),
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT"), _Machine.memoize),
    **dict.fromkeys(
        ("BINGET", "LONG_BINGET"), lambda machine, number: machine.push(machine.memo[number])
    ),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": _Machine.mark,
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_mark())),
    "TUPLE1": lambda machine, _: machine.push(tuple(machine.pop(1))),
    "TUPLE2": lambda machine, _: machine.push(tuple(machine.pop(2))),
    "TUPLE3": lambda machine, _: machine.push(tuple(machine.pop(3))),
    "APPEND": lambda machine, _: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    "GLOBAL": lambda machine, names: machine.push_name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.push_name(*machine.pop(2)),
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.new,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.push_storage,
}


def _check_result(root: Any, machine: _Machine) -> None:
    """Raises RefusedError for a vocabulary entry, a cycle, deep nesting or excessive sharing.

    With shared values, a small pickle causes endless work in code that walks through the result.
    Replacing x with `[x, x]` ten times turns one value into a thousand. Sixty replacements make
    more values than a program can visit.
    """
    # Depth and number of values of every measured container, by id; None while it is measured.
    known: dict[int, tuple[int, int] | None] = {}
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        value, parts_are_known = waiting.pop()
        if not parts_are_known and id(value) in known:
            if known[id(value)] is None:
                raise RefusedError("it has a value that contains itself")
            continue
        parts = _parts(value, machine)
        if parts is None:
            if type(value) not in machine.leaves:
                raise RefusedError(f"it results in a {type(value).__name__}")
        elif parts_are_known:
            measured = [known.get(id(part)) or (0, 1) for part in parts]
            depth = 1 + max((depth for depth, _ in measured), default=0)
            values = 1 + sum(values for _, values in measured)
            if depth > MAX_DEPTH or values > MAX_VALUES:
                raise RefusedError(f"it has too many values ({values:,}), nested {depth} deep")
            known[id(value)] = (depth, values)
        else:
            known[id(value)] = None
            waiting.append((value, True))
            waiting += [(part, False) for part in parts]


def _parts(value: Any, machine: _Machine) -> list[Any] | None:
    """Returns the items of a container or the attributes of a record; None for other values."""
    if type(value) in (list, tuple):
        return list(value)
    if type(value) in (dict, OrderedDict):
        return [*value.keys(), *value.values()]
    return list(vars(value).values()) if type(value) in machine.records else None
