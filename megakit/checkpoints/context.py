"""The context of a checkpoint: how its model was configured, in NeMo's own format, read safely."""

import contextlib
import json
import pickletools
import re
import sys
from pathlib import Path
from typing import Any

from megakit.checkpoints.layout import CONTEXT
from megakit.checkpoints.manifest import refuse_links
from megakit.errors import UserError

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
    refuse_links(checkpoint)
    if not path.is_file():
        raise UserError(f"{checkpoint}: has no {CONTEXT}/io.json with its model's settings.")
    try:
        content = json.loads(path.read_text())
        objects = content["objects"]
        config = _items(
            objects, _items(objects, _items(objects, content["root"])["model"])["config"]
        )
        values = {name: _plain(objects, item) for name, item in config.items()}
        strange = sorted(set(_strange_names(content)))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UserError(f"{path}: damaged ({error!r}). Use another checkpoint.") from error
    if strange:
        raise UserError(
            f"{path}: damaged or not to be trusted: it names {', '.join(strange)}, "
            "which no settings need. Use another checkpoint."
        )
    _refuse_strange_files(path.parent)
    return {name: value for name, value in values.items() if value is not _NOT_PLAIN}


def read_config_class(checkpoint: Path) -> tuple[str, str]:
    """Module and name of the class that configured a checkpoint's model; neither is imported.

    Raises:
        UserError: As `read_model_settings` does, or the context does not tell.
    """
    read_model_settings(checkpoint)  # refuses what is damaged or not to be trusted
    path = checkpoint / CONTEXT / "io.json"
    content = json.loads(path.read_text())
    objects = content["objects"]
    module = _items(objects, content["root"])["model"]
    try:
        config = objects[_items(objects, module)["config"]["key"]]
        told = _items(objects, config["metadata"])["fn_or_cls"]
        return str(told["module"]), str(told["name"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{path}: does not tell the class of its model's config ({error!r}). "
            "Use another checkpoint."
        ) from error


_NOT_PLAIN = object()


def _items(objects: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a referenced object, which fiddle writes as `Attr(name='...')`."""
    pairs = objects[reference["key"]]["items"]
    return {key.removeprefix("Attr(name='").removesuffix("')"): item for key, item in pairs}


def _plain(objects: dict[str, Any], item: Any) -> Any:
    """A value of plain types, or `_NOT_PLAIN`."""
    if not isinstance(item, dict):
        return item
    if item.get("type") == "leaf":
        value = item["value"]
        return value if value is None or isinstance(value, bool | int | float | str) else _NOT_PLAIN
    if item.get("type") != "ref":
        return _NOT_PLAIN
    target = objects[item["key"]]
    kind = target["type"]
    if kind.get("module") != "builtins" or kind.get("name") not in _CONTAINERS:
        return _NOT_PLAIN
    values = [_plain(objects, element) for _, element in target["items"]]
    if any(value is _NOT_PLAIN for value in values):
        return _NOT_PLAIN
    return _CONTAINERS[kind["name"]](values)


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
        content = path.read_bytes()
        if path.suffix in (".yaml", ".yml"):
            found = _names_in_yaml(content.decode(errors="replace"))
        elif content[:1] == b"\x80" or path.suffix in (".pkl", ".pickle"):
            found = _names_in_pickle(content)
        else:
            continue
        problems += [f"{path}: not to be trusted: it names {name}." for name in sorted(set(found))]
    if problems:
        raise UserError(problems)


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
