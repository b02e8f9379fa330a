"""Small wrong changes of mfsdp_core, made systematically: what a validator is measured with.

A mutant changes one place of one file. Places come from the syntax tree, in the order of the
source, so that a seed draws the same sample as long as the source is the same. Left out is what no
result depends on: docstrings, annotations, messages of errors, imports.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from bench.validate.patched_core import CORE

_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
}
#: Names that stand for each other's opposite, axis or dtype.
_EXCHANGED = {
    "inner": "outer",
    "outer": "inner",
    "float32": "bfloat16",
    "float64": "float32",
    "forward": "backward",
    "backward": "forward",
    "first": "last",
    "last": "first",
    "main_grads": "compute",
    "grad_comm": "main_grads",
    "main_params": "compute",
    "acquire": "release",
    "inner_rank": "outer_rank",
    "outer_rank": "inner_rank",
    "inner_size": "outer_size",
    "outer_size": "inner_size",
    "ADD": "COPY",
    "COPY": "ADD",
    "SUM": "AVG",
    "AVG": "SUM",
    "REDUCE_SCATTER": "ALL_REDUCE",
    "is_last": "is_idle",
}
#: Calls that only tell or check; dropping one changes no result.
_TELLING = ("_publish", "publish", "warn", "warning", "write")


@dataclass(frozen=True)
class Mutant:
    """One change. file: below mfsdp_core. kind: what was done. line: from 1.

    function: the name of the function around it; empty at the level of a module or a class.
    statement: first and last line of the statement around it, of a block its head alone.
    """

    file: str
    kind: str
    line: int
    function: str
    statement: tuple[int, int]
    start: int
    end: int
    text: str

    @property
    def room(self) -> str:
        """The folder, or `top` for modules that lie in none."""
        return self.file.partition("/")[0] if "/" in self.file else "top"

    @property
    def id(self) -> str:
        """Unique among all."""
        return f"{self.file}:{self.line}:{self.kind}:{self.start}"

    def is_on(self, lines: Mapping[str, set[int]]) -> bool:
        """Whether the statement is among executed lines, by file."""
        first, last = self.statement
        return not lines.get(self.file, set()).isdisjoint(range(first, last + 1))

    def source(self, original: str) -> str:
        """The changed source."""
        data = original.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def write(self, core: Path) -> None:
        """Make the change in a copy of the core."""
        path = core / self.file
        path.write_text(self.source(path.read_text()))


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in order of their places; a few may not compile."""
    found = _Places(file, source)
    found.visit(ast.parse(source))
    return found.mutants


def sample(seed: int, per_room: int, rooms: tuple[str, ...] = ()) -> list[Mutant]:
    """At most `per_room` mutants of every room, or of `rooms`, drawn by `seed`; rooms in turn."""
    by_room: dict[str, list[Mutant]] = {}
    for path in sorted(CORE.rglob("*.py")):
        file = str(path.relative_to(CORE))
        for mutant in mutants_of(file, path.read_text()):
            by_room.setdefault(mutant.room, []).append(mutant)
    drawn = {}
    for room, mutants in sorted(by_room.items()):
        if not rooms or room in rooms:
            Random(f"{seed}:{room}").shuffle(mutants)
            drawn[room] = list(islice(filter(_compiles, mutants), per_room))
    longest = max(map(len, drawn.values()), default=0)
    return [m for index in range(longest) for ms in drawn.values() for m in ms[index : index + 1]]


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(mutant.source((CORE / mutant.file).read_text()), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def _head(node: ast.stmt) -> tuple[int, int]:
    """Lines of a statement; of a block those before its body."""
    last = node.end_lineno or node.lineno
    body = getattr(node, "body", None)
    if body:
        last = max(node.lineno, body[0].lineno - 1)
    return node.lineno, last


class _Places(ast.NodeVisitor):
    """Collects mutants; knows the function that it is in."""

    def __init__(self, file: str, source: str) -> None:
        self.mutants: list[Mutant] = []
        self._file = file
        self._data = source.encode()
        starts = [0]
        for line in self._data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._function = ""
        self._statement = (0, 0)

    def visit(self, node: ast.AST) -> None:
        """As every visitor; knows the statement afterwards."""
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        around, self._statement = self._statement, _head(node)
        super().visit(node)
        self._statement = around

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """The body, without docstring, decorators and annotations."""
        around, self._function = self._function, node.name
        if node.name not in ("__repr__", "__str__"):
            # Defaults are made once, and count in every call.
            self._statement = (node.body[0].lineno, node.end_lineno or node.lineno)
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.visit(default)
            for statement in node.body:
                self.visit(statement)
        self._function = around

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """The body alone."""
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        """A check that raises no more; its message is left alone."""
        self._add("statement dropped", node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Left alone: it serves the type checker."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value alone."""
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call that is left out, unless it only tells."""
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            called = node.value.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in _TELLING:
                return
            self._add("wait skipped" if "wait" in name else "statement dropped", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Left out."""
        self._add("statement dropped", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """State that is not kept: assignments to attributes and items."""
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add("statement dropped", node, "pass")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        """The condition negated, unless it is about types alone."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        """Its conditions are changed from inside: negated, most loops would not end."""
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """The condition negated."""
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Conditions negated."""
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """The bound shifted, the comparison turned round."""
        operator = _COMPARISONS.get(type(node.ops[0]))
        if operator is not None and len(node.ops) == 1:
            left, right = self._text(node.left), self._text(node.comparators[0])
            self._add("comparison shifted", node, f"({left} {operator} {right})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another operator: divisors, offsets and sums."""
        operator = _OPERATORS.get(type(node.op))
        if operator is not None and not isinstance(node.left, ast.Constant | ast.JoinedStr):
            text = f"({self._text(node.left)} {operator} {self._text(node.right)})"
            self._add("operator changed", node, text)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` for `or`."""
        word = " or " if isinstance(node.op, ast.And) else " and "
        text = word.join(f"({self._text(value)})" for value in node.values)
        self._add("and for or", node, f"({text})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Numbers and truth values; words if they have an opposite."""
        if isinstance(node.value, bool):
            self._add("truth value turned", node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add("number shifted", node, str(node.value + 1))
        elif isinstance(node.value, str) and node.value in _EXCHANGED:
            self._add("exchanged", node, repr(_EXCHANGED[node.value]))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Messages are left alone."""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """One of a pair of names for the other."""
        if node.attr in _EXCHANGED and isinstance(node.ctx, ast.Load):
            text = f"{self._text(node.value)}.{_EXCHANGED[node.attr]}"
            self._add("exchanged", node, text)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        self._add("condition negated", test, f"(not ({self._text(test)}))")

    def _add(self, kind: str, node: ast.expr | ast.stmt, text: str) -> None:
        start, end = self._place(node)
        place = (node.lineno, self._function, self._statement)
        self.mutants.append(Mutant(self._file, kind, *place, start, end, text))

    def _text(self, node: ast.expr) -> str:
        start, end = self._place(node)
        return self._data[start:end].decode()

    def _place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset
