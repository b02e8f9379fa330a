"""The parser, made of the classes that say what each verb takes (`bench.cli.verbs`).

The module that runs a verb is imported when it runs, so that `--help` stays fast.
"""

from __future__ import annotations

import dataclasses
import inspect
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from bench.cli import console
from bench.cli.console import Answer
from bench.cli.options import VERBS, Verb
from bench.cli.verbs import check, judge, measure, read


def _print_version(asked: bool) -> None:
    """As `mfsdp-bench 0.1.0 (commit 3c20bcc8a1b2), Python 3.11.7, torch 2.13.0`."""
    if not asked:
        return
    from bench.launch.code import checkout_root, installed_version
    from bench.launch.git import git_state

    own, torch = (installed_version(name) or "none" for name in ("mfsdp-bench", "torch"))
    state = git_state(checkout_root())
    changed = ", with uncommitted changes" if state["dirty"] else ""
    commit = f" (commit {state['commit'][:12]}{changed})" if state["commit"] else ""
    console.data(f"mfsdp-bench {own}{commit}, Python {platform.python_version()}, torch {torch}")
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


def _parameter(name: str, kind: Any, default: Any, read: Any) -> inspect.Parameter:
    """A parameter of a command. One that may be given more than once is a list for the parser."""
    if get_origin(kind) is tuple:
        kind = GenericAlias(list, get_args(kind)[:1])
        kind, default = (kind, default) if default is dataclasses.MISSING else (kind | None, None)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is dataclasses.MISSING else default,
        annotation=Annotated[kind, read],
    )


def _parameters(takes: type[Any]) -> Iterator[inspect.Parameter]:
    """Those of the class; a field that is such a class gives its own in its place."""
    hints = get_type_hints(takes)
    for field in dataclasses.fields(takes):
        if "typer" in field.metadata:
            yield _parameter(field.name, hints[field.name], field.default, field.metadata["typer"])
        else:
            yield from _parameters(hints[field.name])


def _request(takes: type[Any], given: Mapping[str, Any]) -> Any:
    """An object of the class, of what the parser has read."""
    hints = get_type_hints(takes)
    values = {}
    for field in dataclasses.fields(takes):
        if "typer" not in field.metadata:
            values[field.name] = _request(hints[field.name], given)
        elif get_origin(hints[field.name]) is tuple:
            values[field.name] = tuple(given[field.name] or ())
        else:
            values[field.name] = given[field.name]
    return takes(**values)


def _command(verb: Verb) -> Callable[..., Answer]:
    """What the parser calls."""

    def command(*, as_json: bool, **given: Any) -> Answer:
        module, _, function = verb.runs.partition(".")
        run = getattr(import_module(f"bench.cli.{module}"), function)
        answer: Answer = run(_request(verb.takes, given))
        return dataclasses.replace(answer, as_json=as_json)

    json_too = typer.Option("--json", help="Print JSON to stdout.")
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*_parameters(verb.takes), _parameter("as_json", bool, False, json_too)]
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
_ORDER = [room.__name__ for room in (measure, read, judge, check)]
for _verb in sorted(VERBS, key=lambda verb: _ORDER.index(verb.takes.__module__)):
    _group, _, _name = _verb.name.rpartition(" ")
    # `\b` keeps the line breaks.
    _examples = "\n".join(
        ["\b", "Examples:", *(f"  mfsdp-bench {line}" for line in _verb.examples)]
    )
    (_baseline_app if _group else app).command(_name, epilog=_examples)(_command(_verb))
app.add_typer(_baseline_app, name="baseline")
