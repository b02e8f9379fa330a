"""How a conformance test says what it found."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor


def same(what: str, found: Any, wanted: Any) -> None:
    """Equal to the bit; containers item by item.

    Raises:
        AssertionError: they differ.
    """
    if isinstance(wanted, Tensor):
        fits = isinstance(found, Tensor) and (found.shape, found.dtype) == (
            wanted.shape,
            wanted.dtype,
        )
        assert fits, f"{what}: expected {wanted.dtype} {tuple(wanted.shape)}, found {found}"
        assert torch.equal(found, wanted), f"{what}: expected {wanted}, found {found}"
    elif isinstance(wanted, Mapping):
        assert list(found) == list(wanted), f"{what}: expected {list(wanted)}, found {list(found)}"
        for name, value in wanted.items():
            same(f"{what}, {name}", found[name], value)
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str):
        assert len(found) == len(wanted), f"{what}: expected {wanted}, found {found}"
        for number, value in enumerate(wanted):
            same(f"{what}, number {number}", found[number], value)
    else:
        assert found == wanted, f"{what}: expected {wanted}, found {found}"


def close(what: str, found: Tensor | None, wanted: Tensor, relative: float = 1e-11) -> None:
    """As large as `wanted` up to rounding.

    Raises:
        AssertionError: they differ.
    """
    assert found is not None, f"{what}: expected a value, found none"
    assert found.shape == wanted.shape, f"{what}: expected {wanted.shape}, found {found.shape}"
    off = float((found.double() - wanted.double()).norm())
    size = float(wanted.double().norm())
    assert off <= relative * size, f"{what}: off by {off:.3g} of {size:.3g}"


def refuses(
    error: type[Exception], words: str, call: Callable[..., Any], *arguments: Any, **options: Any
) -> None:
    """`call(*arguments, **options)` raises `error` itself, and the message has `words`."""
    with pytest.raises(error, match=re.escape(words)) as found:
        call(*arguments, **options)
    assert type(found.value) is error, f"expected {error.__name__} ({words}), found {found!r}"
