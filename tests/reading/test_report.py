"""The written report: complete, self-contained, rebuilt from records alone, and honest."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import Recorded, quickstart_cells, record_run, resolved_run, write_plan

from bench.errors import UsageError
from bench.store import ResultsStore
from reports import build
from reports.build import write_report
from reports.renderers.document import Paragraph
from reports.sections.appendix import shared_and_own

HOSTILE = '<script>alert("x")</script>|`$\\alpha$`\x1b[31m'


class Page(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.words = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.words))


@pytest.fixture(scope="module")
def written(quickstart_root, tmp_path_factory):
    store = ResultsStore.open(quickstart_root, create=False)
    return write_report(store, ["quickstart"], tmp_path_factory.mktemp("report"))


PAIR = [("a", resolved_run("ddp", "no_shard")), ("b", resolved_run("mfsdp", "optim"))]


def fill(store, cells=PAIR, **changes):
    """Record these cells and their plan. changes: of the second."""
    write_plan(store, cells)
    for at, (name, resolved) in enumerate(cells):
        record_run(store, Recorded(resolved, cell=name, **(changes if at else {})))


@pytest.fixture(scope="module")
def page(written):
    return Page(written.html.read_text())


def report_on(store, tmp_path, sweep="quickstart", **options):
    paths = write_report(store, [sweep], tmp_path / "out", **options)
    return paths, Page(paths.html.read_text()).text, paths.markdown.read_text()


def test_the_page_needs_nothing_from_anywhere_else(written, page):
    assert "script" not in page.tags
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    for name, value in page.attributes:
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#"), (name, value)
    assert not re.search(r"url\((?!#)", written.html.read_text())
    assert not any(name.startswith("on") for name, _ in page.attributes)


def test_the_four_figures_are_small_inlined_and_kept_as_files(written, page):
    assert page.tags.count("svg") == 4
    assert {path.name for path in written.figures} == {
        "loss.svg",
        "step-times.svg",
        "memory.svg",
        "throughput-memory.svg",
    }
    assert "different versions of the code" not in page.text
    # The demo's page has a memory timeline of each cell too (200 kB), and must stay under 700 kB.
    assert written.html.stat().st_size < 450_000
    seen = set()
    for path in written.figures:
        text = path.read_text()
        ET.fromstring(text)
        assert f"figures/{path.name}" in written.markdown.read_text()
        # Ids do not clash; glyph outlines are the same everywhere and may be shared.
        found = set(re.findall(r'<clipPath id="([^"]+)"', text))
        assert not found & seen
        seen |= found


def test_a_report_is_written_where_torch_and_scipy_cannot_be_imported(quickstart_root, tmp_path):
    program = (
        "import sys\n"
        "for name in ('torch', 'numpy.torch', 'scipy'): sys.modules[name] = None\n"
        "from bench.store import ResultsStore\n"
        "from reports.build import write_report\n"
        "from reports.compare.judge import judge\n"
        f"store = ResultsStore.open({str(quickstart_root)!r}, create=False)\n"
        f"print(write_report(store, ['quickstart'], {str(tmp_path)!r}).html)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize(
    ("name", "changes", "options", "said"),
    [
        ("b", {}, {"reference": "b"}, "Reference: b (named by the reader)"),
        (
            "b",
            {"environment": {"cpu_name": "Other CPU"}},
            {},
            "Not compared, because measured on other hardware: b",
        ),
        (
            "b",
            {"code": "code-b"},
            {},
            "The cells of mfsdp were measured with different versions of",
        ),
        ("模型-🚀-" + "x" * 300, {}, {}, "模型-🚀-" + "x" * 300),  # the font cannot draw it
    ],
)
def test_a_report_is_made_of_records_alone_and_says_what_it_compares(
    store, tmp_path, name, changes, options, said
):
    fill(store, [("a", resolved_run("mfsdp", "no_shard")), (name, PAIR[1][1])], **changes)
    first = report_on(store, tmp_path, **options)
    assert said in first[1]
    for folder in (store.root / "runs").glob("*/*"):
        (folder / "summary.json").write_text('{"formula": "nonsense", "final_loss": 999.0}')
    if name != "b":
        assert report_on(store, tmp_path, **options) == first


def test_failed_pruned_and_missing_cells_are_listed_with_their_reasons(store, tmp_path):
    cells = [("good", resolved_run("ddp", "no_shard")), ("bad", resolved_run("mfsdp", "optim"))]
    pruned = [{"id": "big", "labels": {}, "rule": "too_few_devices", "reason": "needs 8 devices"}]
    write_plan(store, [*cells, ("later", resolved_run(ranks=4))], pruned=pruned)
    record_run(store, Recorded(cells[0][1], cell="good"))
    record_run(
        store,
        Recorded(
            cells[1][1], cell="bad", state="out_of_memory", reason="rank 1: no memory", steps=4
        ),
    )
    paths, text, plain = report_on(store, tmp_path)
    assert (paths.measured_cells, paths.planned_cells) == (1, 3)
    for words in ("out_of_memory", "rank 1: no memory", "needs 8 devices", "has no run yet"):
        assert words in text
        assert words in plain
    assert "4 of 20" in text
    pruned = [{"id": "a", "labels": {}, "rule": "needs_cuda", "reason": "no GPU here"}]
    write_plan(store, [], sweep="none", pruned=pruned)
    paths, text, _ = report_on(store, tmp_path, "none")
    assert (paths.measured_cells, paths.figures) == (0, ())
    assert "no GPU here" in text
    assert "nothing was measured" in text


@pytest.mark.parametrize("content", [None, b"\x00\xff\xfe", b"[]", b"{}", b"null", b"[" * 5000])
def test_damaged_records_are_named_and_not_used_and_break_no_report(store, tmp_path, content):
    """content: of a file of each run, None for half of what was in it."""
    damage = ["steps.node0.jsonl", "status.json", "env.json", "memory.json", "spec.json"]
    fill(store, [(name, resolved_run(ranks=n)) for n, name in enumerate(["good", *damage], 1)])
    folders = {one.status.cell: store.root / "runs" / one.run_id for one in store.records()}
    for name in damage:
        path = folders[name] / name
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] if content is None else content)
    paths, text, _ = report_on(store, tmp_path)
    if content is None:
        assert paths.measured_cells == 1
        assert [name for name in damage if name not in text] == []
        assert "none of its numbers is used" in text


def test_hostile_names_and_reasons_are_shown_and_never_obeyed(store, tmp_path):
    cells = [
        (f"{HOSTILE}{index}", resolved)
        for index, (_, resolved) in enumerate(quickstart_cells()[:4])
    ]
    write_plan(store, cells, pruned=[{"id": HOSTILE, "rule": HOSTILE, "reason": HOSTILE}])
    for index, (name, resolved) in enumerate(cells):
        state = {"state": "crashed", "reason": HOSTILE} if index == 0 else {}
        environment = {"cpu_name": HOSTILE, "git": {"commit": HOSTILE}, HOSTILE: HOSTILE}
        record_run(store, Recorded(resolved, cell=name, environment=environment, **state))
    paths, text, plain = report_on(store, tmp_path)
    page = Page(paths.html.read_text())
    assert "script" not in page.tags
    assert '<script>alert("x")</script>|`$\\alpha$`' in text
    assert "\x1b" not in paths.html.read_text()
    assert "<script" not in re.sub(r"```.*?```", "", plain, flags=re.DOTALL)
    assert "\x1b" not in plain


def test_an_out_folder_that_is_a_file_is_a_usage_error(quickstart_root, tmp_path):
    (tmp_path / "file").write_text("")
    store = ResultsStore.open(quickstart_root, create=False)
    with pytest.raises(UsageError, match="file"):
        write_report(store, ["quickstart"], tmp_path / "file")


def test_a_section_is_a_function_in_one_list(store, tmp_path, monkeypatch):
    def toy(findings):
        yield Paragraph(f"{len(findings.cells)} cells of a toy")

    monkeypatch.setattr(build, "SECTIONS", [*build.SECTIONS, ("toy", "Toy", toy)])
    record_run(store, Recorded(resolved_run(), cell="a"))
    write_plan(store, [("a", resolved_run())])
    paths = write_report(store, ["quickstart"], tmp_path)
    assert "1 cells of a toy" in paths.markdown.read_text()
    assert "1 cells of a toy" in paths.html.read_text()


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers())
DOCUMENTS = st.dictionaries(
    st.text("abc", min_size=1, max_size=2),
    st.recursive(
        LEAVES, lambda inner: st.dictionaries(st.text("abc", max_size=2), inner), max_leaves=8
    ),
)


def merged(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    both = dict(shared)
    for key, value in own.items():
        nested = isinstance(value, dict) and isinstance(shared.get(key), dict)
        both[key] = merged(shared[key], value) if nested else value
    return both


@settings(max_examples=40)
@given(st.lists(DOCUMENTS, min_size=1, max_size=4))
def test_shared_and_own_together_give_every_document_back(documents):
    shared, own = shared_and_own(documents)
    assert [merged(shared, mine) for mine in own] == documents


def test_only_what_differs_is_shown_of_each():
    torch = {"machine": {"cpu": "x", "load": 1}, "python": "3.11"}
    other = {"machine": {"cpu": "x", "load": 2}, "python": "3.11", "cuda": "13"}
    shared, own = shared_and_own([torch, other])
    assert shared == {"machine": {"cpu": "x"}, "python": "3.11"}
    assert own == [{"machine": {"load": 1}}, {"machine": {"load": 2}, "cuda": "13"}]
