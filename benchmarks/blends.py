"""The speed and memory of a blend of datasets, by its length; beside Megatron's helper.

    python benchmarks/blends.py [--write]

Three members of 10^9 samples each that cost nothing, with the weights 0.7, 0.2 and 0.1. Megatron's
`BlendedDataset` calls the helper `build_blending_indices` for two arrays, with the member and the
member's running number of each sample. Only the helper is timed. `--write` puts the table into
RESULTS.md.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from data import Virtual, _scaled, peak_bytes, seconds_of
from report import HEADER, Row, machine, write_section

from megakit.data import BlendedDataset
from megakit.runtime import use_accelerator

WEIGHTS = [0.7, 0.2, 0.1]
IRRATIONAL = [0.7, 0.2, 2**0.5]
BATCH_SIZE, CHUNK_BATCHES = 256, 16
# One heavy and many light members: where it matters which member is late.
UNEVEN = [900] + 100 * [1]
LENGTHS = {"10^3": 10**3, "10^6": 10**6, "10^12": 10**12}


def make_blend(num_samples: int, weights: Sequence[float] = WEIGHTS) -> BlendedDataset:
    return BlendedDataset([(Virtual(10**9), weight) for weight in weights], num_samples)


def length_rows(name: str, num_samples: int) -> list[Row]:
    blend, last = make_blend(num_samples), num_samples - 1
    indices = np.arange(num_samples - BATCH_SIZE, num_samples)
    builds = _scaled(seconds_of(lambda: make_blend(num_samples), 100), 1e3)
    memory = peak_bytes(lambda: make_blend(num_samples)) / 1024
    first_item = _scaled(seconds_of(lambda: blend[0], 10_000), 1e6)
    last_item = _scaled(seconds_of(lambda: blend[last], 10_000), 1e6)
    batch = _scaled(seconds_of(lambda: blend.get_batch(indices), 200), 1e6)
    return [
        Row(f"blend of {name}: build", builds, "ms"),
        Row(f"blend of {name}: peak memory of the build", [memory], "KiB"),
        Row(f"blend of {name}: first item", first_item, "us"),
        Row(f"blend of {name}: last item", last_item, "us"),
        Row(f"blend of {name}: last batch of {BATCH_SIZE}", batch, "us"),
    ]


def other_rows() -> list[Row]:
    """A batch in the training loader, which fetches several with one call; and a long period."""
    blend = make_blend(10**12)
    indices = np.arange(BATCH_SIZE * CHUNK_BATCHES)
    batch = _scaled(seconds_of(lambda: blend.get_batch(indices), 100), 1e6 / CHUNK_BATCHES)
    long = make_blend(10**12, IRRATIONAL)
    builds = _scaled(seconds_of(lambda: make_blend(10**12, IRRATIONAL), 10), 1e3)
    tables = long._members.nbytes + long._before.nbytes
    note = f"{tables / 1000:.0f} kB for a period of {long.counts.sum():,} slots"
    return [
        Row(f"a batch of {BATCH_SIZE}, {CHUNK_BATCHES} batches per call", batch, "us"),
        Row("build, weights 0.7, 0.2 and the square root of 2", builds, "ms", note),
    ]


def by_megatron(weights: Any, num_samples: int) -> Any:
    """The member of each sample, as Megatron's helper computes it."""
    from megatron.core.datasets import helpers

    members, numbers = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
    shares = np.array(weights) / sum(weights)
    helpers.build_blending_indices(members, numbers, shares, len(shares), num_samples, False)
    return members


def megatron_rows() -> list[Row]:
    rows = []
    for name, num_samples in list(LENGTHS.items())[:2]:

        def build(num_samples: int = num_samples) -> Any:
            return by_megatron(WEIGHTS, num_samples)

        seconds, size = _scaled(seconds_of(build), 1e3), peak_bytes(build) / 1024
        rows.append(Row(f"Megatron's helper, {name}: build", seconds, "ms"))
        rows.append(Row(f"Megatron's helper, {name}: peak memory of the build", [size], "KiB"))
    rows[-1].note = "10 bytes per sample; 10^12 samples would need 10 TB and were not tried"
    return rows


def deviation(members: Any) -> float:
    """The largest difference between a member's samples and its share, over all prefixes."""
    drawn = np.cumsum(members[:, None] == np.arange(len(UNEVEN)), axis=0)
    shares = np.arange(1, len(members) + 1)[:, None] * np.array(UNEVEN) / sum(UNEVEN)
    return float(np.abs(drawn - shares).max())


def deviation_rows() -> list[Row]:
    ours = deviation(make_blend(sum(UNEVEN), UNEVEN)._members)
    theirs = deviation(by_megatron(UNEVEN, sum(UNEVEN)))
    what = "largest difference from a member's share, one weight of 900 and 100 weights of 1"
    return [
        Row(f"{what}: blend", [ours], "samples", "below 1 for any weights"),
        Row("the same: Megatron's helper", [theirs], "samples"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="The speed and memory of a blend of datasets.")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    options = parser.parse_args()
    use_accelerator("cpu")
    caption = f"{machine('megatron-core')} numpy {np.__version__}; 7 runs each."
    lines = ["## Blends of datasets", "", caption, "", *HEADER]
    print("\n".join(lines))
    parts: list[Callable[[], list[Row]]] = [other_rows, megatron_rows, deviation_rows]
    parts[:0] = [functools.partial(length_rows, *length) for length in LENGTHS.items()]
    for part in parts:
        for row in part():
            print(row, flush=True)
            lines.append(str(row))
    if options.write:
        write_section("blends", "\n".join(lines))


if __name__ == "__main__":
    main()
