"""The parser, made of the classes of the verbs (`bench.cli.verb`)."""

from __future__ import annotations

import dataclasses
import inspect
import platform
from collections.abc import Callable, Iterator
from importlib import import_module
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from bench.cli import console
from bench.cli.verb import Verb


def _print_version(wanted: bool) -> None:
    """As `mfsdp-bench 0.1.0 (commit 3c20bcc8a1b2), Python 3.11.7, torch 2.13.0`."""
    if not wanted:
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


_EXAMPLES = "\n\nExamples:\n"
_PLACES = {"results": 1, "as_json": 2}
"""Options that stand at the end of the help of every verb that has them."""


def _parameters(takes: type[Any]) -> Iterator[inspect.Parameter]:
    """Those of a command. What may be given more than once is a list for the parser."""
    hints = get_type_hints(takes)
    for field in sorted(dataclasses.fields(takes), key=lambda field: _PLACES.get(field.name, 0)):
        kind, empty = hints[field.name], inspect.Parameter.empty
        if get_origin(kind) is tuple:
            kind = GenericAlias(list, get_args(kind)[:1])
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if field.default is dataclasses.MISSING else field.default,
            annotation=Annotated[kind, field.metadata["typer"]],
        )


def _command(takes: type[Verb]) -> Callable[..., Verb]:
    """What the parser calls: it makes the verb, which is not run yet."""

    def command(**given: Any) -> Verb:
        values: dict[str, Any] = {
            n: tuple(value) if isinstance(value, list) else value for n, value in given.items()
        }
        return takes(**values)

    command.__signature__ = inspect.Signature([*_parameters(takes)])  # type: ignore[attr-defined]
    command.__annotations__ = {}
    command.__doc__ = inspect.cleandoc(takes.__doc__ or "").partition(_EXAMPLES)[0]
    return command


def _epilog(takes: type[Verb]) -> str:
    """The examples of its text; the mark in front keeps their lines."""
    examples = inspect.cleandoc(takes.__doc__ or "").partition(_EXAMPLES)[2].split("\n")
    return "\n".join(["\b", "Examples:", *(f"  mfsdp-bench {line.strip()}" for line in examples)])


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
_MODULES = "plan fit run status report import_ export compare gate baseline validate nccl"
for _module in (*_MODULES.split(), "doctor", "schema"):  # in the order of the help
    import_module(f"bench.cli.{_module}")
for _name, _verb in Verb.ALL.items():
    _group, _, _name = _name.rpartition(" ")
    (_baseline_app if _group else app).command(_name, epilog=_epilog(_verb))(_command(_verb))
app.add_typer(_baseline_app, name="baseline")
