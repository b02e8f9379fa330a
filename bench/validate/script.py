"""A program as a script for people: the sources of what runs it, and the program itself."""

from __future__ import annotations

import ast
from dataclasses import fields, is_dataclass
from pathlib import Path

from bench.validate.program import Program

_FOLDER = Path(__file__).parent
_OURS = ("__future__", "bench.testing.units", "bench.validate.program", "bench.validate.drivers.")
_HEAD = '''"""{title}

    torchrun --nproc-per-node {ranks} FILE

The program is at the end. What runs it comes before, and needs {needs}.
"""

from __future__ import annotations

'''
_END = """
PROGRAM = {program}

if __name__ == "__main__":
    # Memory that nobody has written is NaN, so that whoever reads it shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    dist.init_process_group("gloo")
    Trial(PROGRAM, DRIVER(PROGRAM), print).run()
    print(f"rank {{dist.get_rank()}}: as in plain torch")
    dist.destroy_process_group()
"""


def script(program: Program, title: str = "A training program compared with plain torch.") -> str:
    """Source of `program`: it raises where the engine differs from plain torch.

    It is run on `program.ranks` ranks.
    """
    driver = program.driver
    drivers = "drivers/driver.py", f"drivers/{driver}.py"
    files = ("../testing/units.py", "program.py", *drivers, "trial.py")
    imports: dict[str, None] = {}
    bodies = []
    for file in files:
        lines, body = _parts((_FOLDER / file).read_text(encoding="utf-8"))
        imports |= dict.fromkeys(lines)
        bodies.append(body)
    head = _HEAD.format(
        title=title.replace("\\", "/").replace('"""', "'''"),
        ranks=program.ranks,
        needs={"mfsdp": "torch and mfsdp_core", "outside": "mfsdp-bench"}.get(
            program.engine if driver == "fsdp2" else driver, "torch"
        ),
    )
    return "\n".join(
        [head + "\n".join(sorted(imports)), *bodies, _END.format(program=text(program))]
    )


def _parts(source: str) -> tuple[list[str], str]:
    """Import statements from elsewhere, and everything behind the imports."""
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    others = []
    for node in imports:
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        start = f"from {module} import" if module else "import"
        if not module.startswith(_OURS):
            others += [f"{start} {ast.unparse(alias)}" for alias in node.names]
    last = max(node.end_lineno or 0 for node in imports)
    return others, "\n".join(source.splitlines()[last:])


def text(value: object, indent: str = "") -> str:
    """As Python writes it, without what is the default; a line for each part."""
    inner = f"{indent}    "
    if is_dataclass(value) and not isinstance(value, type):
        parts = [
            f"{field.name}={text(own, inner)}"
            for field in fields(value)
            if (own := getattr(value, field.name)) != field.default
        ]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple) and any(map(is_dataclass, value)):
        return "(" + "".join(f"\n{inner}{text(item, inner)}," for item in value) + f"\n{indent})"
    return repr(value)
