"""Replacing what is there, and refusing what is not."""

import json
from types import ModuleType

import pytest

from megakit.runtime.patching import existing, replace


def test_a_name_that_is_there_and_one_that_the_stack_lacks() -> None:
    module = ModuleType("stack")
    vars(module)["there"] = "theirs"
    replace(module, "there", None)
    assert existing(module, "there") is None
    message = r"stack\.gone is gone from this version of the stack\. .* requirements\.lock"
    with pytest.raises(RuntimeError, match=message):
        replace(module, "gone", None)
    with pytest.raises(RuntimeError, match=message):
        existing(module, "gone")
    assert not hasattr(module, "gone")


@pytest.mark.parametrize(
    ("module", "message"),
    [("json", r"json\.absent is gone"), ("json.absent_module", r"json\.absent_module\.absent is")],
)
def test_a_module_by_name(module: str, message: str) -> None:
    assert existing("json", "loads") is json.loads
    with pytest.raises(RuntimeError, match=message):
        existing(module, "absent")
