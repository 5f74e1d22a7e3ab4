"""Mutations of a checkpoint's files as such: names, links, FIFOs, sizes, swaps."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from attack_victim import BACKENDS, COMMON, CONTEXT, METADATA, Victim

from megakit.checkpoints.manifest import MANIFEST

Named = tuple[str, Callable[[Victim], None]]
FILES = (METADATA, COMMON, BACKENDS, CONTEXT, MANIFEST, "weights/__0_0.distcp")
HUGE = 1 << 40

#: Files that do not belong to a checkpoint, with their content.
EXTRA: tuple[tuple[bytes, bytes], ...] = (
    (b"weights/.hidden", b"x"),
    (b".hidden", b"x"),
    (b"weights/a\nb", b"x"),
    (b"weights/\xff\xfe", b"x"),
    (b"weights/\x1b[31mred\x1b[0m", b"x"),
    (b"weights/" + b"x" * 255, b"x"),
    (b"weights/__0_9.distcp", b"x"),
    (b"weights/__1_0.distcp", b""),
    (b"weights/common.pt.bak", b"\x80\x04N."),
    (b"weights/.metadata.tmp", b""),
    (b"weights/..metadata", b""),
    (b"weights/metadata.json~", b"{"),
    (b"weights/mp_rank_00/model_optim_rng.pt", b"\x80\x04N."),
    (b"weights/weights/.metadata", b"x"),
    (b"context/sitecustomize.py", b"raise SystemExit(7)\n"),
    (b"context/__init__.py", b"raise SystemExit(7)\n"),
    (b"context/.io.json", b"{"),
    (b"megatron.py", b"raise SystemExit(7)\n"),
    (b"manifest.json.bak", b"{"),
    (b"-unfinished", b""),
    (b"damaged", b""),
    (b"deep/" * 100 + b"x", b"x"),
)


def names() -> Iterator[Named]:
    for name, content in EXTRA:

        def add(victim: Victim, name: bytes = name, content: bytes = content) -> None:
            path = os.path.join(os.fsencode(victim.folder), name)  # noqa: PTH118
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            with open(path, "wb") as file:  # noqa: PTH123
                file.write(content)

        yield f"with {name[:40]!r}", add

    def many(victim: Victim) -> None:
        for number in range(3000):
            (victim.folder / "weights" / f"{number}").touch()

    yield "with 3,000 more", many
    for old in (METADATA, COMMON, BACKENDS, CONTEXT, "weights/__0_1.distcp", "context", "weights"):

        def rename(victim: Victim, old: str = old) -> None:
            (victim.folder / old).rename(victim.folder / f"{old}.old")

        def remove(victim: Victim, old: str = old) -> None:
            path = victim.folder / old
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

        yield f"{old} renamed", rename
        yield f"{old} removed", remove


def special() -> Iterator[Named]:
    for name in FILES:
        for what, make in MAKERS.items():

            def put(
                victim: Victim, name: str = name, make: Callable[[Victim, Path], None] = make
            ) -> None:
                path = victim.folder / name
                path.rename(victim.trace.parent / "original")
                make(victim, path)

            yield f"{name}: {what}", put
    for name in ("weights", "context"):
        for what in ("a link to itself", "a FIFO", "a link to a copy"):

            def put_folder(victim: Victim, name: str = name, what: str = what) -> None:
                path = victim.folder / name
                path.rename(victim.trace.parent / "original")
                MAKERS[what](victim, path)

            yield f"{name}: {what}", put_folder
    for what, make in MAKERS.items():

        def more(victim: Victim, make: Callable[[Victim, Path], None] = make) -> None:
            shutil.copy(victim.folder / COMMON, victim.trace.parent / "original")
            make(victim, victim.folder / "weights" / "more")

        yield f"one more file: {what}", more


def _fifo(victim: Victim, path: Path) -> None:
    os.mkfifo(path)


def _socket(victim: Victim, path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK)


def _sparse(victim: Victim, path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def _sparse_tail(victim: Victim, path: Path) -> None:
    shutil.copy(victim.trace.parent / "original", path)
    with path.open("r+b") as file:
        file.truncate(HUGE)


#: What is put in the place of a file, which is now `original` beside the checkpoint.
MAKERS: dict[str, Callable[[Victim, Path], None]] = {
    "a link to a copy": lambda victim, path: path.symlink_to(victim.trace.parent / "original"),
    "a link to the canary": lambda victim, path: path.symlink_to(victim.canary),
    "a link to nothing": lambda victim, path: path.symlink_to("nothing"),
    "a link to itself": lambda victim, path: path.symlink_to(path.name),
    "a link to zeros": lambda victim, path: path.symlink_to("/dev/zero"),
    "a hard link": lambda victim, path: path.hardlink_to(victim.trace.parent / "original"),
    "a FIFO": _fifo,
    "a socket": _socket,
    "a folder": lambda victim, path: path.mkdir(),
    "empty": lambda victim, path: path.touch(),
    "sparse": _sparse,
    "a sparse tail": _sparse_tail,
}


def swapped() -> Iterator[Named]:
    for name in (METADATA, COMMON, BACKENDS, CONTEXT, MANIFEST, "weights", "context"):
        for whose in ("other", "sibling"):

            def swap(victim: Victim, name: str = name, whose: str = whose) -> None:
                path: Path = victim.folder / name
                source = getattr(victim, whose) / name
                if path.is_dir():
                    shutil.rmtree(path)
                    shutil.copytree(source, path)
                elif path.read_bytes() == source.read_bytes():
                    path.write_bytes(source.read_bytes() + b"\n")
                else:
                    shutil.copy(source, path)

            yield f"{name} of the {whose}", swap
    for number in (0, 1):
        for whose in ("other", "sibling"):

            def swap_shard(victim: Victim, number: int = number, whose: str = whose) -> None:
                name = f"weights/__0_{number}.distcp"
                shutil.copy(getattr(victim, whose) / name, victim.folder / name)

            yield f"shard {number} of the {whose}", swap_shard

    def exchange(victim: Victim) -> None:
        first, second = (victim.folder / f"weights/__0_{number}.distcp" for number in (0, 1))
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)

    yield "shards exchanged", exchange
