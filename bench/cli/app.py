"""The parser: every verb in the order of the help, and examples of how it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from bench.cli.verbs import baseline, check, judge, measure, read

Verb = Callable[..., int]
Examples = tuple[str, ...]

_VERBS: tuple[tuple[Verb, Examples], ...] = (
    (
        measure.plan,
        ("plan quickstart", "plan my.yaml --only engine.name=mfsdp --set train.steps=50"),
    ),
    (
        measure.fit,
        (
            "fit --model llama3-8b --device H100 --gpus 64",
            "fit --model llama3-70b --device H100 --gpus 256 --search",
            "fit my.yaml --only engine.name=mfsdp",
        ),
    ),
    (
        measure.run,
        (
            "run quickstart --report",
            "run my.yaml --repeat 3",
            "run my.yaml --arm base=main --arm head=. --interleave --repeat 8",
            "run my.yaml --launcher slurm --slurm partition=gpu --max-jobs 8",
        ),
    ),
    (read.status, ("status", "status quickstart")),
    (measure.cancel, ("cancel my-sweep", "cancel my-sweep --results /shared/results")),
    (read.show, ("show 8f3a", "show mfsdp-optim-bf16 --json")),
    (read.logs, ("logs 8f3a --rank 1",)),
    (read.report, ("report quickstart", "report quickstart speed --out /tmp/report")),
    (
        read.history,
        ("history step_time", "history memory --append history.jsonl --out page"),
    ),
    (
        read.import_,
        (
            "import base.log --set device=H100 --set seq_len=8192",
            "import head.log && mfsdp-bench compare base head --format md",
            "import - --name pr3067 < page.txt",
        ),
    ),
    (
        read.lint,
        (
            "lint page.txt --format md",
            "lint base.log head.log --ignore 'single_run=a first look'",
        ),
    ),
    (read.export, ("export --to csv", "export speed --to parquet --out /tmp/speed")),
    (
        judge.compare,
        ("compare quickstart:ddp-fp32 quickstart:mfsdp-optim-fp32", "compare speed --format md"),
    ),
    (
        judge.gate,
        (
            "gate my.yaml --arm base=main --arm head=. --junit gate.xml",
            "gate nightly --baseline main --strict",
        ),
    ),
    (judge.noise, ("noise quickstart", "noise")),
    (judge.bisect, ("bisect my.yaml --good v1.2 --metric copied_bytes --only engine.name=mfsdp",)),
    (check.validate, ("validate", "validate fsdp2 ddp --full", "validate --inject all")),
    (check.nccl, ("nccl job.log", "nccl logs/ --require AG=sym,RS=sym --junit nccl.xml")),
    (check.doctor, ("doctor",)),
    (check.schema, ("schema sweep > sweep.schema.json",)),
)
_BASELINE_VERBS: tuple[tuple[str, Verb, Examples], ...] = (
    ("save", baseline.save, ("baseline save main nightly",)),
    ("list", baseline.show_list, ("baseline list",)),
    ("promote", baseline.promote, ("baseline promote candidate main --reason 'a faster reducer'",)),
)


def _print_version(asked: bool) -> None:
    if asked:
        from bench.cli.console import data
        from bench.cli.version import version_text

        data(version_text())
        raise typer.Exit


def _root(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            is_eager=True,
            callback=_print_version,
            help="Print the versions of mfsdp-bench, Python and torch.",
        ),
    ] = False,
) -> None:
    """Benchmark and validate fully sharded data parallel training."""


def _examples(lines: Examples) -> str:
    r"""The end of a verb's help; `\b` keeps the line breaks."""
    return "\n".join(["\b", "Examples:", *(f"  mfsdp-bench {line}" for line in lines)])


app = typer.Typer(
    name="mfsdp-bench",
    callback=_root,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="mfsdp-bench VERB --help shows the options of a verb and examples.",
)
_baseline_app = typer.Typer(
    help="Keep the numbers of a sweep under a name, for gates.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
for _verb, _lines in _VERBS:
    app.command(_verb.__name__.rstrip("_"), epilog=_examples(_lines))(_verb)
for _name, _verb, _lines in _BASELINE_VERBS:
    _baseline_app.command(_name, epilog=_examples(_lines))(_verb)
app.add_typer(_baseline_app, name="baseline")
