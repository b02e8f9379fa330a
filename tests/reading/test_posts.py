"""Texts to paste: the block of a pull request, of imported and measured runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from recorded_runs import Arm, Recorded, record_arms, record_run, resolved_run, write_plan

from bench.importers.table import read_text
from bench.store import ResultsStore
from reports.findings import find
from reports.posts.pull_request import pull_request
from reports.sections.comparison import comparison
from reports.views.sweep_view import load_sweeps

LOGS = Path(__file__).parents[1] / "run" / "logs"
NUMBER = r"elapsed time per iteration \(ms\): ([\d.]+)"


def imported(store: ResultsStore, *names: str) -> ResultsStore:
    for name in names:
        text = (LOGS / f"{name}.txt").read_bytes()
        for one in read_text(f"{name}.txt", [text], None, {}):
            store.imports.write(replace(one, id=f"{name}.{one.id}"))
    return store


def measured(
    store: ResultsStore, cells: int = 2, repeats: int = 1, drifting: int = -1
) -> ResultsStore:
    planned = []
    for at in range(cells):
        names = ("ddp", "no_shard") if at == drifting else ()
        resolved = resolved_run(*names, comm="bf16" if at else "fp32", ranks=2)
        name = f"cell-{at}"
        for repeat in range(repeats):
            run = Recorded(resolved, cell=name, speed=1 + at / 10, repeat=repeat, seed=at)
            if at == drifting:
                run = replace(run, milliseconds=lambda step: 100 * 1.07**step)
            record_run(store, run)
        planned.append((name, resolved))
    write_plan(store, planned)
    return store


def rows(text: str) -> list[list[str]]:
    html = MarkdownIt("gfm-like", {"linkify": False}).render(text)
    found = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in found]


@pytest.mark.parametrize(("names", "left"), [(("pr4133",), 2), (("pr3067", "pr4133"), 17)])
def test_the_block_of_imported_runs_stays_below_sixty_lines_and_counts_the_rest(
    store, names, left
) -> None:
    text = pull_request(imported(store, *names), ())
    assert len(text.splitlines()) < 60
    for heading in ("Trade-offs", "Parity", "Evidence", "Reproduce"):
        assert f"**{heading}" in text
    more = re.search(r"# and (\d+) more runs", text)
    assert len(re.findall(NUMBER, text)) + (int(more[1]) if more else 0) == left
    if "pr3067" in names:
        assert "AllGather symmetric: 4 lines, ReduceScatter regular: 6 lines" in text


def test_the_block_of_measured_runs_stays_below_sixty_lines(store) -> None:
    text = pull_request(measured(store, cells=2, repeats=12), ())
    assert len(text.splitlines()) < 60
    assert "n=12 against 12" in text
    assert "# cell-0 (mfsdp optim_grads_params, fp32" in text


def test_a_cell_without_a_time_is_named_where_the_others_are_compared(store) -> None:
    text = pull_request(measured(store, cells=3, drifting=2), ())
    assert "in no row, for want of a time: cell-2" in text
    section = str([*comparison(find(store, load_sweeps(store, ["quickstart"])))])
    assert "In no row, for want of a time: cell-2 (see Cells)." in section


def test_the_block_of_arms_has_a_gradient_norm_that_moved_under_equal_losses(store) -> None:
    record_arms(store, {"base": Arm(), "head": Arm(norm_scale=4.0)})
    text = pull_request(store, ["gate"])
    assert "grad norm: +300.00 %" in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "ddp \\[head\\] diverges (gradient norm)" in text
    assert "gradient norm moved: differs" in text


def test_the_block_says_what_changed_and_what_was_traded(store) -> None:
    text = pull_request(imported(store, "pr4133"), ())
    head, _, *changes = rows(text)[1]
    assert head == "no-fusedadam-master-weights"
    assert [one.replace("\N{NO-BREAK SPACE}", " ") for one in changes[:5]] == [
        "+3.61 %", "none", "-3.48 %", "0.965x", "-12.41 %",
    ]  # fmt: skip
    assert "- no-fusedadam-master-weights: less memory, but slower\n" in text
    assert "sha256" in text


def test_the_lines_of_a_block_can_be_imported_again(store) -> None:
    text = pull_request(imported(store, "pr4133"), ())
    again = read_text("again", [text.encode()], "megatron", {})
    assert [run.provenance.label for run in again] == [
        run.provenance.label for run in sorted(store.imports.all(), key=lambda r: r.id)
    ]
    kept = {run.provenance.label: run.steps[-1] for run in store.imports.all()}
    for run in again:
        step, before = run.steps[-1], kept[run.provenance.label]
        assert (step.step, step.milliseconds, step.loss) == (
            before.step, before.milliseconds, before.loss,
        )  # fmt: skip
        assert step.device_peak_bytes == pytest.approx(before.device_peak_bytes, abs=2**14)


def test_names_of_labels_cannot_break_out_of_the_block(store) -> None:
    line = "iteration 1/ 5 | elapsed time per iteration (ms): 5.0 | lm loss: 2.0 |\n"
    bad = "# a ``` <script> | x\n" + line + "# b @someone #1\n" + line
    for one in read_text("x", [bad.encode()], None, {}):
        store.imports.write(replace(one, id=f"x.{one.id}"))
    html = MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(pull_request(store, ()))
    assert "<script>" not in html
    assert html.count("<pre>") == 2
