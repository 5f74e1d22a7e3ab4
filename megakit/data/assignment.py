"""Assigns slots to members in proportion to weights, as evenly as possible."""

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megakit.data.indices import IntArray

MAX_SLOTS = 10_000

# A float64 rounds a share by about 1e-16. Two shares with at most MAX_SLOTS slots differ by 1e-8.
_ROUNDING = 1e-14
# Number of quotas to compute at a time; uses 64 KiB per array.
_BLOCK = 2**13


def whole_weights(weights: Sequence[float]) -> IntArray:
    """Convert weights to whole numbers of slots, with a total of at most `MAX_SLOTS`.

    Among all totals, the function chooses the smallest one with the smallest error. The error is
    the largest difference between a member's share of the slots and its share of the weights. If
    the shares are fractions with a common denominator of at most `MAX_SLOTS`, there is no error.
    For a given total, the slots are distributed by largest remainder, which has the smallest error
    (G. Birkhoff, "House monotone apportionment schemes", PNAS 73, 1976).

    Args:
        weights: Positive finite numbers of any scale.

    Returns:
        The number of slots of each member, at least 1; int64 of shape (M,).

    Raises:
        ValueError: If a member's share is below 1 / `MAX_SLOTS`.
    """
    largest = float(max(weights))
    scaled = [float(weight) / largest for weight in weights]  # the sum of weights could overflow
    shares = np.array(scaled) / math.fsum(scaled)
    smallest = int(shares.argmin())
    if shares[smallest] * MAX_SLOTS < 1 - _ROUNDING * MAX_SLOTS:
        raise ValueError(
            f"The weight {weights[smallest]} of member {smallest} is a share of "
            f"{shares[smallest]:.2g}. The smallest possible share is 1/{MAX_SLOTS}. Increase this "
            "weight, or leave out the member."
        )
    # The best total leaves no member without a slot: the error would then be at least
    # 1 / MAX_SLOTS. MAX_SLOTS slots have a smaller one, as each count is within 1 of its quota.
    best, least = np.empty(0, np.int64), math.inf
    rows = max(1, _BLOCK // len(shares))
    for start in range(len(shares), MAX_SLOTS + 1, rows):
        totals = np.arange(start, min(start + rows, MAX_SLOTS + 1))
        counts, errors = _by_largest_remainder(shares, totals)
        if errors.min() < least - _ROUNDING:
            least = errors.min()
            best = counts[np.argmax(errors <= least + _ROUNDING)]
        if least <= _ROUNDING:
            break
    return best


def _by_largest_remainder(
    shares: NDArray[np.float64], totals: IntArray
) -> tuple[IntArray, NDArray[np.float64]]:
    """Return the slots of each member for each total, (N, M), and each total's error, (N,)."""
    quotas = shares * totals[:, None]
    counts = np.floor(quotas).astype(np.int64)
    missing = totals - counts.sum(axis=1)
    order = np.argsort(counts - quotas, axis=1, kind="stable")  # the largest remainder first
    more = np.arange(len(shares)) < missing[:, None]
    np.put_along_axis(counts, order, np.take_along_axis(counts, order, 1) + more, 1)
    errors = np.abs(counts - quotas).max(axis=1) / totals
    return counts, errors


def assign(counts: Sequence[int]) -> IntArray:
    """Distribute the slots of one period, so that each prefix has nearly each member's share.

    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980. Let T be
    the sum of `counts`, and M the number of members, at least 2. Among the first n slots, the
    number of slots of a member with count c differs from n * c / T by at most 1 - 1 / (2 * M - 2).
    No smaller bound is possible for every choice of counts. The bound also holds for the endless
    repetition of the period.

    The bound gives an earliest and a latest slot for each of the member's c slots. The theorem
    states that an assignment within these limits exists. To find it, each slot gets the possible
    member whose latest slot is earliest. This takes O(T log T).

    Args:
        counts: The number of slots of each member, at least 1.

    Returns:
        The member of each slot, int64 of shape (T,).
    """
    total, scale = sum(counts), max(2, 2 * len(counts) - 2)
    limits = []  # earliest slot, latest slot, member
    for member, count in enumerate(counts):
        for number in range(count):
            earliest = -(-total * (scale * number + 1) // (scale * count)) - 1
            latest = total * (scale * number + scale - 1) // (scale * count)
            limits.append((earliest, latest, member))
    limits.sort(reverse=True)
    members, possible = np.empty(total, np.int64), list[tuple[int, int]]()
    for slot in range(total):
        while limits and limits[-1][0] <= slot:
            _, latest, member = limits.pop()
            heapq.heappush(possible, (latest, member))
        members[slot] = heapq.heappop(possible)[1]
    return members
