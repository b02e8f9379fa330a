"""`make cuda-build-check` reads our source: what torch has not is named with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tools import cuda_build_check


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
