"""`./run trace`: what it says of a step, next to torch's own count of the same step."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.scripts import REPOSITORY, environment, read_json, run
from tools.trace_table import align, fold

COUNTED = REPOSITORY / "tests" / "tools" / "counted.py"
AUTOENCODER = ("ladder/3_megatron.py", "--dataset", "digits")
SIZES = ("--steps", 2, "--batch-size", 8, "--micro-batch-size")
TP_DP = (*AUTOENCODER, *SIZES, 2, "--devices", 4, "--tensor-parallel", 2)
PP = (*AUTOENCODER, *SIZES, 4, "--pipeline-parallel", 2)
CP = ("ladder/gpt/3_megatron.py", *SIZES, 4, "--context-parallel", 2)


def trace(*arguments, cwd, **changes):
    command = (sys.executable, "-P", "-m", "tools.trace", *arguments)
    return run(*command, cwd=cwd, PYTHONPATH=str(REPOSITORY), **changes)


def counted(folder, program, *options):
    """What the command prints, what it recorded, and what torch counted, by rank."""
    done = trace(
        *(COUNTED, REPOSITORY / program, *options),
        cwd=folder,
        COUNTED=str(folder),
        TORCH_FR_BUFFER_SIZE="2000",
    )
    traces: Any = read_json(folder / "runs/trace/trace.json")
    counts = [read_json(folder / f"{rank}.json") for rank in range(len(traces))]
    return done.output(), traces, counts


@pytest.fixture(scope="module")
def tp_dp(tmp_path_factory):
    return counted(tmp_path_factory.mktemp("tp_dp"), *TP_DP)


def communicated(trace):
    return [event for event in trace["events"] if event["kind"] != "phase"]


def check_counts(traces, counts):
    """Kinds, ranks, bytes and numbers are torch's. gloo's reduce-scatter is an all-reduce."""
    for found, expected in zip(traces, counts, strict=True):
        of_all = [event for event in communicated(found) if "peer" not in event]
        assert Counter(
            (event["kind"].replace("reduce-scatter", "all-reduce"), *event["ranks"], event["bytes"])
            for event in of_all
        ) == Counter((kind, *ranks, size) for kind, ranks, size in expected["collectives"])
        single = [event for event in communicated(found) if "peer" in event]
        assert [
            (event["kind"][:4].replace("rece", "recv"), event["bytes"]) for event in single
        ] == [(kind, size) for kind, size in expected["messages"]]


def test_tensor_and_data_parallel_ranks_communicate_what_torch_counts(tp_dp):
    _, traces, counts = tp_dp
    check_counts(traces, counts)
    phases = Counter((event["phase"], event["group"]) for event in communicated(traces[0]))
    parts = [f"{part} {number}" for number in (1, 2) for part in ("forward", "backward")]
    assert phases == {
        **{(part, "tensor"): 2 for part in parts},
        **{("gradients", "data"): 1, ("optimizer", "model"): 1, ("log", "data"): 1},
    }


def test_ranks_have_the_coordinates_of_the_page(tp_dp):
    """docs/course/03_ranks.md: rank = tensor rank + t x data rank + t x d x stage."""
    for rank, found in enumerate(tp_dp[1]):
        place = {name: coordinate for name, (coordinate, _) in found["place"].items()}
        assert rank == place["tensor"] + 2 * place["data"] + 4 * place["stage"]
        assert (place["context"], place["expert"]) == (0, 0)


def test_it_says_which_ranks_read_equal_samples(tp_dp):
    out, traces, _ = tp_dp
    own, others = [0, 1, 4, 5], [2, 3, 6, 7]  # micro batches of two replicas alternate
    assert [found["samples"] for found in traces] == [own, own, others, others]
    assert [found["data"] for found in traces] == ["A", "A", "B", "B"]  # of the tensors themselves
    told = "Ranks 0 and 1 read samples 0, 1, 4, 5; ranks 2 and 3 read samples 2, 3, 6, 7.\n"
    assert told in out


def test_shapes_of_shards_and_of_whole_weights(tp_dp):
    column, row = [[32, 784], [64, 784]], [[3, 32], [3, 64]]
    for found in tp_dp[1]:
        weights = {name: [own, whole] for name, own, whole in found["weights"]}
        assert len(weights) == 8
        assert (weights["linear1.weight"], weights["linear2.weight"]) == (column, row)
        assert weights["linear4.bias"] == [[784], [784]]


def test_losses(tp_dp):
    """The mean of the replicas' losses is what the program prints."""
    out, traces, _ = tp_dp
    losses = [found["loss"] for found in traces]
    assert losses[0] == losses[1] != losses[2] == losses[3]
    (printed,) = re.findall(r"The program prints: 1 (\S+)", out)
    assert sum(losses) / 4 == pytest.approx(float(printed), rel=1e-6)


def test_the_table_fits_a_terminal(tp_dp):
    out, *_ = tp_dp
    table = out[out.index("\nrank 0") :].partition("\n\n")[0].splitlines()
    assert max(map(len, out.splitlines())) <= 126
    assert sum(" -- backward 2" in f" {line}" for line in table) == 1  # ranks share rows
    assert sum("all-reduce" in line for line in table) == 11


def test_the_picture_has_a_lane_for_each_rank(tp_dp, tmp_path):
    """Boxes for the parts; each collective of a group once, with a dot for each rank."""
    from tools.trace_picture import draw

    image = ElementTree.fromstring(draw("program", tp_dp[1]))
    name = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in image.iter(f"{name}text")]
    assert [text for text in texts if text and text.startswith("rank ")] == [
        f"rank {rank}" for rank in range(4)
    ]
    assert len([*image.iter(f"{name}rect")]) == 1 + 4 * 7
    assert texts.count("all-reduce 6.27 kB, tensor") == 2 * 4
    assert len([*image.iter(f"{name}circle")]) == 2 * 2 * 11


@pytest.mark.long
def test_stages_send_what_torch_counts(tmp_path):
    out, traces, counts = counted(tmp_path, *PP)
    check_counts(traces, counts)
    sent = [
        [(e["phase"], e["kind"], e["role"]) for e in communicated(found) if "peer" in e]
        for found in traces
    ]
    for kind, place in (("send", 0), ("receive", 1)):
        assert [part for part, how, _ in sent[place] if how == kind] == ["forward 1", "forward 2"]
        assert [part for part, how, _ in sent[1 - place] if how == kind] == [
            *("backward 1", "backward 2")
        ]
    assert "send output 48 B to 1" in out
    assert max(map(len, out.splitlines()[1:])) <= 80  # the first has the program's path


@pytest.mark.long
def test_context_parallel_ranks_communicate_what_torch_counts(tmp_path):
    out, traces, counts = counted(tmp_path, *CP)
    check_counts(traces, counts)
    kinds = Counter((event["phase"], event["kind"]) for event in communicated(traces[1]))
    assert kinds["forward 1", "all-gather"] == kinds["backward 2", "reduce-scatter"] == 8
    assert "8 x | all-gather 65.5 kB context 0 1" in out
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert "Ranks 0 and 1 read samples 0 to 7.\nOf equal samples, each context-parallel" in out


@pytest.mark.long
def test_what_sequence_parallelism_communicates(tmp_path):
    """As the ladder's page says, compared with tensor parallelism alone."""
    sizes, kinds = [], []
    for more in ((), ("--sequence-parallel",)):
        trace("gpt", "--devices", 2, "--tensor-parallel", 2, *more, cwd=tmp_path).output()
        (found, _) = read_json(tmp_path / "runs/trace/trace.json")
        events = [event for event in communicated(found) if event["phase"] != "optimizer"]
        # An all-reduce communicates as much as a reduce-scatter and an all-gather.
        sizes.append(sum(e["bytes"] * (1 + (e["kind"] == "all-reduce")) for e in events))
        kinds.append(Counter((e["phase"], e["kind"]) for e in events))
    assert sizes[1] / sizes[0] == pytest.approx(1.28, abs=0.005)
    assert {kind for _, kind in kinds[0]} == {"all-reduce"}
    assert kinds[1]["forward 1", "all-reduce"] == 4  # of the embedding and the cross entropy
    assert (kinds[0]["gradients", "all-reduce"], kinds[1]["gradients", "all-reduce"]) == (0, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ("--dataset", "digits"),
        ("gpt", "--pipeline-parallel", 2, "--chunks", 2),
        ("gpt", "--experts", 4, "--expert-parallel", 2, "--distributed-optimizer"),
        (REPOSITORY / "model_pretrain.py", "--dataset", "digits", "--devices", 2),
        ("gpt", "--devices", 8, "--tensor-parallel", 2, "--pipeline-parallel", 2),
    ],
    ids=str,
)
def test_other_programs_and_layouts(options, tmp_path):
    """Each event of one rank has its place beside the events of the ranks that take part."""
    done = trace(*options, cwd=tmp_path)
    assert "Loss: " in done.output()
    assert done.err == ""
    traces: Any = read_json(tmp_path / "runs/trace/trace.json")
    for row in align([found["events"] for found in traces]):
        for rank, event in row.items():
            if "peer" in event:
                other = row[event["peer"]]
                assert (other["peer"], other["bytes"]) == (rank, event["bytes"])
                # The next chunk is on the other rank.
                parts = [one["phase"].partition(",")[0] for one in (event, other)]
                assert parts[0] == parts[1]
            elif "ranks" in event:
                assert {row[one]["kind"] for one in event["ranks"]} == {event["kind"]}


#: Batches of somebody's own program, without numbers; as Megatron-LM's, they have no `__iter__`.
BATCHES = """
class Batches:
    def __next__(self):
        seed = torch.Generator().manual_seed(distributed.get_rank())
        return (torch.rand(64, 784, generator=seed),) * 2


def shared(batches):
    noise = next(batches)[0] if batches else torch.empty(64, 784)
    distributed.broadcast(noise, 0)
    return noise, noise


def main()"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("edits", "told"),
    [
        ({}, "Rank 0 reads data A; rank 1 reads data B.\n"),
        (  # one tensor rank reads, and shares, as in Megatron-LM
            {
                "Batches()": "None if distributed.get_rank() else Batches()",
                "in next(batches)": "in shared(batches)",
            },
            "Rank 0 reads data A; rank 1 reads no data.\n",
        ),
    ],
)
def test_data_of_an_own_program(edits, told, tmp_path):
    source = (REPOSITORY / "ladder/3_megatron.py").read_text()
    for old, new in {
        "str(Path(__file__).resolve().parents[1])": repr(str(REPOSITORY)),
        "(samples[first : first + size] for first in firsts)": "Batches()",
        "\ndef main()": BATCHES,
        **edits,
    }.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    (tmp_path / "own.py").write_text(source)
    sizes = ("--batch-size", 64, "--micro-batch-size", 64)
    options = ("--dataset", "digits", "--tensor-parallel", 2, *sizes)
    assert told in trace("own.py", *options, cwd=tmp_path).output()


def test_rows_of_an_order_that_no_rows_have():
    """Two ranks that send first, and then receive."""
    both = [
        [{"kind": kind, "peer": 1 - rank, "role": "", "bytes": 4} for kind in ("send", "receive")]
        for rank in (0, 1)
    ]
    rows = align(both)
    assert [len(row) for row in rows] in ([1, 2, 1], [2, 2], [2, 1, 1])
    assert sum(len(row) for row in rows) == 4


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [
        ("aaab", [(3, ["a"]), (1, ["b"])]),
        ("ababc", [(2, ["a", "b"]), (1, ["c"])]),
        ("abc", [(1, ["a"]), (1, ["b"]), (1, ["c"])]),
        ("aabaab", [(2, ["a", "a", "b"])]),
    ],
)
def test_repeated_rows_are_folded(rows, blocks):
    assert fold(rows, str) == blocks


def test_a_wrong_program_is_refused(tmp_path):
    done = trace("nothing.py", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert "nothing.py: there is no such program. Name gpt, or a file that trains.\n" in done.err


@pytest.mark.long
def test_a_program_with_too_few_processes_names_the_option(tmp_path):
    """Nobody knows what its own option means."""
    source = (REPOSITORY / "ladder/3_megatron.py").read_text()
    source = source.replace("str(Path(__file__).resolve().parents[1])", repr(str(REPOSITORY)))
    source = source.replace("options.tensor_parallel,", "2,")
    (tmp_path / "own.py").write_text(source)
    done = trace("own.py", "--dataset", "digits", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert "--devices N starts N processes, not 1." in done.err


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--steps", 1], 2, "--steps 1: has to be at least 2."),
        (["--devices", 3, "--tensor-parallel", 2], 2, "--devices 3: has to be a multiple of 2"),
        ([REPOSITORY / "ladder/1_torch.py", "--dataset", "digits"], 2, "no rank made a training"),
        (["--tensor-parallel", 3, "--dataset", "digits"], 1, "64 is not divisible by 3\nThe trace"),
    ],
)
def test_wrong_options(arguments, status, says, tmp_path):
    done = trace(*arguments, cwd=tmp_path)
    assert (done.status, done.out) == (status, "")
    assert says in done.err


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "of_rank_1"),
    [
        ("loss = nn.functional", "forward 1: all-reduce 4 B all"),
        ("optimizer.zero_grad()", "nothing"),  # before the schedule of the first step
    ],
)
def test_ranks_that_hang_are_told(before, of_rank_1, tmp_path):
    """Rank 1 alone calls a collective, and rank 0 waits in the next one of their layers."""
    extra = "distributed.get_rank() and distributed.all_reduce(torch.zeros(1))"
    source = (REPOSITORY / "ladder/3_megatron.py").read_text()
    source = re.sub(rf"^( +)(?={re.escape(before)})", rf"\1{extra}\n\1", source, flags=re.MULTILINE)
    source = source.replace("str(Path(__file__).resolve().parents[1])", repr(str(REPOSITORY)))
    (tmp_path / "own.py").write_text(source)
    number = source[: source.index(extra)].count("\n") + 1
    code = "import sys; from tools import ranks, trace; ranks.PATIENCE = 5; sys.exit(trace.main())"
    options = ("own.py", "--dataset", "digits", "--tensor-parallel", 2)
    command = (sys.executable, "-P", "-c", code, *options)
    done = run(*command, cwd=tmp_path, PYTHONPATH=str(REPOSITORY))
    assert (done.status, done.out) == (1, "")
    assert f"  rank 1, {of_rank_1} (own.py, line {number})\n" in done.err
    assert re.search(
        r"  rank 0, \w+ 1: all-reduce [\d.]+ k?B tensor 0 1 \(own.py, line \d+\)\n", done.err
    )


#: A program that waits.
SLOW = """
import os, time
from pathlib import Path
Path(os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(100)
"""


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks(number, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    command = (sys.executable, "-P", "-m", "tools.trace", "slow.py", "--devices", "2")
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(PYTHONPATH=str(REPOSITORY))
    ) as started:
        files = [tmp_path / "0", tmp_path / "1"]
        while not all(file.exists() and file.read_text() for file in files):
            assert started.poll() is None
            time.sleep(0.05)
        started.send_signal(number)
        assert started.wait(timeout=30) == 128 + number
    for file in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)
