"""Draws the pictures of docs/parallelism.md: which rank holds which weights of the model.

    python docs/images/make_parallelism.py

The sizes are those of the model: 784-64-3 (linear1, linear2) and 3-64-784 (linear3, linear4). The
last three pictures have the GPT of ladder/gpt: four layers of width 64, 256 tokens.
"""

from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
WIDTH, ROW, GAP, MARGIN = 330, 40, 150, 20
FILL = {"cut": "#d7e8fb", "whole": "#e6f4e3", "data": "#fdf0d5"}
#: The borders differ too, for readers who cannot distinguish the colours.
BORDER = {
    "cut": 'stroke="#1f6fb5" stroke-dasharray="6 3"',
    "whole": 'stroke="#3f7f35"',
    "data": 'stroke="#9a6a00" stroke-dasharray="2 3"',
}


@dataclass
class Rank:
    """One process: a title, and a row for each thing that it holds."""

    title: str
    rows: list[tuple[str, str, str]] = field(default_factory=list)  # kind, name, shape


def weights(tensor: int = 1, parts: str = "12", rank: int = 0) -> list[tuple[str, str, str]]:
    """The rows of the layers that a rank holds, in order."""
    width = 64 // tensor
    here = f"of 64: {rank * width} to {(rank + 1) * width - 1}"
    how = "cut" if tensor > 1 else "whole"
    note = f" ({here})" if tensor > 1 else ""
    rows = {
        "1": [(how, "linear1", f"{width} x 784, bias {width}{note}")],
        "2": [(how, "linear2", f"3 x {width}{note}"), ("whole", "linear2", "bias 3")],
        "3": [(how, "linear3", f"{width} x 3, bias {width}{note}")],
        "4": [(how, "linear4", f"784 x {width}{note}"), ("whole", "linear4", "bias 784")],
    }
    return [row for part in parts for row in rows[part]]


def draw(name: str, title: str, ranks: list[Rank], between: dict[int, str], below: str) -> None:
    """Writes one picture: the ranks side by side, and what they communicate.

    Args:
        name: Of the file.
        title: Its headline.
        ranks: The left one and the right one.
        between: Two lines of text on each arrow between the ranks, by the number of rows above it.
        below: A line under the picture.
    """
    height = MARGIN * 2 + 90 + ROW * max(len(rank.rows) for rank in ranks)
    held = "; ".join(
        f"{rank.title}: " + ", ".join(f"{label} {shape}" for _, label, shape in rank.rows)
        for rank in ranks
    )
    total = MARGIN * 2 + WIDTH * len(ranks) + GAP * (len(ranks) - 1)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" '
        f'font-family="sans-serif" font-size="13" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<desc>{held}. Between the ranks: {'; '.join(between.values())}.</desc>",
        f'<rect width="{total}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="30" font-size="16" font-weight="bold">{title}</text>',
    ]
    for place, rank in enumerate(ranks):
        x, y = MARGIN + place * (WIDTH + GAP), 50
        box = ROW * len(rank.rows) + 30
        out.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{box}" rx="6" fill="none" '
            'stroke="#444"/>'
        )
        out.append(f'<text x="{x + 10}" y="{y + 20}" font-weight="bold">{rank.title}</text>')
        for row, (kind, label, shape) in enumerate(rank.rows):
            top = y + 28 + row * ROW
            out.append(
                f'<rect x="{x + 8}" y="{top}" width="{WIDTH - 16}" height="{ROW - 6}" rx="4" '
                f'fill="{FILL[kind]}" {BORDER[kind]}/>'
            )
            out.append(f'<text x="{x + 16}" y="{top + 22}">{label}</text>')
            out.append(f'<text x="{x + 94}" y="{top + 22}">{shape}</text>')
    for above, text in between.items():
        left, right, middle = x - GAP + 6, x - 6, y + 28 + above * ROW
        out.append(
            f'<path d="M{left + 8},{middle - 5} L{left},{middle} L{left + 8},{middle + 5} '
            f"M{left},{middle} L{right},{middle} M{right - 8},{middle - 5} L{right},{middle} "
            f'L{right - 8},{middle + 5}" fill="none" stroke="#444"/>'
        )
        for line, part in enumerate(text.splitlines()):
            out.append(
                f'<text x="{(left + right) // 2}" y="{middle - 21 + 13 * line}" '
                f'text-anchor="middle" font-size="11">{part}</text>'
            )
    out.append(f'<text x="{MARGIN}" y="{height - 12}" font-size="12">{below}</text>')
    out.append("</svg>")
    (FOLDER / f"{name}.svg").write_text("\n".join(out) + "\n")


def main() -> None:
    """Draws all pictures."""
    batch = ("data", "samples", "all of the global batch")
    draw(
        "tensor_parallel",
        "Tensor parallel 2: each layer is sharded along its dimension of 64",
        [Rank(f"rank {r}", [*weights(2, "1234", r), batch]) for r in (0, 1)],
        {
            2: "forward: all-reduce\nof z (B x 3)",
            3: "backward: all-reduce\nof z's gradient (B x 3)",
            5: "forward: all-reduce\nof x_hat (B x 784)",
        },
        "Blue, dashed: a shard of a weight. Green, solid: a whole weight. Yellow, dotted: data.",
    )
    draw(
        "pipeline_parallel",
        "Pipeline parallel 2: the encoder on one stage, the decoder on the next stage",
        [
            Rank("rank 0: first stage", [*weights(parts="12"), ("data", "samples", "the images")]),
            Rank("rank 1: last stage", [*weights(parts="34"), ("data", "samples", "the targets")]),
        ],
        {2: "forward: z (B x 3)\nbackward: its gradient"},
        "Each weight is on one rank only. The micro batches of a step are computed in succession.",
    )
    draw(
        "data_parallel",
        "Data parallel 2: two copies of the model, half of the samples each",
        [
            Rank(f"rank {r}", [*weights(parts="1234"), ("data", "samples", f"{half} half")])
            for r, half in ((0, "the first"), (1, "the second"))
        ],
        {3: "once a step: all-reduce\nof all gradients"},
        "With the distributed optimizer, each rank stores Adam's moments of half of the weights.",
    )
    embedding = ("whole", "embed.", "256 x 64, of positions 64 x 64")
    attention = ("whole", "attention", "of 4 layers: 192 x 64, 64 x 64")
    draw(
        "context_parallel",
        "Context parallel 2: all weights, half of the tokens of each sample",
        [
            Rank(
                f"rank {r}",
                [
                    embedding,
                    attention,
                    ("whole", "MLP", "of 4 layers: 256 x 64, 64 x 256"),
                    ("data", "tokens", f"of each sample: {32 * r} to {32 * r + 31} of 64"),
                ],
            )
            for r in (0, 1)
        ],
        {
            1: "forward: all-gather\nof keys and values",
            2: "backward: reduce-scatter\nof their gradients",
            3: "once a step: all-reduce\nof all gradients",
        },
        "Each rank computes the queries of its own tokens, with the keys and values of all tokens.",
    )
    draw(
        "expert_parallel",
        "Expert parallel 2: two of four experts of each layer, half of the samples",
        [
            Rank(
                f"rank {r}",
                [
                    embedding,
                    attention,
                    ("whole", "router", "of 4 layers: 4 x 64"),
                    ("cut", "experts", f"{2 * r} and {2 * r + 1} of 4: 256 x 64, 64 x 256"),
                    ("data", "samples", f"the {half} half"),
                ],
            )
            for r, half in ((0, "first"), (1, "second"))
        ],
        {
            1: "once a step: all-reduce\nof other gradients",
            3: "forward: all-to-all of\ntokens, to and fro",
            4: "backward: all-to-all of\ngradients, to and fro",
        },
        "The router chooses two experts for each token. Blue, dashed: on this rank only.",
    )
    draw(
        "interleaved_stages",
        "Interleaved stages: two chunks of the model on each rank",
        [
            Rank(
                "rank 0: first stage",
                [embedding, ("whole", "chunk 1", "layer 0"), ("whole", "chunk 2", "layer 2")],
            ),
            Rank(
                "rank 1: last stage",
                [
                    ("whole", "chunk 1", "layer 1"),
                    ("whole", "chunk 2", "layer 3, final norm"),
                    ("whole", "output", "embed. again, 256 x 64"),
                ],
            ),
        ],
        {
            0: "once a step: all-reduce\nof embed.'s gradient",
            1: "forward: outputs of\nlayers 0, 1 and 2",
            2: "backward: their\ngradients",
        },
        "Each micro batch passes rank 0, rank 1, rank 0 and rank 1.",
    )


if __name__ == "__main__":
    main()
