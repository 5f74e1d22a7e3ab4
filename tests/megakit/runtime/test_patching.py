"""Replacing what is there, and refusing what is not."""

import json
from types import ModuleType

import pytest

from megakit.runtime.patching import patch, require_attribute


def test_a_name_that_is_there_and_one_that_the_stack_lacks() -> None:
    module = ModuleType("stack")
    vars(module)["there"] = "theirs"
    patch(module, "there", None)
    assert require_attribute(module, "there") is None
    assert require_attribute("json", "loads") is json.loads
    message = r"stack\.gone is gone from this version of the stack\. .* requirements\.lock"
    with pytest.raises(RuntimeError, match=message):
        patch(module, "gone", None)
    with pytest.raises(RuntimeError, match=r"json\.absent is gone"):
        require_attribute("json", "absent")
    assert not hasattr(module, "gone")
