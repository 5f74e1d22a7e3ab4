"""What of a module's text changes its digests: not its form, but whatever it computes."""

from pathlib import Path

import pytest

from tests.megakit.job.program.written import changes

LONG = "".join(["1"] + [" + 1"] * 2999)
#: The script, what it runs, and what is replaced by what.
CHANGES = {
    "the order of fields": (
        *("class A:\n    a: int = 1\n    b: int = 1", "A"),
        *("a: int = 1\n    b: int = 1", "b: int = 1\n    a: int = 1"),
    ),
    "a loop on import": ("class A: pass\nfor c in (A,):\n    c.w = 1", "None", "w = 1", "w = 2"),
    "a long expression": (f"X = {LONG}", "X", "1 + 1", "1 + 2"),
    "a long comparison": (
        *(f"X = 1\nif {' + '.join(['X'] * 900)} == 0:\n    X = 2", "None", "X = 2", "X = 3"),
    ),
    "an integer of thousands of digits": (f"X = 0x{'f' * 5000}", "X", "0xf", "0xe"),
    "a keyword of a class": (
        *("import abc\nclass A(abc.ABC, frozen=True): pass", "A", "frozen=True", "frozen=False"),
    ),
    "a decorator of a class": (
        "from dataclasses import dataclass\n@dataclass(order=True)\nclass A: pass",
        *("A", "order=True", "order=False"),
    ),
    "a call whose result is thrown away": (
        *("class A: pass\n_ = setattr(A, 'w', 1)", "A", "'w', 1", "'w', 2"),
    ),
    "a block that is not used for its name": (
        *("class A: pass\nwith A() as X: A.w = 1", "None", "w = 1", "w = 2"),
    ),
    "values that count as false": ("X = ''", "X", "''", "None"),
    "values that are equal": ("X = 1", "X", "X = 1", "X = True"),
}
SAME = {
    "the order of methods": (
        *("class A:\n    def a(self): return 1\n    def b(self): return 2", "A"),
        "def a(self): return 1\n    def b(self): return 2",
        "def b(self): return 2\n    def a(self): return 1",
    ),
    "an asynchronous function": (
        *("async def f(x: int = 1) -> int: return x", "f", "x: int = 1) -> int", "x=1)"),
    ),
    "the prefix of a text": ("X = 'a'", "X", "'a'", "u'a'"),
    "an annotation inside of a function": (
        *("def f():\n    x = 1\n    return x", "f", "x = 1", "x: int = 1"),
    ),
    "a placeholder in a class": ("class A:\n    pass\n    x = 1", "A", "    pass\n", ""),
    "a variable of a comprehension": (
        "UNUSED = [i for i in range(3)]\ndef f():\n    i = 1\n    return i",
        *("f", "range(3)", "range(4)"),
    ),
}


@pytest.mark.parametrize("case", [*CHANGES, *SAME])
def test_what_counts_of_the_text(tmp_path: Path, case: str) -> None:
    train, run, old, new = {**CHANGES, **SAME}[case]
    before, after = changes(tmp_path, train, {}, run, old, new)
    assert (before != after) is (case in CHANGES)
