"""Engines given by their import path, as a stranger's: `examples.engines.ddp_zero:build`.

Each refuses the runs that it cannot follow, so that no table shows a dtype that was not used.
"""

from __future__ import annotations

from bench.errors import UnsupportedError
from bench.spec import ResolvedRun, StrategyName


def refuse_others(
    resolved: ResolvedRun, strategies: tuple[StrategyName, ...], *, main: tuple[str, ...]
) -> None:
    """Refuse another strategy, a second axis, other main weights, and gradients unlike them.

    Raises:
        UnsupportedError: with what to set.
    """
    name, dtypes = resolved.engine.name, resolved.dtypes
    if resolved.strategy not in strategies or resolved.engine.outer_size > 1:
        offered = " and ".join(strategies)
        raise UnsupportedError("strategy-not-in-engine", f"{name} offers {offered}, on one axis")
    weights = dtypes.main_params or dtypes.compute
    if weights not in main or dtypes.main_grads != weights:
        raise UnsupportedError(
            "dtypes-not-in-engine",
            f"{name} keeps gradients in the dtype of its main weights ({' or '.join(main)}); found"
            f" main_params {dtypes.main_params} and main_grads {dtypes.main_grads}",
        )
