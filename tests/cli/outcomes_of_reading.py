"""Outcomes of the verbs that show what a results folder holds, of `import` and `nccl`."""

from __future__ import annotations

import json
import shutil

import zstandard
from outcome_scenarios import (
    ONE,
    OTHER_MACHINE,
    TWO_CELLS,
    Scenarios,
    World,
    ask,
    does,
    file,
    holds,
    recorded,
    swept,
    wrong,
)
from recorded_runs import Arm, record_arms

from bench.workload import ImportedRun, ImportedStep, Provenance, Workload

ALL_CRASHED = swept(ddp="crashed", mfsdp="crashed")
GOOD = swept()


def has(path: str, words: str = "", count: int | None = None) -> object:
    """A file with these words, or with so many lines."""

    def check(world: World) -> bool:
        text = (world.folder / path).read_text()
        return words in text and count in {None, text.count("\n")}

    return holds(check)


def printed_file(world: World) -> str:
    return (world.folder / world.out.split()[-1]).read_text()


def damage_spec(world: World) -> None:
    (world.run_folder("ddp") / "spec.json").write_text("{")


def cut_steps(world: World) -> None:
    path = world.run_folder("mfsdp") / "steps.node0.jsonl"
    path.write_bytes(path.read_bytes()[:-30])


def lose_spec(world: World) -> None:
    (world.run_folder("mfsdp") / "spec.json").unlink()


EXPORT: Scenarios = {
    "runs of any state": [
        swept(ddp="crashed"),
        ask("export two --out tables"),
        has("tables/steps.csv", "\n"),
        ask("export two --format bencher --out tables"),
        has("tables/bencher.json", "mfsdp"),
        does(damage_spec),
        ask("export", "spec.json"),
    ],
    "a format of others": [
        GOOD,
        *(ask(f"export --format {form}", code=0) for form in ("golden", "torchtitan", "pytorch")),
        ask("export --format github-action-benchmark", "smaller.json"),
    ],
    "no run that has what the format needs": [ALL_CRASHED, ask("export --format asv", "commit")],
    "no run": [does(lambda world: world.store), ask("export")],
    "an unknown sweep or format, or a folder that cannot be written": [
        GOOD,
        *wrong("export tow", "export --format xlsx", "export tow --format bencher"),
        ask("export --to csv", "use export --format", code=2),
        ask("export --out /proc/nowhere"),
    ],
}

STATUS: Scenarios = {
    "any state of the runs": [
        swept(ddp="crashed"),
        ask("status", "crashed 1, ok 1"),
        ask("status two"),
    ],
    "a damaged record": [GOOD, does(damage_spec), ask("status two", "missing", "cannot be read")],
    "an unknown sweep or run": [
        GOOD,
        ask("status tow", "no sweep 'tow'", "known sweeps: two", code=2),
        ask("report two.yaml", "no sweep 'two.yaml' (give its id, not its file)", code=2),
        ask("status two:fsdp9", "no run of cell 'fsdp9'", code=2),
        ask("status ../..", "cannot be a folder name"),
    ],
    "a folder that is not a results folder": [
        ask("status --results /dev", "not a results folder", code=2),
        ask("status --results absent", "not a results folder"),
    ],
    "a finished run": [GOOD, ask("status mfsdp", " ok")],
    "a failed run": [swept(mfsdp="hang"), ask("status mfsdp", "hang: as the test wants")],
    "a truncated record": [GOOD, does(cut_steps), ask("status mfsdp", "problem")],
    "an ambiguous part of an id": [GOOD, ask("status debug")],
    "a run without a readable spec": [GOOD, does(lose_spec), ask("status mfsdp")],
    "the logs of a run": [
        GOOD,
        ask("status mfsdp --logs", "==> rank0.log <==\nI am rank 0\n==> rank1.log <=="),
    ],
    "the logs of no run, or of an unknown one": [
        GOOD,
        *wrong("status --logs", "status two --logs"),
        ask("status fsdp9 --logs", "no run"),
    ],
}

# -- import ------------------------------------------------------------------------------------

LOG = file("step,loss\n1,2.5\n", "a.csv")
PAGE = """\
# base (fp32)
iteration 100/ 500 | elapsed time per iteration (ms): 5.0 | lm loss: 2.0 |
# head (bf16)
iteration 100/ 500 | elapsed time per iteration (ms): -4.0 | lm loss: 2.0 |
"""
EVIDENCE = file(
    PAGE.replace(" (fp32)", "").replace(" (bf16)", "").replace("-4.0", "4.0"), "page.txt"
)
TEXT = file("hello\n", "hello.txt")


def folder_of_logs(world: World) -> None:
    logs = world.folder / "logs"
    logs.mkdir()
    (logs / "a.txt").write_text("hello\n")
    (logs / "b c (1).log.zst").write_bytes(zstandard.compress(PAGE.encode()))


def two_labelled_runs(world: World) -> bool:
    base, head = json.loads(world.out)["imports"]
    remark = "1 values that cannot be were dropped: milliseconds -4 (line 4)"
    named = (base["name"], head["label"]) == ("page.base", "head (bf16)")
    return named and head["remarks"] == [remark]


IMPORT: Scenarios = {
    "a log with steps": [LOG, ask("import a.csv --set ranks=8", "a does not say: step times")],
    "the same log again": [LOG, ask("import a.csv"), ask("import a.csv")],
    "a list of imports": [GOOD, ask("import")],
    "a log without any training step": [TEXT, ask("import hello.txt", "hello.txt holds no run")],
    "several labelled runs in one text": [
        file(PAGE, "page.txt"),
        ask("import page.txt --json"),
        holds(two_labelled_runs),
    ],
    "a folder or compressed files, some without a run": [
        does(folder_of_logs),
        ask("import logs", "a.txt holds no run", "b-c-1.base"),
    ],
    "a missing file, a taken name, or an invalid fact": [
        *wrong("import a.csv"),
        LOG,
        *wrong("import a.csv --set rank=8", "import a.csv --name ../b"),
        ask("import a.csv"),
        file("step,loss\n1,2.75\n", "a.csv"),
        ask("import a.csv", "a is already the name of an import"),
    ],
}

# -- compare, report ---------------------------------------------------------------------------


def import_theirs(world: World, name: str = "theirs", ranks: int | None = 64) -> None:
    theirs = Workload(framework="megatron-lm", ranks=ranks)
    log = Provenance(kind="imported", source="train.log", importer="megatron 1", absent=("loss",))
    steps = (ImportedStep(1, milliseconds=812.5),)
    world.theirs = world.store.imports.write(ImportedRun(name, theirs, log, steps)).id


def lose_runs_of_planned(world: World) -> None:
    for record in list(world.store.records(sweep="planned")):
        shutil.rmtree(world.store.root / "runs" / record.run_id)


#: A crashed repeat among good ones takes nothing away: neither side lacks a number.
LOST = {0: "crashed"}
NO_RUN = "has no finished run: "

COMPARE: Scenarios = {
    "two sides with runs in common": [
        GOOD,
        swept(TWO_CELLS.replace("two", "other")),
        ask("compare two other"),
    ],
    "nothing that can be compared": [
        GOOD,
        swept("name: three\nmatrix: {product: {train.seq_len: [32, 128]}}\n"),
        ask("compare two three --ignore engine.name", code=5),
        recorded("there", Arm(hardware=OTHER_MACHINE)),
        recorded("here", Arm(states=LOST)),
        ask("compare there here", "hardware differs", code=5),
        ask("compare two here --ignore env", "no cell of equal configuration", code=5),
        does(
            lambda world: record_arms(
                world.store,
                {"base": Arm(), "head": Arm(hardware=OTHER_MACHINE, states=LOST)},
                sweep="arms",
                cells=ONE,
            )
        ),
        ask("compare arms", "hardware differs"),
    ],
    "a side without a finished run": [
        GOOD,
        swept(TWO_CELLS.replace("two", "bad"), ddp="crashed", mfsdp="crashed"),
        swept(TWO_CELLS.replace("two", "planned")),
        does(lose_runs_of_planned),
        ask("compare two bad", f"bad {NO_RUN}ddp: crashed: as the test wants", code=3),
        ask("compare bad two", f"bad {NO_RUN}ddp: crashed: as the test wants", code=3),
        ask("compare two planned", f"planned {NO_RUN}planned: it was planned", code=3),
        ask("compare planned bad", f"planned {NO_RUN}planned: it was planned"),
    ],
    "an unknown sweep": [GOOD, ask("compare two tow", "tow")],
    "two logs, or the runs of one text": [
        EVIDENCE,
        LOG,
        ask("compare page.txt", "step time, median", "page.base, page.head do not say"),
        ask("compare page.txt a.csv --json", '"side_by_side"'),
    ],
    "one log of one run, or a log without a run": [
        LOG,
        TEXT,
        ask("compare a.csv hello.txt", "hello.txt holds no run", code=3),
        *wrong("compare a.csv", "compare a.csv a.csv --ignore engine.name"),
    ],
    "an imported and a measured run": [
        GOOD,
        does(lambda world: import_theirs(world, "alike", ranks=None)),
        ask("compare two alike", "megatron 1: train.log", "alike does not say: loss"),
    ],
    "an imported and a measured run that are unlike": [
        GOOD,
        does(import_theirs),
        ask("compare two theirs", "not comparable: number of devices 2, 64"),
    ],
    "two imported runs": [
        file("step,loss\n7,2.5\n", "base.csv"),
        file("step,loss\n7,2.25\n", "head.csv"),
        ask("import base.csv"),
        ask("import head.csv"),
        ask(
            "compare base head --format md",
            "-2.5e-01 (step 7)",
            "base, head do not say: step times",
        ),
    ],
    "--ignore without HEAD, or --ignore or --policy with an imported run": [
        GOOD,
        LOG,
        file("metrics: {step_time: {gate: advisory}}\n", "gates.yaml"),
        ask("import a.csv"),
        ask("compare two --ignore dtypes", "name HEAD, or leave --ignore out", code=2),
        ask("compare two a --ignore dtypes", "next to the imported run a there are none", code=2),
        ask("compare a two --policy gates.yaml"),
    ],
}

REPORT: Scenarios = {
    "at least one measured cell": [
        swept(ddp="crashed"),
        ask("report two"),
        holds(lambda world: printed_file(world).startswith("<!")),
    ],
    "only imported runs": [file(PAGE, "page.txt"), ask("import page.txt"), ask("report")],
    "a pull-request block": [
        GOOD,
        EVIDENCE,
        ask("import page.txt"),
        ask("report --format pr", "**Reproduce**"),
        ask("report two --format pr --out ."),
        has("pr.md"),
    ],
    "an empty block": [ALL_CRASHED, ask("report --format pr")],
    "an unknown format": [GOOD, ask("report --format pdf")],
    "nothing was measured": [ALL_CRASHED, ask("report two"), holds(printed_file)],
    "no sweep in the results folder": [
        does(lambda world: world.store),
        ask("report", "holds no sweep yet"),
    ],
    "an unknown sweep": [GOOD, ask("report tow", "tow")],
}

# -- nccl --------------------------------------------------------------------------------------

HEAD = "n1:1:2 [0] NCCL INFO "
SYMMETRIC = (
    HEAD + "AllGather [Symmetric]: 64 Bytes -> Kernel AllGather_ST nchannels 9 nthreads 512\n"
)
REGULAR = HEAD + "AllGather: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}\n"


def nccl(text: str, options: str, says: str) -> list[object]:
    return [file(text, "nccl.log"), ask(f"nccl nccl.log {options}", says)]


def audit_run(world: World) -> int:
    return int(ask(f"nccl {world.run_folder('ddp')}", "there is no NCCL in this run")(world))


NCCL: Scenarios = {
    "rows and no requirement": nccl(SYMMETRIC + REGULAR, "", "MIXED"),
    "requirements met": nccl(SYMMETRIC, "--require AG=sym", "MET"),
    "a requirement not met": nccl(REGULAR, "--require AG=sym", "requirement not met: AG=sym"),
    "a requirement without evidence": nccl(SYMMETRIC, "--profile fsdp", "without evidence: RS"),
    "a log without NCCL evidence": nccl("nothing here\n", "", "nothing to judge"),
    "an unknown profile or requirement": nccl(SYMMETRIC, "--profile fspd", "unknown profile"),
    "a run on CPU": [GOOD, audit_run],
    "a path that does not exist": [ask("nccl missing.log")],
    "a device instead of a log": [ask("nccl /dev/zero")],
}
