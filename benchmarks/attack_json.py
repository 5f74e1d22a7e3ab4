"""Mutations of `metadata.json` and `manifest.json`, and zarr's files."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import attack_pickles as pickles
from attack_victim import BACKENDS, Victim

from megakit.checkpoints.manifest import MANIFEST, read_manifest, write_manifest

Named = tuple[str, Callable[[Victim], None], bool]
DEEP = 100_000
VALUES: tuple[Any, ...] = (
    *("", "x", "a\nb\x1b[31m", "../../canary", "x" * 100_000, None, True, -1, 0, 2**63, 10**400),
    *(1e308, float("nan"), float("inf"), [], {}, ["x"], {"x": 1}),
)

#: Whole texts in the place of any JSON file.
TEXTS: dict[str, str] = {
    "empty": "",
    "an open brace": "{",
    "a list": "[]",
    "null": "null",
    "a number": "5",
    "text": '"x"',
    "NaN": "NaN",
    "nested lists": "[" * DEEP + "]" * DEEP,
    "nested objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "a long number": "1" * 1_000_000,
    "a large exponent": "1e999999",
    "a byte order mark": "\ufeff{}",
    "a lone surrogate": '{"\\ud800": "\\udfff"}',
    "control characters": '{"\\u001b[31m": "\\n"}',
    "a key twice": '{"a": 1, "a": 2}',
    "spaces": " " * 10_000_000,
}
GOOD = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def write_text(name: str, text: str) -> Callable[[Victim], None]:
    def apply(victim: Victim) -> None:
        (victim.folder / name).write_text(text)

    return apply


def backends() -> Iterator[Named]:
    value: Any
    for what, text in TEXTS.items():
        yield what, write_text(BACKENDS, text), False
    for field in GOOD:
        for value in (
            "zarr",
            "torch",
            "torch_dist ",
            "fully_parallel",
            99,
            -1,
            None,
            [],
            {},
            10**30,
        ):
            if GOOD[field] != value:
                changed = json.dumps({**GOOD, field: value})
                yield f"{field} {value!r}", write_text(BACKENDS, changed), False
        missing = json.dumps({name: value for name, value in GOOD.items() if name != field})
        yield f"no {field}", write_text(BACKENDS, missing), False


def zarr() -> Iterator[Named]:
    """Megatron's old backend, which unpickles a file for each object among the tensors."""
    changed = {**GOOD, "sharded_backend": "zarr"}
    for name in ("os.system", "exec", "partial", "pickle.loads", "code object"):
        for common in ("torch", "zarr"):
            for with_arrays in (False, True):

                def apply(
                    victim: Victim,
                    name: str = name,
                    common: str = common,
                    with_arrays: bool = with_arrays,
                ) -> None:
                    payload = pickles.plain(pickles.DANGEROUS[name](victim.trace))
                    weights = victim.folder / "weights"
                    content = {**changed, "common_backend": common}
                    (weights / "metadata.json").write_text(json.dumps(content))
                    _poison(weights, payload, with_arrays)

                what = " and arrays" if with_arrays else ""
                yield f"{name}, common {common}{what}", apply, False


def _poison(weights: Path, payload: bytes, with_arrays: bool) -> None:
    for layer in range(1, 5):
        for folder in ("module.linear", "linear"):
            path = weights / f"{folder}{layer}._extra_state" / "shard_0_1.pt"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(payload)
        for part in ("weight", "bias") * with_arrays:
            array = weights / f"module.linear{layer}.{part}"
            array.mkdir()
            told = {"shape": [10**6, 10**6], "chunks": [1, 1], "dtype": "|O", "zarr_format": 2}
            told |= {"fill_value": None, "order": "C", "compressor": None}
            told |= {"filters": [{"id": "pickle"}]}
            (array / ".zarray").write_text(json.dumps(told))
            (array / "0.0").write_bytes(payload)


def manifests() -> Iterator[tuple[str, Callable[[Victim], None]]]:
    for what, text in TEXTS.items():
        yield what, write_text(MANIFEST, text)
    own: dict[str, tuple[Any, ...]] = {
        "stage": ("finetune", "pretrain", "predict", "vit"),
        "model": ("os.system", "PretrainModel", "ExampleFineTuneModel"),
        "dataset": ("mnist", "digits.py", {"a": "b"}),
        "step": (3, 10**30, 2.5),
        "val_loss": (-1e300, 0.5, 10**400),
        "run": ({"max_steps": 10**9}, {"\x1b[31m": []}, {"best_by": "os.system"}),
        "versions": ({"torch": "99"}, {"torch": 5}),
        "format_version": (2, 0, 1.0),
        "files": (),
    }
    for field, values in own.items():
        for value in (*values, *VALUES):
            yield f"{field} {value!r:.40}", _manifest(field, value)
    entry = {"size": 1, "sha256": "0" * 64}
    for name in ("../../canary", "/etc/passwd", "a\nb", "\udcff", "\x1b[31m", "", ".", "x" * 5000):
        yield f"lists {name[:40]!r}", _listing(name, entry)
    for value in (-1, 0, 2**70, "5", None, True, 1.5, []):
        yield f"size {value!r}", _listing("weights/common.pt", {**entry, "size": value})
    for value in (5, None, "", "\x1b[31m", [], "Z" * 64):
        yield f"sha256 {value!r}", _listing("weights/common.pt", {"sha256": value})
    for value in (None, 5, [], "x", {}):
        yield f"entry {value!r}", _listing("weights/common.pt", value)

    def more(victim: Victim) -> None:
        path = victim.folder / MANIFEST
        path.write_text(json.dumps({**json.loads(path.read_text()), "__class__": "os.system"}))

    yield "one more field", more


def _manifest(field: str, value: Any) -> Callable[[Victim], None]:
    def apply(victim: Victim) -> None:
        manifest = read_manifest(victim.folder)
        changed = value
        if getattr(manifest, field) == value and type(value) is type(getattr(manifest, field)):
            changed = f"{value}?"
        _write(victim, replace(manifest, **{field: changed}))

    return apply


def _listing(name: str, entry: Any) -> Callable[[Victim], None]:
    """Changes or adds the entry of a file."""

    def apply(victim: Victim) -> None:
        manifest = read_manifest(victim.folder)
        changed = entry
        if isinstance(entry, dict) and entry:
            changed = {**manifest.files.get(name, {}), **entry}
        _write(victim, replace(manifest, files={**manifest.files, name: changed}))

    return apply


def _write(victim: Victim, manifest: Any) -> None:
    try:
        write_manifest(victim.folder, manifest)
    except (TypeError, ValueError, AttributeError):  # it may refuse what an attacker writes
        (victim.folder / MANIFEST).write_text(json.dumps(asdict(manifest)))
