"""What an attacker does to a checkpoint, one `Mutation` each, and the manifest made right again."""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attack_context
import attack_files
import attack_json
import attack_metadata
import attack_pickles as pickles
from attack_victim import BYTES, COMMON, JSON_FILES, METADATA, Victim

from megakit.checkpoints.manifest import MANIFEST, OWN_DIGEST, Manifest, write_manifest


@dataclass(frozen=True)
class Mutation:
    """One way to change a checkpoint.

    Attributes:
        kind: Its line of the table.
        name: Which one of its kind.
        apply: Changes the checkpoint.
        changes_numbers: Whether the checkpoint may now hold other numbers, so that another
            result is right as well.
        is_signed: Whether the manifest is made right afterwards; not where it is the victim.
    """

    kind: str
    name: str
    apply: Callable[[Victim], None]
    changes_numbers: bool = False
    is_signed: bool = True


def attack(mutation: Mutation, victim: Victim) -> None:
    """Mutates a checkpoint and lists its files in its manifest as they are now."""
    evil = pickles.plain(pickles.DANGEROUS["os.system"](victim.trace))
    (victim.trace.parent / "evil.pkl").write_bytes(evil)
    code = f"open({str(victim.trace)!r}, 'w').close()\n"
    (victim.trace.parent / "evil.py").write_text(code)
    mutation.apply(victim)
    if mutation.is_signed:
        sign(victim.folder)


def sign(checkpoint: Path) -> None:
    """Lists a checkpoint's files in its manifest, as one who wants it to be believed."""
    path = checkpoint / MANIFEST
    if path.is_symlink() or not path.is_file() or not 0 < path.stat().st_size < 1 << 30:
        return  # the manifest itself is the victim
    # Not by `read_manifest`, which refuses a manifest in the wrong folder.
    content = json.loads(path.read_bytes())
    del content[OWN_DIGEST]
    write_manifest(checkpoint, Manifest(**content | {"files": dict(_listed(checkpoint))}))


def _listed(checkpoint: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """As `list_files`, which refuses links and FIFOs, and reads sparse files for hours."""
    for folder, _, names in os.walk(checkpoint):
        for path in (Path(folder, name) for name in sorted(names) if name != MANIFEST):
            name = path.relative_to(checkpoint).as_posix()
            if not path.is_file() or (path.is_symlink() and not path.exists()):
                yield name, {"size": 0, "sha256": hashlib.sha256().hexdigest()}
            elif path.stat().st_size > 1 << 30:
                yield name, {"size": path.stat().st_size, "sha256": "0" * 64}
            else:
                content = path.read_bytes()
                yield name, {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _random_bytes(how: str) -> Callable[[bytes, random.Random], bytes]:
    def change(content: bytes, dice: random.Random) -> bytes:
        data = bytearray(content)
        for _ in range(dice.choice((1, 1, 2, 8, 64))):
            at = dice.randrange(len(data))
            if how == "changed":
                data[at] ^= dice.randint(1, 255)
            elif how == "removed":
                del data[at : at + dice.randint(1, max(1, len(data) // 100))]
            elif how == "inserted":
                data[at:at] = dice.randbytes(dice.randint(1, 40))
            else:
                del data[max(1, at) :]
            if len(data) < 2:
                break
        return bytes(data) if bytes(data) != content else content + b"\0"

    return change


def _of_bytes() -> Iterator[Mutation]:
    for how in ("changed", "removed", "inserted", "cut"):
        for number in (1, 2):
            for name in (METADATA, COMMON, *JSON_FILES, MANIFEST, "weights/*.distcp"):
                change = _random_bytes(how)

                def apply(
                    victim: Victim, name: str = name, change: Any = change, how: str = how
                ) -> None:
                    path = victim.draw(name)
                    path.write_bytes(change(path.read_bytes(), victim.dice))

                is_manifest = name == MANIFEST
                yield Mutation(
                    "random bytes",
                    f"{name} {how} {number}",
                    apply,
                    not is_manifest,
                    not is_manifest,
                )


def _fragments() -> Iterator[tuple[str, pickles.Fragment]]:
    for group in (pickles.DANGEROUS, pickles.ABUSE, pickles.BOMBS):
        yield from group.items()


def _in_metadata() -> Iterator[Mutation]:
    kind = "pickle in .metadata"
    for number, (name, fragment) in enumerate(_fragments()):

        def apply(
            victim: Victim, fragment: pickles.Fragment = fragment, at_end: bool = number % 2 == 1
        ) -> None:
            path = victim.folder / METADATA
            made = pickles.insert(path.read_bytes(), fragment(victim.trace), at_end)
            path.write_bytes(made)

        yield Mutation(kind, name, apply)
    for name, content in pickles.BROKEN.items():
        yield Mutation(kind, name, _writer(METADATA, content))
    for number in range(20):

        def edit(victim: Victim) -> None:
            path = victim.folder / METADATA
            path.write_bytes(pickles.edit(path.read_bytes(), victim.dice))

        yield Mutation(kind, f"opcodes {number}", edit, changes_numbers=True)


def _in_common() -> Iterator[Mutation]:
    kind = "pickle in common.pt"
    for number, (name, fragment) in enumerate(_fragments()):

        def apply(
            victim: Victim,
            fragment: pickles.Fragment = fragment,
            insert: Any = (pickles.insert_item, pickles.insert)[number % 4 == 3],
        ) -> None:
            path = victim.folder / COMMON
            made = fragment(victim.trace)
            path.write_bytes(pickles.change_archive(path.read_bytes(), lambda p: insert(p, made)))

        yield Mutation(kind, name, apply)
    for name, content in pickles.BROKEN.items():

        def replaced(victim: Victim, content: bytes = content) -> None:
            path = victim.folder / COMMON
            path.write_bytes(pickles.change_archive(path.read_bytes(), lambda _: content))

        yield Mutation(kind, name, replaced)
        yield Mutation(kind, f"{name}, no archive", _writer(COMMON, content))
    for number in range(10):

        def edit(victim: Victim) -> None:
            path, dice = victim.folder / COMMON, victim.dice
            archive = path.read_bytes()
            path.write_bytes(pickles.change_archive(archive, lambda p: pickles.edit(p, dice)))

        yield Mutation(kind, f"opcodes {number}", edit, changes_numbers=True)


def _writer(name: str, content: bytes) -> Callable[[Victim], None]:
    def apply(victim: Victim) -> None:
        (victim.folder / name).write_bytes(content)

    return apply


def _in_bytes() -> Iterator[Mutation]:
    """The objects among the tensors: an archive, or the pickle of old versions of torch."""
    for number, (name, fragment) in enumerate(_fragments()):
        if number % 2:  # half of them: the reader is common.pt's
            continue

        def apply(
            victim: Victim, fragment: pickles.Fragment = fragment, old: bool = number % 4 == 0
        ) -> None:
            payload = pickles.plain(fragment(victim.trace))
            attack_metadata.replace_bytes(
                victim,
                lambda archive: (
                    payload if old else pickles.change_archive(archive, lambda _: payload)
                ),
            )

        yield Mutation(BYTES, name, apply)
    for name, content in pickles.BROKEN.items():

        def broken(victim: Victim, content: bytes = content) -> None:
            attack_metadata.replace_bytes(victim, lambda _: content)

        yield Mutation(BYTES, name, broken)


def all_mutations() -> list[Mutation]:
    """Every mutation there is."""
    found = [*_of_bytes(), *_in_metadata(), *_in_common(), *_in_bytes()]
    found += [Mutation("tensors' metadata", *one) for one in attack_metadata.tensors()]
    found += [Mutation("storage infos", *one) for one in attack_metadata.storage_infos()]
    found += [Mutation("weights", *one) for one in attack_metadata.weights()]
    found += [Mutation("metadata.json", *one) for one in attack_json.backends()]
    found += [Mutation("context", *one) for one in attack_context.all_of_them()]
    found += [Mutation("manifest.json", *one, False, False) for one in attack_json.manifests()]
    found += [Mutation("zarr", *one) for one in attack_json.zarr()]
    found += [Mutation("file names", *one) for one in attack_files.names()]
    found += [Mutation("links, FIFOs and folders", *one) for one in attack_files.special()]
    found += [Mutation("swapped files", *one, True) for one in attack_files.swapped()]
    return found


def in_turn(seed: int, number: int, only: str = "") -> list[Mutation]:
    """So many mutations: all kinds in turn, each mutation once before any comes again.

    Args:
        seed: Decides the order.
        number: How many.
        only: Text that kind and name together have to hold.
    """
    dice = random.Random(seed)
    every = [one for one in all_mutations() if only in f"{one.kind}, {one.name}"]
    chosen: list[Mutation] = []
    while len(chosen) < number:
        kinds: dict[str, list[Mutation]] = {}
        for mutation in dice.sample(every, len(every)):
            kinds.setdefault(mutation.kind, []).append(mutation)
        while any(kinds.values()):
            chosen += [waiting.pop() for waiting in kinds.values() if waiting]
    return chosen[:number]
