"""`make cuda-build-check` reads our source: what torch has not is named with file and line."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tools import cuda_build_check, torch_build


def test_this_torch_has_every_name_and_keyword_that_our_source_uses():
    assert list(cuda_build_check.missing_names()) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch.cuda.strems", "uses torch.cuda.strems"),
        ("dist.all_gather_singel(1)", "uses torch.distributed.all_gather_singel"),
        ("new_group(ranks=[0], local=True)", "gives torch.distributed.new_group ['local']"),
        ("getattr(torch.cuda, 'strems', None) or torch.cuda.strems", ""),
        ("torch.cuda.stream(None)", ""),
        ("torch.float32.itemsize", ""),
        ("new_group(ranks=[0], backend='gloo')", ""),
    ],
)
def test_a_name_or_keyword_that_torch_has_not_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, said: str
) -> None:
    source = tmp_path / "ours.py"
    imports = "import torch, torch.distributed as dist\nfrom torch.distributed import new_group\n"
    source.write_text(imports + line)
    monkeypatch.setattr(cuda_build_check, "_ROOT", tmp_path)
    monkeypatch.setattr(cuda_build_check, "sources", lambda: [source])
    found = list(cuda_build_check.missing_names())
    assert bool(found) is bool(said)
    assert all(said in one and one.startswith("ours.py:3 ") for one in found)


def test_what_our_source_imports_when_it_is_loaded_is_in_the_environments_of_other_torches():
    served = {re.split(r"[<>=\[]", one)[0].replace("-", "_") for one in torch_build.packages()}
    ours = {"mfsdp_core", "bench", "tools", "sweeps", "reports", "torch", "ruamel", "pydantic_core"}
    absent = set()
    for file in cuda_build_check.sources():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            packages = {name.partition(".")[0] for name in names}
            absent |= {(file.name, one) for one in packages - served - ours}
    assert {one for one in absent if one[1] not in sys.stdlib_module_names} == set()
