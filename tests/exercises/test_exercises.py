"""The exercises: solutions are right, known mistakes are recognized, and files are written once."""

import itertools
import json
import re
import shutil
import sys

import pytest

from exercises import grading
from exercises.blanks import MARK, missing, taken_out
from exercises.course import read_course
from exercises.grading import Outcome, diagnose, fit, outcomes_of, right_values
from megakit.testing import Ranks
from tests.scripts import REPOSITORY, run

COURSE = read_course()
KNOWN = json.loads(grading.KNOWN.read_text())
each = pytest.mark.parametrize("exercise", COURSE, ids=[one.name for one in COURSE])


@pytest.fixture(scope="module")
def own():
    """Ranks with the limit of an exercise."""
    with Ranks(4, timeout=grading.LIMIT) as pool:
        yield pool


@pytest.mark.long
@each
def test_the_solution_is_right(exercise, own, tmp_path):
    """In the learner's file, where the parts of other exercises are given."""
    file = tmp_path / "right.py"
    file.write_text(solved(exercise))
    outcomes = outcomes_of(own, exercise, file, right_values(own, exercise))
    assert {(one.error, one.wrong, one.besides) for one in outcomes} == {("", None, "")}


def solved(exercise):
    """Returns a learner's file with the solution."""
    source = exercise.blank
    for _, code in sorted(taken_out(exercise.solution, exercise.gaps)):
        line = re.findall(rf'.*raise NotImplementedError\("{MARK}"\)', source)[0]
        source = source.replace(line, code, 1)
    for old, new in MENDS.get(exercise.number, ()):
        assert source.count(old) == 1
        source = source.replace(old, new)
    return source


#: How the two that are to be mended may be.
MENDS = {
    11: [
        ("return total / count, report", "return total, count, report"),
        (
            "    finalize_model_grads_func=",
            "    calculate_per_token_loss=True,\n        finalize_model_grads_func=",
        ),
    ],
    12: [("    pipeline_dtype=", "    batch_p2p_comm=False,\n        pipeline_dtype=")],
}


@pytest.mark.long
@each
def test_each_mistake_is_recognized(exercise, own):
    recognized = {
        name: [one.name for one in diagnose(exercise, outcomes)]
        for name, outcomes in grading.measure(own, exercise).items()
    }
    assert recognized == {one.name: [one.name] for one in exercise.mistakes}


#: By exercise: right values under every layout, and yet wrong.
CHEATS = {
    2: [
        (
            "range(step * batch + rank * size, (step + 1) * batch, ranks",
            "range(step * batch, (step + 1) * batch, 1",
        )
    ],
    10: [
        (
            "self.own = slice(group.rank() * size, (group.rank() + 1) * size)",
            "self.own = slice(None)",
        ),
        ("whole = torch.empty_like(part.repeat(self.group.size()))", "whole = part"),
        ("distributed.all_gather_into_tensor(whole, part, group=self.group)", ""),
    ],
    12: [
        (
            "start_process_groups(options)\n    mend",
            "options.chunks = 1\n    start_process_groups(options)\n    mend",
        )
    ],
}


@pytest.mark.parametrize("number", CHEATS)
def test_right_values_are_not_enough(number, project):
    """Replicas that read the same samples, whole moments, a pipeline that is not interleaved."""
    source = COURSE[number - 1].solution
    for old, new in CHEATS[number]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    file = project / "build" / "cheat.py"
    file.parent.mkdir()
    file.write_text(source)
    done = exercise(project, number, "--file", file)
    assert done.status == 1
    assert "right, but " in done.out
    assert " ".join(COURSE[number - 1].besides.split()) in " ".join(done.out.split())


@pytest.mark.long
@pytest.mark.parametrize(
    ("does", "says"),
    [("while time.process_time() < 8: sum(range(10**6))", ""), ("time.sleep(100)", grading.HANGS)],
)
def test_a_slow_rank_does_not_hang(does, says, own, tmp_path, monkeypatch):
    """Rank 1 waits for rank 0 longer than the limit, while rank 0 gets on, or does not."""
    file = tmp_path / "slow.py"
    file.write_text(SLOW.format(does))
    monkeypatch.setattr(grading, "IDLE", 3)
    monkeypatch.chdir(tmp_path)
    outcome = grading.run(own, file, "--batch-size 1", 2)
    assert outcome.error == says
    assert outcome.values == ({} if says else {1: (1.0,)})
    assert {*outcome.where.split(" and ")} == ({"line 6", "line 7"} if says else {""})


SLOW = """
import os, time
from torch import distributed
distributed.init_process_group("gloo")
if os.environ["RANK"] == "0":
    {}
distributed.barrier()
print("1 1.000000000")
distributed.destroy_process_group()
"""


@each
def test_mistakes_differ_from_each_other_and_from_what_is_right(exercise):
    known = KNOWN[exercise.name]
    assert [*known] == [mistake.name for mistake in exercise.mistakes]
    assert len(known) >= 1 + 2 * bool(exercise.gaps)
    for (name, marks), other in itertools.permutations(known.items(), 2):
        assert not fit(outcomes_with(marks), other[1]), (name, other[0])


def outcomes_with(marks):
    """Returns outcomes of which only the marks are known."""
    outcomes = []
    for mark in marks:
        if isinstance(mark, str):
            outcomes.append(Outcome({}, mark))
            continue
        first, step, *values = mark
        right: grading.Values = {first: (), **({step: (1.0, 1.0)} if step else {})}
        found: grading.Values = {first: (), **({step: tuple(values)} if values else {})}
        outcomes.append(Outcome(found, right=right))
    return outcomes


def test_a_mistake_is_recognized_where_rounding_has_not_grown():
    """The last loss of this one differs by 3e-5 between processors."""
    marks = KNOWN["02_samples"]["global rank"]
    assert [mark[1] for mark in marks] == [0, 1, 1]


@each
def test_a_blank_lacks_the_solution_and_says_what_to_write(exercise):
    compile(exercise.blank, exercise.name, "exec")
    assert [task for _, task in missing(exercise.blank)] == [
        " ".join(gap.task.split()) for gap in sorted_by_line(exercise)
    ]
    for _, code in taken_out(exercise.solution, exercise.gaps):
        assert "\n" not in code or code not in exercise.blank
    for edit in exercise.planted:
        assert edit.old not in exercise.blank
    assert [*missing(exercise.solution)] == []


@each
def test_a_file_does_not_show_what_another_exercise_asks_for(exercise):
    file = {line.strip() for line in exercise.blank.splitlines()}
    for other in [one for one in COURSE if one is not exercise]:
        rows = [code for _, code in taken_out(other.solution, other.gaps)]
        rows += [edit.old for edit in other.planted]
        asked = {line.strip() for code in rows for line in code.splitlines()} - {"", ")"}
        assert not asked & file, other.name


@each
def test_the_page_to_read_first_does_not_show_the_solution(exercise):
    rows = [code for _, code in taken_out(exercise.solution, exercise.gaps)]
    calls = {line.strip() for code in rows for line in code.splitlines() if line.endswith(")")}
    for page in re.findall(r"docs/course/\w+.md", exercise.reads):
        text = (REPOSITORY / page).read_text().partition("## What goes wrong")[0]
        assert not [call for call in calls - {")"} if call in text]


def sorted_by_line(exercise):
    lines = [line for line, _ in taken_out(exercise.solution, exercise.gaps)]
    return [
        gap for _, gap in sorted(zip(lines, exercise.gaps, strict=True), key=lambda one: one[0])
    ]


@pytest.fixture
def project(tmp_path):
    """A copy of the exercises, where a learner's files are written."""
    for name in ("megakit", "mnist", "ladder"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    shutil.copytree(
        REPOSITORY / "exercises",
        tmp_path / "exercises",
        ignore=shutil.ignore_patterns("mine", "__pycache__"),
    )
    return tmp_path


def exercise(project, *arguments):
    return run(sys.executable, project / "exercises/exercise.py", *arguments, cwd=project)


def fill_in(project, edits):
    """Writes the solution of exercise 4 with changes into the learner's file."""
    source = (REPOSITORY / "exercises/by_hand.py").read_text()
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    (project / "exercises/mine/04_row_parallel.py").write_text(source)


TWICE = [
    ("linear(x, self.weight)", "linear(x, self.weight, self.bias)"),
    ("self.group) + self.bias", "self.group)"),
]
UNKNOWN = [
    ("summand.clone()", "summand.clone() * 1.01"),
    ("summand = nn.functional", 'print("see", x.shape)\n        summand = nn.functional'),
]


RAISES = f'        raise NotImplementedError("{MARK}")'


def test_a_learner_s_way(project):
    """An empty file, a known mistake, an unknown one, an error of one's own, the right answer."""
    begun = exercise(project, 4)
    assert begun.status == 0
    assert "The file is exercises/mine/04_row_parallel.py." in begun.out
    file = project / "exercises/mine/04_row_parallel.py"
    assert file.read_text().count(MARK) == 8
    empty = exercise(project, 4)
    assert empty.status == 1
    assert empty.out.count("still raises NotImplementedError") == 4
    line = file.read_text().splitlines().index(RAISES) + 1
    first = f"Line {line} of 04_row_parallel.py still raises NotImplementedError: return the sum of"
    assert first in " ".join(empty.out.split())

    fill_in(project, TWICE)
    before = file.read_text()
    known = exercise(project, 4)
    assert known.status == 1
    assert "This is a known mistake:\nThe bias is added on each rank before the sum" in known.out
    page = (REPOSITORY / "docs/course/index.md").read_text()
    shown = page.split("<!-- printed: ./run exercise 4 -->\n```text\n")[1].split("```")[0]
    lines, printed = (re.sub(r"0\.\d+", "N", text) for text in (shown, known.out))
    assert [line for line in lines.splitlines() if line not in printed.splitlines()] == []
    assert "Read docs/course/04_tensor_parallel.md" in known.out
    assert file.read_text() == before

    fill_in(project, UNKNOWN)
    unknown = exercise(project, 4)
    assert unknown.status == 1
    assert "from step 1 on: loss 0." in unknown.out
    assert unknown.out.count("  rank 1: see torch.Size([32, 32])") == 10
    assert "No known mistake gives these numbers." in unknown.out

    fill_in(
        project,
        [("return gradient, None\n\n\nclass Column", "return grad, None\n\n\nclass Column")],
    )
    broken = exercise(project, 4)
    assert broken.status == 1
    line = file.read_text().splitlines().index("        return grad, None") + 1
    says = f"NameError: name 'grad' is not defined\n  line {line}: return grad, None"
    assert says in broken.out

    file.write_text(file.read_text().replace("self.bias = whole.bias", "self.bias = (whole.bias"))
    unreadable = exercise(project, 4)
    assert unreadable.status == 1
    assert "of 04_row_parallel.py: '(' was never closed." in unreadable.out
    fill_in(project, [])
    right = exercise(project, 4)
    assert (right.status, right.out.count("right"), right.out[-7:]) == (0, 2, "Right.\n")
    assert " 4  A row-parallel linear layer" in exercise(project).out
    assert exercise(project).out.splitlines()[3].endswith(" right")


def test_hint_and_solution_write_no_file(project):
    assert "Sum first, then add the bias" in exercise(project, 4, "--hint").output()
    shown = exercise(project, 4, "--solution").output()
    assert "shard = whole.weight.chunk(group.size(), dim=1)[group.rank()]" in shown
    assert (
        "+        batch_p2p_comm=options.batch_p2p," in exercise(project, 12, "--solution").output()
    )
    assert not (project / "exercises/mine").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("15",), "run: exercise 15: the exercises have the numbers 1 to 14. "),
        (("1", "--file", "nowhere.py"), "nowhere.py: "),
    ],
)
def test_what_is_refused(arguments, says, project):
    done = exercise(project, *arguments)
    assert done.status == 2
    assert says in done.err


def test_one_layout_alone_is_no_mistake():
    """All layouts have to give a mistake's numbers."""
    marks = KNOWN["03_column_parallel"]["no sum of gradients"]
    assert diagnose(COURSE[2], outcomes_with(marks)) == [COURSE[2].mistakes[0]]
    assert diagnose(COURSE[2], outcomes_with([marks[0], [1, 1, 2.0, 2.0]])) == []
