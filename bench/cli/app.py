"""The parser: every verb in the order of the help, what it takes, what runs it, and examples.

What a verb takes is a class whose fields are its options. The module that runs it is imported when
it runs, so that `--help` stays fast.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import typer

from bench.cli.verbs import check, judge, measure, read

if TYPE_CHECKING:
    from bench.cli.answer import Answer


class Verb(NamedTuple):
    """takes: the class of what it is asked. runs: `module.function` of `bench.cli`."""

    name: str
    takes: type[Any]
    runs: str
    examples: tuple[str, ...]

    def answer(self, asked: object) -> Answer:
        """Run it."""
        module, _, function = self.runs.partition(".")
        found: Answer = getattr(import_module(f"bench.cli.{module}"), function)(asked)
        return found


VERBS = (
    Verb(
        "plan",
        measure.PlanRequest,
        "planning.show_plan",
        ("plan quickstart", "plan my.yaml --only engine.name=mfsdp --set train.steps=50"),
    ),
    Verb(
        "fit",
        measure.FitRequest,
        "fitting.show_fit",
        (
            "fit --model llama3-8b --device H100 --gpus 64",
            "fit --model llama3-70b --device H100 --gpus 256 --search",
            "fit my.yaml --only engine.name=mfsdp",
        ),
    ),
    Verb(
        "run",
        measure.RunRequest,
        "running.run_sweep",
        (
            "run quickstart --report",
            "run my.yaml --repeat 3",
            "run my.yaml --arm base=main --arm head=. --interleave --repeat 8",
            "run my.yaml --launcher slurm --launcher-option partition=gpu",
        ),
    ),
    Verb("status", read.StatusRequest, "statuses.show_status", ("status", "status quickstart")),
    Verb(
        "cancel",
        measure.CancelRequest,
        "cancelling.cancel_jobs",
        ("cancel my-sweep", "cancel my-sweep --results /shared/results"),
    ),
    Verb(
        "show",
        read.ShowRequest,
        "single_run.show_run",
        ("show 8f3a", "show quickstart:ddp-fp32 --json"),
    ),
    Verb("logs", read.LogsRequest, "single_run.show_logs", ("logs 8f3a --rank 1",)),
    Verb(
        "report",
        read.ReportRequest,
        "reporting.report",
        ("report quickstart", "report quickstart speed --out /tmp/report"),
    ),
    Verb(
        "history",
        read.HistoryRequest,
        "histories.show_history",
        ("history step_time", "history memory --append history.jsonl --out page"),
    ),
    Verb(
        "import",
        read.ImportRequest,
        "importing.import_logs",
        (
            "import base.log --set device=H100 --set seq_len=8192",
            "import head.log && mfsdp-bench compare base head --format md",
            "import - --name pr3067 < page.txt",
        ),
    ),
    Verb(
        "lint",
        read.LintRequest,
        "linting.show_lint",
        (
            "lint page.txt --format md",
            "lint base.log head.log --ignore 'single_run=a first look'",
        ),
    ),
    Verb(
        "export",
        read.ExportRequest,
        "exporting.export",
        ("export --to csv", "export speed --to parquet --out /tmp/speed"),
    ),
    Verb(
        "compare",
        judge.CompareRequest,
        "comparing.show_comparison",
        ("compare quickstart:ddp-fp32 quickstart:mfsdp-optim-fp32", "compare speed --format md"),
    ),
    Verb(
        "gate",
        judge.GateRequest,
        "gating.run_gate",
        (
            "gate my.yaml --arm base=main --arm head=. --junit gate.xml",
            "gate nightly --baseline main --strict",
        ),
    ),
    Verb("noise", judge.NoiseRequest, "calibrating.run_noise", ("noise quickstart", "noise")),
    Verb(
        "bisect",
        judge.BisectRequest,
        "bisecting.run_bisect",
        ("bisect my.yaml --good v1.2 --metric copied_bytes --only engine.name=mfsdp",),
    ),
    Verb(
        "validate",
        check.ValidationRequest,
        "validating.run_validation",
        ("validate", "validate fsdp2 ddp --full", "validate --inject all"),
    ),
    Verb(
        "nccl",
        check.AuditRequest,
        "nccl_audit.show_audit",
        ("nccl job.log", "nccl logs/ --require AG=sym,RS=sym --junit nccl.xml"),
    ),
    Verb("doctor", check.DoctorRequest, "diagnosis.show_diagnosis", ("doctor",)),
    Verb(
        "schema", check.SchemaRequest, "schemas.show_schema", ("schema sweep > sweep.schema.json",)
    ),
)
BASELINE_VERBS = (
    Verb("save", judge.SaveRequest, "baselines.save", ("baseline save main nightly",)),
    Verb("list", judge.ListRequest, "baselines.show_list", ("baseline list",)),
    Verb(
        "promote",
        judge.PromoteRequest,
        "baselines.promote_to",
        ("baseline promote candidate main --reason 'a faster reducer'",),
    ),
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


def _examples(lines: tuple[str, ...]) -> str:
    r"""The end of a verb's help; `\b` keeps the line breaks."""
    return "\n".join(["\b", "Examples:", *(f"  mfsdp-bench {line}" for line in lines)])


def _parameters(takes: type[Any]) -> Iterator[inspect.Parameter]:
    """The options of a class; those of a field that is such a class stand in its place.

    A tuple is an option that may be given more than once, which the parser reads as a list.
    """
    hints = get_type_hints(takes, include_extras=True)
    for field in dataclasses.fields(takes):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _parameters(hint)  # type: ignore[arg-type]
            continue
        kind, option = get_args(hint)
        required = field.default is dataclasses.MISSING
        default = inspect.Parameter.empty if required else field.default
        if get_origin(kind) is tuple:
            kind = GenericAlias(list, get_args(kind)[:1])
            hint = Annotated[kind if required else kind | None, option]
            default = default if required else None
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
        )


def _asked(takes: type[Any], given: Mapping[str, Any]) -> Any:
    """An object of the class out of what the parser has read."""
    hints = get_type_hints(takes, include_extras=True)
    values = {}
    for field in dataclasses.fields(takes):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            values[field.name] = _asked(hint, given)  # type: ignore[arg-type]
        elif get_origin(get_args(hint)[0]) is tuple:
            values[field.name] = tuple(given[field.name] or ())
        else:
            values[field.name] = given[field.name]
    return takes(**values)


def _command(verb: Verb) -> Callable[..., Answer]:
    """What the parser calls."""

    def command(*, as_json: bool, **given: Any) -> Answer:
        return dataclasses.replace(verb.answer(_asked(verb.takes, given)), as_json=as_json)

    as_json = inspect.Parameter(
        "as_json",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")],
    )
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*_parameters(verb.takes), as_json]
    )
    command.__annotations__ = {}
    command.__doc__ = verb.takes.__doc__
    return command


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
for _app, _verbs in ((app, VERBS), (_baseline_app, BASELINE_VERBS)):
    for _verb in _verbs:
        _app.command(_verb.name, epilog=_examples(_verb.examples))(_command(_verb))
app.add_typer(_baseline_app, name="baseline")
