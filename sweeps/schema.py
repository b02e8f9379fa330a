"""The shape of a sweep file, as pydantic models: the source of `mfsdp-bench schema`.

What a model cannot say (which settings exist, which labels an axis has) is checked in
`sweeps.definition`, value by value, where the lines are known.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from bench.spec import RunSpec

AxisValues = list[Any]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MatrixSection(_Section):
    """Axes and the exceptions to them."""

    product: dict[str, AxisValues] = Field(
        default_factory=dict,
        description="axis -> values; every combination of the axes is a cell",
    )
    zip: list[dict[str, AxisValues]] = Field(
        default_factory=list,
        description="groups of axes of equal length that advance together",
    )
    include: list[dict[str, Any]] = Field(
        default_factory=list, description="single cells next to the product: setting -> value"
    )
    exclude: list[dict[str, Any]] = Field(
        default_factory=list, description="axis -> value, list or glob; matching cells go"
    )


class OverrideSection(_Section):
    """Settings for the cells that match `when`."""

    when: dict[str, Any] = Field(description="axis or setting -> value, list or glob")
    set: dict[str, Any] = Field(description="setting -> value")


def _plain(text: str) -> str:
    """What git, pip and others take unchanged, and never as an option of theirs."""
    if not text.strip() or "\0" in text:
        raise ValueError("a text with something in it")
    if text.startswith("-"):
        raise ValueError("a plain value; this would be read as an option")
    return text


Plain = Annotated[str, AfterValidator(_plain)]


class ArmSection(_Section):
    """One side of a comparison; with nothing in it, the working tree, unchanged."""

    git: Plain | None = Field(default=None, description="a ref, looked up in `repo`")
    repo: Plain | None = Field(default=None, description="a repository; without it, this one")
    checkout: Plain | None = Field(default=None, description="a folder, unchanged")
    python: Plain | None = Field(default=None, description="interpreter of the ranks")
    packages: list[Plain] | None = Field(
        default=None, min_length=1, description="installed by pip for this arm alone"
    )
    set: dict[str, Any] | None = Field(
        default=None, min_length=1, description="setting -> value, for the runs of this arm"
    )


class RequireSection(_Section):
    """Which kernels NCCL's logs of the cells that match `when` are to show."""

    when: dict[str, Any] = Field(description="axis or setting -> value, list or glob")
    nccl: str = Field(description="OPERATION=KIND terms, as AG=sym,RS=sym")
    after_iteration: int | None = Field(default=None, ge=0, description="judge what follows it")
    min_bytes: int = Field(default=0, ge=0, description="judge messages of at least so many bytes")


class SweepFile(_Section):
    """A sweep file. `base` is a partial RunSpec; settings may also be written with dots."""

    name: str = Field(pattern=NAME_PATTERN, description="names the sweep in the results folder")
    description: str = ""
    extends: str | None = Field(
        default=None,
        description="a sweep file next to this one, or a shipped one, whose base lies under base",
    )
    base: RunSpec = RunSpec()
    matrix: MatrixSection = MatrixSection()
    repeat: int = Field(default=1, ge=1, le=1000, description="runs of every cell")
    overrides: list[OverrideSection] = Field(default_factory=list)
    arms: dict[str, ArmSection | str] = Field(
        default_factory=dict, description="name -> where its code comes from; two or more"
    )
    interleave: bool = Field(default=False, description="run the arms alternately, block by block")
    require: list[RequireSection] = Field(
        default_factory=list, description="kernels that NCCL's logs are to show; nccl SWEEP judges"
    )
