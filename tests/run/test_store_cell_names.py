"""A run can be named by its sweep and cell."""

from __future__ import annotations

import pytest

from bench.errors import UsageError
from bench.resolve import Machine, resolve
from bench.spec import RunSpec
from bench.store import ResultsStore


def test_sweep_and_cell_name_the_newest_run_of_the_cell(tmp_path):
    store = ResultsStore.open(tmp_path, create=True)
    resolved = resolve(RunSpec(), Machine.detect())
    for cell in ("first", "second", "first"):
        with store.new_run(resolved, sweep="s", cell=cell, repeat=0, arm=None, code="c") as folder:
            newest = folder.run_id
    assert store.find("s:first")[0] == newest
    assert store.find("s:second")[0] != newest
    with pytest.raises(UsageError, match="no run of cell 'third' of sweep 's'"):
        store.find("s:third")
