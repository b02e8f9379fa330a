"""Memory of one rank over a step, by category."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.errors import UsageError
from bench.fit.prediction import Prediction
from bench.fit.search import Choice
from bench.fit.trace import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(found: Prediction, path: Path, device_bytes: int | None) -> None:
    """Write a stacked area over the moments of a step; the form is that of the file's name.

    Raises:
        UsageError: no such form, or the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    names = [name for name in CATEGORIES if any(held.get(name) for _, held in found.steps)]
    heights = [[held.get(name, 0) / 1e9 for _, held in found.steps] for name in names]
    places = range(len(found.steps))
    colors = mpl.colormaps["tab10"].colors  # type: ignore[attr-defined]
    labels = [name.replace("_", " ") for name in names]
    axes.stackplot(places, heights, labels=labels, colors=colors, step="mid", linewidth=0)
    if device_bytes is not None:
        axes.axhline(device_bytes / 1e9, color="black", linestyle="--", linewidth=1)
    starts: list[tuple[int, str]] = []
    for place, (moment, _) in enumerate(found.steps):
        name = moment.phase
        if moment.microbatch is not None and found.resolved.microbatches > 1:
            name += f" {moment.microbatch + 1}"
        if not starts or starts[-1][1] != name:
            starts.append((place, name))
    edges = [*(place for place, _ in starts), len(found.steps)]
    # Short phases share their tick: a label each would overlap.
    wide = [i for i, (place, _) in enumerate(starts) if edges[i + 1] - place > len(places) / 12]
    axes.set_xticks([(edges[i] + edges[i + 1] - 1) / 2 for i in wide], [starts[i][1] for i in wide])
    peak = max(places, key=lambda place: sum(found.steps[place][1].values()))
    axes.plot([peak], [found.peak_bytes / 1e9], "v", color="black", label="peak")
    axes.set_xlim(0, len(found.steps) - 1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB per rank")
    axes.set_title(f"{found.resolved.slug}: {found.peak_bytes / 1e9:,.1f} GB")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False)
    _save(figure, path)


def draw_over_gpus(choices: Sequence[Choice], path: Path) -> None:
    """Write the categories at the peak as bars over numbers of GPUs, and the device's memory.

    Raises:
        UsageError: no such form, or the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    known = [one for one in choices if one.prediction is not None and one.verdict is not None]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    gpus = [str(one.switches["launch.ranks"]) for one in known]
    below = [0.0] * len(known)
    for name, color in zip(CATEGORIES, mpl.colormaps["tab10"].colors, strict=True):  # type: ignore[attr-defined]
        heights = [one.prediction.by_category.get(name, 0) / 1e9 for one in known if one.prediction]
        if any(heights):
            axes.bar(gpus, heights, bottom=below, color=color, label=name.replace("_", " "))
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for verdict in [one.verdict for one in known if one.verdict][:1]:
        size = verdict.device_bytes / 1e9
        axes.axhline(size, color="black", linestyle="--", linewidth=1, label=verdict.device)
        axes.set_ylim(top=1.05 * max([size, *below]))
    axes.set_xlabel("GPUs")
    axes.set_ylabel("GB per rank at the peak")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True, frameon=False)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}; name a .png, .svg or .pdf") from error
