"""Replacing what is there, refusing what is not, and the list of both."""

import json
import sys
from types import ModuleType

import pytest

from megakit.runtime import patching
from megakit.runtime.patching import Patch, patch, require_attribute, stand_in


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with two attributes; the list of patches is empty."""
    monkeypatch.setattr(patching, "PATCHES", [])
    monkeypatch.delenv("MEGAKIT_STOCK", raising=False)
    module = ModuleType("stack")
    vars(module).update(there="theirs", Class=type("Class", (), {"method": "theirs"}))
    return module


def test_a_name_that_is_there_and_one_that_the_stack_lacks(stack: ModuleType) -> None:
    patch(stack, "there", None, group="needed", reason="why")
    patch(stack.Class, "method", "ours", group="safe", reason="", worth="3%", when="now")
    assert require_attribute(stack, "there") is None
    assert stack.Class.method == "ours"
    assert require_attribute("json", "loads") is json.loads
    message = r"stack\.gone is gone from this version of the stack\. .* requirements\.lock"
    with pytest.raises(RuntimeError, match=message):
        patch(stack, "gone", None, group="needed", reason="")
    with pytest.raises(RuntimeError, match=r"json\.absent is gone"):
        require_attribute("json", "absent")
    assert not hasattr(stack, "gone")
    assert [
        Patch("stack", "there", "needed", "why", worth="", when="always"),
        Patch(f"{__name__}.Class", "method", "safe", "", worth="3%", when="now"),
    ] == patching.PATCHES


def test_stock_leaves_out_what_is_only_fast(
    stack: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAKIT_STOCK", "1")
    patch(stack, "there", "fast", group="fast", reason="")
    assert stack.there == "theirs"
    patch(stack, "there", "safe", group="safe", reason="")
    assert stack.there == "safe"
    assert [one.group for one in patching.PATCHES] == ["safe"]
    with pytest.raises(RuntimeError, match="gone"):  # a lock that does not fit is noticed anyway
        patch(stack, "gone", None, group="fast", reason="")


def test_a_stand_in_is_for_a_module_that_is_not_imported(stack: ModuleType) -> None:
    for name in ("json", "made_up"):
        stand_in(name, {"one": 1}, group="needed", reason="it is absent")
    assert sys.modules["json"] is json
    assert sys.modules.pop("made_up").one == 1
    assert [one.owner for one in patching.PATCHES] == ["made_up"]
