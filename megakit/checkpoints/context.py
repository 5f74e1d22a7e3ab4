"""The context of a checkpoint: how its model was configured, in NeMo's own format, read safely."""

import contextlib
import json
import pickletools
import re
import sys
from pathlib import Path
from typing import Any

from megakit.checkpoints.folders import CONTEXT
from megakit.checkpoints.manifest import refuse_links
from megakit.errors import UserError
from megakit.runtime.foreign_files import JSON_BYTES, read_regular_file, reading

_USE_ANOTHER = "It is damaged or not to be trusted. Use another checkpoint."
#: The most values that settings have, counting a shared one in each of its places.
_MAX_VALUES = 100_000
#: A pickle or yaml that lies beside io.json is looked through up to this size, and refused above.
_LOOKED_THROUGH_BYTES = 4 << 20
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}

#: Parts of the standard library that settings are made of. Any other in a context is no setting.
_HARMLESS = {
    *("collections", "dataclasses", "datetime", "decimal", "enum", "fractions", "numbers"),
    *("pathlib", "signal", "types", "typing"),
}
_HARMLESS_BUILTINS = {
    *("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "set"),
    *("slice", "str", "tuple", "type", "NoneType", "Ellipsis"),
}


def write_context(folder: Path, module: Any) -> None:
    """Writes a Lightning module's settings where NeMo's `io.load_context(..., "model")` finds them.

    Only the module: the trainer's part would pickle callbacks, strategy and plugins.
    """
    from nemo.lightning.io.pl import TrainerContext

    TrainerContext(model=module, trainer=None, extra={}).io_dump(folder, yaml_attrs=[])


def read_model_settings(checkpoint: Path) -> dict[str, Any]:
    """The settings of the model's config as they were when the checkpoint was saved.

    NeMo's own reader imports and calls whatever the file names. This one takes numbers, strings,
    booleans, None and containers of them, imports nothing, calls nothing, and passes over the rest.
    Pickles and yaml that lie beside the file are never loaded, only looked through.

    Args:
        checkpoint: The folder that holds `context/`.

    Returns:
        The values by the names of the config's fields.

    Raises:
        UserError: There is no context, it cannot be understood, or it names something that has no
            place among settings, such as a function of the module `os`.
    """
    path = checkpoint / CONTEXT / "io.json"
    with reading(path, _USE_ANOTHER):
        refuse_links(checkpoint)
        content = _content(checkpoint)
        objects = content["objects"]
        config = _items(
            objects, _items(objects, _items(objects, content["root"])["model"])["config"]
        )
        budget = _Budget()
        values = {name: _plain(objects, item, budget) for name, item in config.items()}
        _refuse_strange_files(path.parent)
    return {name: value for name, value in values.items() if value is not _NOT_PLAIN}


def _content(checkpoint: Path) -> dict[str, Any]:
    """What is in io.json, if nothing in it is strange."""
    path = checkpoint / CONTEXT / "io.json"
    if not path.is_file():
        raise UserError(f"{checkpoint}: has no {CONTEXT}/io.json with its model's settings.")
    content = json.loads(read_regular_file(path, JSON_BYTES))
    if type(content) is not dict:
        raise ValueError(f"it holds a {type(content).__name__}")
    if strange := sorted(set(_strange_names(content))):
        raise ValueError(f"it names {', '.join(strange)}, which no settings need")
    return content


def read_config_class(checkpoint: Path) -> tuple[str, str]:
    """Module and name of the class that configured a checkpoint's model; neither is imported.

    Raises:
        UserError: As `read_model_settings` does, or the context does not tell.
    """
    read_model_settings(checkpoint)  # refuses what is damaged or not to be trusted
    with reading(checkpoint / CONTEXT / "io.json", _USE_ANOTHER):
        content = _content(checkpoint)
        objects = content["objects"]
        module = _items(objects, content["root"])["model"]
        config = objects[_items(objects, module)["config"]["key"]]
        told = _items(objects, config["metadata"])["fn_or_cls"]
        return str(told["module"]), str(told["name"])


_NOT_PLAIN = object()


class _Budget:
    """Limits the number of values: 60 nested `[x, x]` stand for 2**60 values in a small file."""

    def __init__(self) -> None:
        self.left = _MAX_VALUES

    def spend(self) -> None:
        """Counts one value."""
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"its settings have more than {_MAX_VALUES:,} values")


def _items(objects: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a referenced object, which fiddle writes as `Attr(name='...')`."""
    pairs = objects[reference["key"]]["items"]
    return {key.removeprefix("Attr(name='").removesuffix("')"): item for key, item in pairs}


def _plain(objects: dict[str, Any], item: Any, budget: _Budget) -> Any:
    """A value of plain types, or `_NOT_PLAIN`."""
    budget.spend()
    if not isinstance(item, dict):
        return _plain_leaf(item)
    if item.get("type") == "leaf":
        return _plain_leaf(item["value"])
    if item.get("type") != "ref":
        return _NOT_PLAIN
    target = objects[item["key"]]
    kind = target["type"]
    if kind.get("module") != "builtins" or kind.get("name") not in _CONTAINERS:
        return _NOT_PLAIN
    values = [_plain(objects, element, budget) for _, element in target["items"]]
    if any(value is _NOT_PLAIN for value in values):
        return _NOT_PLAIN
    return _CONTAINERS[kind["name"]](values)


def _plain_leaf(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else _NOT_PLAIN


def _strange_names(content: Any) -> list[str]:
    """Names of functions and classes, anywhere in the file, that can do more than hold a setting.

    None of them is ever imported; a file that holds one was tampered with, and the user shall know.
    Other people's modules are not judged: the settings of their models name them.
    """
    if isinstance(content, list):
        return [name for part in content for name in _strange_names(part)]
    if not isinstance(content, dict):
        return []
    found = [name for part in content.values() for name in _strange_names(part)]
    module, name = content.get("module"), content.get("name")
    if content.get("type") == "pyref" and _is_strange(module, name):
        found.append(f"{module}.{name}")
    return found


def _is_strange(module: Any, name: Any) -> bool:
    top = str(module).partition(".")[0]
    known = name in _HARMLESS_BUILTINS if top == "builtins" else top in _HARMLESS
    return (top in sys.stdlib_module_names or top in ("posix", "nt")) and not known


def _refuse_strange_files(context: Path) -> None:
    """Looks through what NeMo leaves beside io.json: a pickle or yaml that would run something.

    Raises:
        UserError: There is one; nothing of it was run.
    """
    problems = []
    for path in sorted(path for path in context.rglob("*") if path.is_file()):
        with reading(path, _USE_ANOTHER):
            found = _names_in_file(path)
        problems += [f"{path}: not to be trusted: it names {name}." for name in sorted(set(found))]
    if problems:
        raise UserError(problems)


def _names_in_file(path: Path) -> list[str]:
    is_yaml, is_pickle = path.suffix in (".yaml", ".yml"), path.suffix in (".pkl", ".pickle")
    if not is_yaml and not is_pickle:
        with path.open("rb") as file:
            is_pickle = file.read(1) == b"\x80"
    if not is_yaml and not is_pickle:
        return []
    content = read_regular_file(path, _LOOKED_THROUGH_BYTES)
    return (
        _names_in_yaml(content.decode(errors="replace")) if is_yaml else _names_in_pickle(content)
    )


def _names_in_yaml(text: str) -> list[str]:
    tags = re.findall(r"!!python/[^\s\]},]+|tag:yaml.org,2002:python/[^\s>\]},]+", text)
    targets = re.findall(r"""_target_["']?\s*:\s*["']?([\w.]+)""", text)
    return tags + [name for name in targets if _is_strange(*name.rpartition(".")[::2])]


def _names_in_pickle(content: bytes) -> list[str]:
    """What a pickle looks up, without running it; methods are looked up by `getattr`."""
    found, texts = [], ["", ""]
    with contextlib.suppress(ValueError):  # what follows cannot be read by anybody
        for operation, argument, _ in pickletools.genops(content):
            if isinstance(argument, str):
                texts = [texts[1], argument]
            if operation.name in ("GLOBAL", "INST"):
                found.append(tuple(str(argument).split(" ", 1)))
            elif operation.name == "STACK_GLOBAL":
                found.append((texts[0], texts[1]))
    return [
        f"{module}.{name}"
        for module, name in found
        if _is_strange(module, name) and (module, name) != ("builtins", "getattr")
    ]
