"""The contracts among the cases of `mfsdp`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import BenchError


class ContractError(BenchError):
    """A check of a contract has failed; says which."""


@dataclass(frozen=True)
class ContractCase:
    """module: of this package, with the checks. needs: a package without which there is no case.

    full: left out of the quick set.
    """

    module: str
    ranks: int = 2
    engine: str = "mfsdp"
    needs: str = ""
    full: bool = False

    @property
    def id(self) -> str:
        """As that of a case."""
        return f"{self.engine}/contract/{self.module.replace('_', '-')}/{self.ranks}"

    @property
    def name(self) -> str:
        """In words."""
        return self.module.replace("_", " ")

    @property
    def content(self) -> str:
        """The source of its checks."""
        return (Path(__file__).parent / f"{self.module}.py").read_text()


CONTRACTS = (
    ContractCase("plans", ranks=1),
    ContractCase("interface"),
    ContractCase("upstream_names"),
    ContractCase("optimizers"),
    ContractCase("checkpoints"),
    ContractCase("copies", needs="safetensors"),
    ContractCase("shards"),
    ContractCase("refusals"),
    ContractCase("graphs_of_calls"),
    ContractCase("captured_steps"),
    ContractCase("meta_device"),
    ContractCase("memory_accounts"),
    ContractCase("meshes", ranks=4),
    ContractCase("transformer_engine", ranks=4),
    ContractCase("torchao_on_shards", needs="torchao", full=True),
    ContractCase("transports", ranks=4),
    ContractCase("hooked_weights"),
    ContractCase("changed_weights"),
)


def check(module: str) -> None:
    """On a rank: all checks of a contract.

    Raises:
        ContractError: one of them fails.
    """
    checks: Sequence[Callable[[], None]] = importlib.import_module(f"{__package__}.{module}").CHECKS
    for one in checks:
        try:
            one()
        except Exception as error:
            what = one.__name__.replace("_", " ")
            raise ContractError(f"{what}: {type(error).__name__}: {error}") from error
