"""Draws which rank is where, and what each stage computes when: chapters 3 and 6.

    .venv/bin/python docs/images/make_ranks_and_pipeline.py

One process is each rank in turn, and asks Megatron for its coordinates and its schedule.
"""

import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.images.drawing import WIDTH, Picture, save
from tools.fake_ranks import fake_ranks
from tools.recorder import coordinates

KINDS = {"tensor": "tensor", "data": "data", "stage": "pipeline"}
GROUPS = {
    "tensor": "*tensor group\nparts of the same layers, same samples",
    "data": "*data group\nsame weights, other samples",
    "pipeline": "*pipeline group\nother layers, same samples",
}
STAGES, MICRO_BATCHES, UNIT = 4, 4, 28
#: Of forward and backward passes, those of chunk 2, and idle time.
COLORS = ("pipeline", "tensor", "sequence", "context", "whole line")
#: 1 forward or -1 backward, the stage, counted through all chunks, and the micro batch.
Pass = tuple[int, int, int]


def ranks() -> Picture:
    """Returns the coordinates and groups of eight ranks."""
    picture = Picture("ranks", "Coordinates and groups of 8 ranks: tensor 2 x data 2 x pipeline 2")
    picture.text(92, 8, "*samples A")
    picture.text(288, 8, "*samples B")
    for rank in range(8):
        sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
        with fake_ranks(rank, 8, accelerator="cpu", **sizes):
            place = {kind: coordinates()[kind][0] for kind in KINDS}
        x, top = 2 + 98 * (place["tensor"] + 2 * place["data"]), 42 + 118 * place["stage"]
        picture.box(x, top, 82, 88, "whole")
        picture.text(x + 41, top + 14, f"*rank {rank}")
        for row, (kind, color) in enumerate(KINDS.items()):
            picture.box(x + 5, top + 26 + 20 * row, 72, 18, color, f"{kind} {place[kind]}")
        if not place["tensor"]:
            picture.path(f"M{x + 77},{top + 35}h26", "tensor")
        if not place["data"]:
            edge, height = (top + 88, 9) if place["stage"] else (top, -9)
            height *= 1 + place["tensor"]
            picture.path(f"M{x + 41},{edge}v{height}h196v{-height}", "data")
        if not place["stage"]:
            picture.path(f"M{x + 41},{top + 84}v34", "pipeline")
    for number, (kind, words) in enumerate(GROUPS.items()):
        picture.path(f"M2,{286 + 40 * number}h28", kind)
        picture.text(38, 294 + 40 * number, words, "start")
    return picture


def passes(stage: int, chunks: int) -> Iterator[Pass]:
    """Yields what a rank computes, in Megatron's order."""
    with fake_ranks(
        stage,
        STAGES,
        accelerator="cpu",
        pipeline_model_parallel_size=STAGES,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    ):
        from megatron.core.pipeline_parallel import schedules

        warmup = schedules.get_pp_rank_microbatches(MICRO_BATCHES, chunks, STAGES)[2]
        table = schedules.get_schedule_table(MICRO_BATCHES, chunks, STAGES)
        order = schedules.convert_schedule_table_to_order(warmup, chunks, table)
    for place, one in enumerate(order):  # 2 is chunk 2 forward, -2 is chunk 2 backward
        stages = (abs(one) - 1) * STAGES + stage
        yield one // abs(one), stages, order[: place + 1].count(one)


def schedule(picture: Picture, left: int, chunks: int) -> float:
    """Draws a schedule, in which a backward pass takes twice as long; returns its length."""
    orders = [[None, *passes(stage, chunks)] for stage in range(STAGES)]
    earlier = {one: before for order in orders for before, one in pairwise(order) if one}

    def length(one: Pass) -> float:
        return (3 - one[0]) / 2 / chunks

    @cache
    def end(one: Pass | None) -> float:
        if one is None:
            return 0.0
        way, stage, number = one
        needed: Pass | None = (way, stage - way, number)
        if needed not in earlier:  # the first stage reads, and the last one has the loss
            needed = (1, stage, number) if way < 0 else None
        return max(end(earlier[one]), end(needed)) + length(one)

    for one in earlier:
        chunk, rank = divmod(one[1], STAGES)
        top, height = 44 + UNIT * (end(one) - length(one)), UNIT * length(one) - 1
        color = COLORS[2 * chunk + (one[0] < 0)]
        picture.box(left + rank * 43, top, 41, height, color, str(one[2]))
    return max(map(end, earlier))


def pipeline() -> Picture:
    """Returns both schedules with their bubbles, side by side; time runs down."""
    picture = Picture("pipeline", "The schedules 1F1B and interleaved 1F1B of four stages")
    for left, chunks, name in ((1, 1, "1F1B"), (207, 2, "interleaved")):
        end = schedule(picture, left, chunks)
        picture.text(left + 86, 16, f"*{name}\nstages 0 to 3")
        for rank in range(STAGES):
            picture.box(left + 43 * rank, 44, 41, end * UNIT, "whole line")
        bubble = 1 - 3 * MICRO_BATCHES / end
        picture.text(left + 86, 56 + end * UNIT, f"*bubble {bubble:.0%}")
    picture.text(WIDTH / 2, 52, "time")
    picture.arrow(WIDTH / 2, 64, 60)
    words = ("forward", "backward", "forward, chunk 2", "backward, chunk 2", "idle")
    for number, (color, word) in enumerate(zip(COLORS, words, strict=True)):
        picture.key(left, 78 + end * UNIT + 19 * number, color, word)
    return picture


def pictures() -> list[Picture]:
    """Returns the pictures."""
    return [ranks(), pipeline()]


if __name__ == "__main__":
    save(pictures())
