"""Mutations of `.metadata` as an object, and of the tensors and objects that it locates."""

import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from attack_victim import METADATA, Victim

Named = tuple[str, Callable[[Victim], None], bool]
EXTRA_STATE = "module.linear1._extra_state/shard_0_1"
WEIGHT = "module.linear1.weight"

#: What relative_path, offset and length of a storage info may be set to.
PATHS: tuple[Any, ...] = (
    *("../../canary", "../common.pt", "/etc/passwd", "/dev/zero", "", ".", "..", "a\0b", "a\nb"),
    *(
        "__0_0.distcp/",
        "./__0_0.distcp",
        "nothing",
        "\x1b[31m",
        "x" * 5000,
        "common.pt",
        ".metadata",
    ),
    *(5, None, b"__0_0.distcp", Path("__0_0.distcp"), Path("../../canary"), [], {}, ("a", "b")),
)
NUMBERS: tuple[Any, ...] = (-1, -(2**63), 2**40, 2**62, 2**64, 10**4000, "0", None, 1.5, b"1", [])


def read(victim: Victim) -> Any:
    """The metadata, which is still ours."""
    return pickle.loads((victim.folder / METADATA).read_bytes())


def write(victim: Victim, metadata: Any) -> None:
    (victim.folder / METADATA).write_bytes(pickle.dumps(metadata, protocol=4))


def _storage_of(metadata: Any, name: str) -> tuple[Any, Any]:
    return next((k, info) for k, info in metadata.storage_data.items() if k.fqn == name)


def _put(victim: Victim, name: str, change: Callable[[bytes], bytes]) -> None:
    """Appends other bytes to the file of a tensor or object, and points the metadata to them."""
    metadata = read(victim)
    key, info = _storage_of(metadata, name)
    path = victim.folder / "weights" / info.relative_path
    content = path.read_bytes()
    made = change(content[info.offset : info.offset + info.length])
    path.write_bytes(content + made)
    metadata.storage_data[key] = replace(info, offset=len(content), length=len(made))
    write(victim, metadata)


def replace_bytes(victim: Victim, change: Callable[[bytes], bytes]) -> None:
    """Replaces the first of the objects among the tensors."""
    _put(victim, EXTRA_STATE, change)


def storage_infos() -> Iterator[Named]:
    for field, values in (
        ("relative_path", PATHS),
        ("offset", NUMBERS),
        ("length", NUMBERS),
        ("transform_descriptors", (["zstd"], ["os.system"], "x", 5)),
    ):
        for number, value in enumerate(values):

            def change(
                victim: Victim, field: str = field, value: Any = value, number: int = number
            ) -> None:
                metadata = read(victim)
                key, info = _storage_of(metadata, (WEIGHT, EXTRA_STATE)[number % 2])
                metadata.storage_data[key] = replace(info, **{field: value})
                write(victim, metadata)

            yield f"{field} {value!r:.40}", change, field != "relative_path"


def tensors() -> Iterator[Named]:
    for name, change in _CHANGES.items():

        def apply(victim: Victim, change: Callable[[Any], None] = change) -> None:
            metadata = read(victim)
            change(metadata)
            write(victim, metadata)

        yield name, apply, False


def _field(name: str, value: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        setattr(metadata, name, value)

    return change


def _of_weight(**fields: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Changes fields of the first weight's metadata."""

    def change(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata[WEIGHT]
        new = {name: make(getattr(tensor, name)) for name, make in fields.items()}
        metadata.state_dict_metadata[WEIGHT] = replace(tensor, **new)

    return change


def _size(*sizes: Any) -> Callable[[Any], None]:
    """Another shape, in one chunk of that shape."""
    import torch

    try:
        shape: Any = torch.Size(sizes)
    except (TypeError, OverflowError, RuntimeError):
        shape = sizes
    return _of_weight(
        size=lambda _: shape,
        chunks=lambda chunks: [replace(chunks[0], sizes=shape, offsets=(0,) * len(sizes))],
    )


def _dtype(name: str) -> Callable[[Any], None]:
    def change(properties: Any) -> Any:
        import torch

        return replace(properties, dtype=getattr(torch, name))

    return _of_weight(properties=change)


def _more(metadata: Any) -> None:
    """A tensor of a terabyte that no model has."""
    tensor = metadata.state_dict_metadata[WEIGHT]
    metadata.state_dict_metadata["module.more"] = tensor
    _size(10**6, 10**6)(metadata)
    swapped = metadata.state_dict_metadata
    swapped["module.more"], swapped[WEIGHT] = swapped[WEIGHT], swapped["module.more"]


def _drop(name: str, field: str) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        found = getattr(metadata, field)
        for key in [key for key in found if getattr(key, "fqn", key) == name]:
            del found[key]

    return change


def _exchange(metadata: Any) -> None:
    """The kinds of a tensor and an object among the tensors are exchanged."""
    found = metadata.state_dict_metadata
    found[WEIGHT], found[EXTRA_STATE] = found[EXTRA_STATE], found[WEIGHT]


def _key(key: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[key] = metadata.state_dict_metadata[WEIGHT]

    return change


_CHANGES: dict[str, Callable[[Any], None]] = {
    "a terabyte": _size(10**6, 10**6),
    "more than 64 bits": _size(2**62, 2**62),
    "negative size": _size(-1, 784),
    "no dimension": _size(),
    "empty": _size(0, 0),
    "transposed": _size(784, 64),
    "flat": _size(64 * 784),
    "1,000 dimensions": _size(*[1] * 1000),
    "sizes of text": _size("64", "784"),
    "sizes None": _of_weight(size=lambda _: None),
    **{f"dtype {n}": _dtype(n) for n in ("int8", "complex128", "float64", "bool", "quint8")},
    "no properties": _of_weight(properties=lambda _: None),
    "no chunks": _of_weight(chunks=lambda _: []),
    "chunks None": _of_weight(chunks=lambda _: None),
    "a chunk twice": _of_weight(chunks=lambda chunks: chunks * 2),
    "a million chunks": _of_weight(chunks=lambda chunks: chunks * 1_000_000),
    "a chunk outside": _of_weight(
        chunks=lambda chunks: [replace(chunks[0], offsets=(2**40, 2**40))]
    ),
    "a negative chunk": _of_weight(chunks=lambda chunks: [replace(chunks[0], offsets=(-5, -5))]),
    "a chunk None": _of_weight(chunks=lambda _: [None]),
    "a terabyte more": _more,
    "tensor and object exchanged": _exchange,
    "a key of control characters": _key("module.\x1b[31m\n"),
    "a key that is a number": _key(5),
    "a key that is None": _key(None),
    "a key that leads out": _key("../../canary"),
    "weight not listed": _drop(WEIGHT, "state_dict_metadata"),
    "weight not stored": _drop(WEIGHT, "storage_data"),
    "object not listed": _drop(EXTRA_STATE, "state_dict_metadata"),
    "object not stored": _drop(EXTRA_STATE, "storage_data"),
    "nothing listed": _field("state_dict_metadata", {}),
    "nothing stored": _field("storage_data", {}),
    "list of tensors": _field("state_dict_metadata", []),
    "list of storage": _field("storage_data", []),
    "tensors None": _field("state_dict_metadata", None),
    "storage None": _field("storage_data", None),
    "storage infos None": _field("storage_data", {None: None}),
    "planner_data": _field("planner_data", {"module": ("a",) * 5, 5: None}),
    "mcore_data None": _field("mcore_data", None),
    "mcore_data of numbers": _field("mcore_data", {WEIGHT: 5}),
    "mcore_data reformulates": _field(
        "mcore_data", {WEIGHT: {"nd_reformulated_orig_global_shape": (10**6, 10**6)}}
    ),
    "storage_meta": _field("storage_meta", 5),
    "version": _field("version", "99"),
}


def weights() -> Iterator[Named]:
    """Other tensors in the place of a weight, saved by torch."""
    for name, make in _TENSORS.items():

        def apply(victim: Victim, make: Callable[[Any], Any] = make) -> None:
            def change(archive: bytes) -> bytes:
                import torch

                old = torch.load(io.BytesIO(archive), weights_only=True)
                file = io.BytesIO()
                torch.save(make(old), file)
                return file.getvalue()

            _put(victim, WEIGHT, change)

        yield name, apply, True
    for name, content in (
        ("empty", b""),
        ("zeros", bytes(1 << 16)),
        ("a zip", b"PK\5\6" + bytes(18)),
    ):

        def raw(victim: Victim, content: bytes = content) -> None:
            _put(victim, WEIGHT, lambda _: content)

        yield name, raw, True


_TENSORS: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda old: old * float("nan"),
    "infinite": lambda old: old.float() * 1e38,
    "negated": lambda old: -old,
    "one dimension less": lambda old: old[0].clone(),
    "a terabyte of one number": lambda old: old[:1, :1].clone().expand(10**6, 10**6),
    "one number, right shape": lambda old: old[:1, :1].clone().expand(*old.shape),
    "empty": lambda old: old[:0].clone(),
    "transposed": lambda old: old.t().clone(),
    "complex": lambda old: old.to(dtype=__import__("torch").complex64),
    "integers": lambda old: old.int(),
    "float64": lambda old: old.double(),
    "sparse": lambda old: old.float().to_sparse(),
    "on no device": lambda old: old.to("meta"),
    "with gradient": lambda old: old.clone().requires_grad_(),
    "a number": lambda old: 5,
    "a dictionary": lambda old: {"a": old},
    "a list": lambda old: [old],
    "None": lambda old: None,
    "text": lambda old: "\x1b[31m",
}
