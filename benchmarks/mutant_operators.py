"""The operators of the mutation study (mutants.py): small changes to a Python or shell source.

An operator replaces some bytes of a file, so all other text stays as it is. It changes no import,
annotation, docstring or f-string, and no code for type checkers.
"""

import ast
import re
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

SIGNS: dict[type[ast.AST], tuple[str, str]] = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not")},
    **{ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*")},
    **{ast.Mod: ("%", "//"), ast.Pow: ("**", "*"), ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|")},
    **{ast.Div: ("/", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<")},
    **{ast.And: ("and", "or"), ast.Or: ("or", "and")},
}
#: What a line of a shell script can become: pattern, replacement, operator.
SHELL = (
    (r"\[\[ (?!! )", "[[ ! ", "test negated"),
    (r"\[\[ ! ", "[[ ", "test negated"),
    (r"(?<![$(])\(\((?!\()", "! ((", "test negated"),
    (r"\bif (?!! |\[\[|\(\()", "if ! ", "test negated"),
    (r"&&", "||", "sign replaced"),
    (r"\|\|", "&&", "sign replaced"),
    (r"\S.*", ":", "line deleted"),
)
Edit = tuple[str, int, int, str]  # operator, first byte, byte behind the last, replacement


@dataclass(frozen=True)
class Mutant:
    """One change to one file; it stays the same mutant when its line moves.

    Attributes:
        file: The path within the project.
        source: The text of the line where the change begins.
        nth: Which of the file's lines with that text it is.
        column: The byte of that line.
        operator: The kind of change.
        old: The text that is replaced.
        new: Its replacement.
        line: The line's number.
        begin: The byte of the file.
    """

    file: str
    source: str
    nth: int
    column: int
    operator: str
    old: str
    new: str
    line: int = field(compare=False)
    begin: int = field(compare=False)

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}:{self.column} {self.operator}: {old} -> {new}"

    def apply(self, text: bytes) -> bytes:
        """Returns the changed file."""
        end = self.begin + len(self.old.encode())
        return text[: self.begin] + self.new.encode() + text[end:]

    def is_valid(self, text: bytes) -> bool:
        """Whether the changed file compiles and means something else."""
        changed = self.apply(text)
        if not self.file.endswith(".py"):
            return not subprocess.run(["bash", "-n"], input=changed, capture_output=True).returncode
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(changed)
                compile(tree, self.file, "exec")
        except SyntaxError:
            return False
        return ast.dump(tree) != ast.dump(ast.parse(text))


def mutants_of(file: str, root: Path) -> list[Mutant]:
    """Returns all mutants of a file, also those that do not compile."""
    text = (root / file).read_bytes()
    lines = text.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    sources = [line.decode().strip() for line in lines]
    found = []
    for operator, begin, end, new in (python_edits if file.endswith(".py") else shell_edits)(text):
        line = sum(start <= begin for start in starts)
        source, column = sources[line - 1], begin - starts[line - 1]
        nth, old = sources[:line].count(source), text[begin:end].decode()
        found.append(Mutant(file, source, nth, column, operator, old, new, line, begin))
    return found


def shell_edits(text: bytes) -> Iterator[Edit]:
    """Yields the changes to a shell script, but not to its here-documents and quoted programs."""
    start, until = 0, ""
    for line in text.decode().splitlines(keepends=True):
        if until:
            until = "" if line.startswith(until) else until
        elif quoted := re.search(r"<<'(\w+)'$|=(')$", line):
            until = quoted[1] or quoted[2]
        elif not line.lstrip().startswith("#"):
            for pattern, new, operator in SHELL:
                for match in re.finditer(pattern, line):
                    begin, end = (start + len(line[:at].encode()) for at in match.span())
                    yield operator, begin, end, new
        start += len(line.encode())


def python_edits(text: bytes) -> Iterator[Edit]:
    """Yields the changes to a Python source."""
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]

    def span(node: ast.AST) -> tuple[int, int]:
        begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return begin, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def code(node: ast.AST) -> str:
        return text[slice(*span(node))].decode()

    for node in walk(ast.parse(text)):
        operands, signs = operation(node)
        for (left, right), sign in zip(pairwise(operands), signs, strict=False):
            begin, end = span(left)[1], span(right)[0]
            changed = text[begin:end].decode().replace(*SIGNS.get(type(sign), ("", "")), 1)
            yield "sign replaced", begin, end, changed
        for test in conditions(node):
            yield "condition negated", *span(test), f"(not ({code(test)}))"
        match node:
            case ast.UnaryOp(op=ast.Not()):
                yield "condition negated", *span(node), f"({code(node.operand)})"
            case ast.Constant(value=bool()):
                yield "constant replaced", *span(node), str(not node.value)
            case ast.Constant(value=int() | float() as value):
                for number in (value + 1, value - 1):
                    yield "constant replaced", *span(node), f"({number})"
            case ast.Break() | ast.Continue():
                other = "continue" if isinstance(node, ast.Break) else "break"
                yield "statement replaced", *span(node), other
            case ast.Return(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp() as value):
                yield "return value replaced", *span(value), f"not ({code(value)})"
            case ast.Return(value=ast.expr() as value):
                yield "return value replaced", *span(value), "''" if is_text(value) else "None"
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete():
                yield "statement deleted", *span(node), "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield "statement deleted", *span(node), "pass"
            case ast.Call():
                arguments: list[ast.AST] = sorted([*node.args, *node.keywords], key=span)
                for one in node.keywords:
                    others = ", ".join(code(other) for other in arguments if other is not one)
                    yield "argument deleted", span(arguments[0])[0], span(arguments[-1])[1], others
                for left, right in pairwise(node.args):
                    gap = text[span(left)[1] : span(right)[0]].decode()
                    swapped = code(right) + gap + code(left)
                    yield "arguments swapped", span(left)[0], span(right)[1], swapped


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes that may change."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            skipped = isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom)
            if isinstance(child, ast.If):
                skipped = ast.unparse(child.test).startswith(("TYPE_CHECKING", "__name__"))
            if isinstance(child, ast.AST) and name not in ("annotation", "returns") and not skipped:
                yield from walk(child)


def operation(node: ast.AST) -> tuple[list[ast.expr], list[ast.AST]]:
    """Returns the operands of an operation, and the signs between them."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators], [*node.ops]
        case ast.BoolOp():
            return node.values, [node.op] * len(node.values)
        case ast.BinOp() if not is_text(node.left) and not is_text(node.right):
            return [node.left, node.right], [node.op]
    return [], []


def conditions(node: ast.AST) -> list[ast.expr]:
    """Returns the conditions of a statement or expression that do not begin with `not`."""
    found = node.ifs if isinstance(node, ast.comprehension) else []
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        found = [node.test]
    return [test for test in found if not isinstance(test, ast.UnaryOp)]


def is_text(node: ast.expr) -> bool:
    return isinstance(getattr(node, "value", None), str) or isinstance(node, ast.JoinedStr)
