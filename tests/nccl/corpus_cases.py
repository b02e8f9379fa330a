"""The synthetic corpus: logs by version, subsystems, decorations and damage, and what they prove.

Each case's expectations were written from the specification of the lines before the parser was run
on it: `OPERATION BYTES PHASE VERDICT [condition=NAME] [missing=A,B]`, one per expected row, `-` for
no phase. `python tests/nccl/corpus_cases.py` writes the files again.
"""

from __future__ import annotations

from pathlib import Path

import corpus_forms
import corpus_verdicts
from corpus_lines import CASES, CORPUS, Case

SOURCES = (corpus_verdicts, corpus_forms)


def write(folder: Path = CORPUS) -> None:
    folder.mkdir(exist_ok=True)
    for one in CASES:
        (folder / file_name(one)).write_bytes(one.data)
    table = ["# file\texpected rows, from the specification\tdamage is counted"]
    table += [
        f"{file_name(c)}\t{'; '.join(c.expected) or '(no row)'}\t{'yes' if c.damaged else 'no'}"
        for c in CASES
    ]
    (folder / "EXPECTED.tsv").write_text("\n".join(table) + "\n")


def file_name(one: Case) -> str:
    return one.name if one.name.endswith(".gz") else f"{one.name}.txt"


if __name__ == "__main__":
    write()
