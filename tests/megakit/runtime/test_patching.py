"""Replacing what is there, and refusing what is not."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from megakit.runtime.patching import existing, replace


@pytest.fixture
def module() -> ModuleType:
    module = ModuleType("stack")
    vars(module)["there"] = "theirs"
    return module


def test_a_name_that_is_there(module: ModuleType) -> None:
    assert existing(module, "there") == "theirs"
    replace(module, "there", "ours")
    assert existing(module, "there") == "ours"


@pytest.mark.parametrize("value", [None, 0, ""])
def test_what_is_there_may_be_false(module: ModuleType, value: object) -> None:
    replace(module, "there", value)
    assert existing(module, "there") == value


def test_a_name_that_the_stack_lacks_is_an_error(module: ModuleType) -> None:
    message = r"stack\.gone is gone from this version of the stack\. .* requirements\.lock"
    with pytest.raises(RuntimeError, match=message):
        replace(module, "gone", None)
    with pytest.raises(RuntimeError, match=message):
        existing(module, "gone")
    assert not hasattr(module, "gone")


def test_the_message_names_a_class_and_its_method() -> None:
    class Writer:
        pass

    with pytest.raises(RuntimeError, match=r"Writer\.write is gone"):
        replace(Writer, "write", None)


@pytest.mark.parametrize(
    ("module", "message"),
    [("json", r"json\.absent is gone"), ("json.absent_module", r"json\.absent_module\.absent is")],
)
def test_a_module_by_name(module: str, message: str) -> None:
    assert existing("json", "loads") is json.loads
    with pytest.raises(RuntimeError, match=message):
        existing(module, "absent")


def test_a_module_that_needs_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To install the versions of the lock is no remedy for it."""
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_absent")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_absent"):
        existing("needs_more", "anything")
