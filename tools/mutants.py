"""Small wrong changes of mfsdp_core, made systematically: what its tests are measured with.

A mutant changes one place of one file. Places come from the syntax tree, in the order of the
source, so that a seed draws the same sample as long as the source is the same. Left out is what no
result depends on: docstrings, annotations, messages of errors, imports.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

from tools.bug_in_a_copy import CORE

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
_PAIRS = (
    *(("inner", "outer"), ("forward", "backward"), ("first", "last"), ("ADD", "COPY")),
    *(("inner_rank", "outer_rank"), ("inner_size", "outer_size"), ("SUM", "AVG")),
)
#: Names that stand for each other's opposite, axis or dtype.
_EXCHANGED = {
    **dict(_PAIRS),
    **{other: name for name, other in _PAIRS},
    "float32": "bfloat16",
    "float64": "float32",
    "main_grads": "compute",
    "grad_comm": "main_grads",
    "main_params": "compute",
    "acquire": "release",
    "REDUCE_SCATTER": "ALL_REDUCE",
    "is_last": "is_idle",
}
#: Calls that only tell or check; dropping one changes no result.
_TELLING = ("_publish", "publish", "warn", "warning", "write")
_LEFT_ALONE = ("__repr__", "__str__")
Change = tuple[str, ast.expr | ast.stmt, str]


@dataclass(frozen=True)
class Mutant:
    """One change. file: below mfsdp_core. kind: what was done. line: from 1.

    start, end: the bytes that `text` replaces.
    """

    file: str
    kind: str
    line: int
    start: int
    end: int
    text: str

    @property
    def id(self) -> str:
        """Unique among all."""
        return f"{self.file}:{self.line}:{self.kind}:{self.start}"

    def source(self, original: str) -> str:
        """The changed source."""
        data = original.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()


def sample(seed: int, count: int) -> list[Mutant]:
    """Mutants drawn by `seed`, of each room, alternately; a room is a folder of the core."""
    rooms: dict[str, list[str]] = {}
    for path in sorted(CORE.rglob("*.py")):
        file = str(path.relative_to(CORE))
        rooms.setdefault(file.partition("/")[0] if "/" in file else "top", []).append(file)
    drawn = []
    for room, files in sorted(rooms.items()):
        mutants = [m for file in files for m in mutants_of(file, (CORE / file).read_text())]
        Random(f"{seed}:{room}").shuffle(mutants)
        drawn.append([*islice(filter(_compiles, mutants), count)])
    longest = max(map(len, drawn))
    return [
        mutant for index in range(longest) for of_room in drawn for mutant in of_room[index:][:1]
    ][:count]


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(mutant.source((CORE / mutant.file).read_text()), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in order of their places; a few may not compile."""
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.expr | ast.stmt) -> tuple[int, int]:
        first, last = starts[node.lineno - 1], starts[(node.end_lineno or 1) - 1]
        return first + node.col_offset, last + (node.end_col_offset or 0)

    def text(node: ast.expr) -> str:
        return data[slice(*place(node))].decode()

    return [
        Mutant(file, kind, replaced.lineno, *place(replaced), instead)
        for node in _visited(ast.parse(source))
        for kind, replaced, instead in _changes(node, text)
    ]


def _visited(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that results depend on."""
    yield node
    parts: list[ast.AST | None] = [*ast.iter_child_nodes(node)]
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*node.args.defaults, *node.args.kw_defaults]
            parts = [] if node.name in _LEFT_ALONE else [*defaults, *node.body]
        case ast.ClassDef():
            parts = [*node.body]
        case ast.AnnAssign():
            parts = [node.value]
        case ast.Assign():
            parts = [node.value]
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Expr(ast.Constant()):
            parts = []
        case ast.Expr(ast.Call(func)) if _name(func) in _TELLING:
            parts = []
        case ast.If(ast.Name("TYPE_CHECKING")):
            parts = []
    for part in parts:
        if part is not None:
            yield from _visited(part)


def _name(called: ast.expr) -> str:
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _changes(  # noqa: C901, PLR0912 - a table
    node: ast.AST, text: Callable[[ast.expr], str]
) -> Iterator[Change]:
    """What is done to a node: the kind, the node that is replaced, and by what."""
    match node:
        case ast.Raise() | ast.AugAssign():
            yield "statement dropped", node, "pass"
        case ast.Expr(ast.Call(func)) if _name(func) not in _TELLING:
            yield "wait skipped" if "wait" in _name(func) else "statement dropped", node, "pass"
        case ast.Assign() if all(
            isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
        ):
            yield "statement dropped", node, "pass"
        case ast.If(test) | ast.IfExp(test) if _name(test) != "TYPE_CHECKING":
            yield "condition negated", test, f"(not ({text(test)}))"
        case ast.comprehension():
            for test in node.ifs:
                yield "condition negated", test, f"(not ({text(test)}))"
        case ast.Compare(left, [operator], [right]):
            yield (
                "comparison shifted",
                node,
                f"({text(left)} {_COMPARISONS[type(operator)]} {text(right)})",
            )
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
            if not isinstance(left, ast.Constant | ast.JoinedStr):
                changed = f"({text(left)} {_OPERATORS[type(operator)]} {text(right)})"
                yield "operator changed", node, changed
        case ast.BoolOp(operator, values):
            word = " or " if isinstance(operator, ast.And) else " and "
            yield "and for or", node, f"({word.join(f'({text(value)})' for value in values)})"
        case ast.Constant(bool() as value):
            yield "truth value turned", node, str(not value)
        case ast.Constant(int() | float() as value):
            yield "number shifted", node, str(value + 1)
        case ast.Constant(str() as value) if value in _EXCHANGED:
            yield "exchanged", node, repr(_EXCHANGED[value])
        case ast.Attribute(owner, name, ast.Load()) if name in _EXCHANGED:
            yield "exchanged", node, f"{text(owner)}.{_EXCHANGED[name]}"
