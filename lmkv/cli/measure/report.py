"""Comparisons as rows and as one picture. matplotlib is imported only to draw."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from attrs import field, frozen

from lmkv.cli.measure.timing import SURE, Row

LESS_IS_BETTER = {"s", "ms", "us", "bytes"}


@frozen
class Comparison:
    """`bars`: value by name. `reference`: the bar that the others are compared with. `log`: for the axis.

    `ratios`: of a bar beside the reference in each round; without rounds their values are divided. `targets`: the least
    such ratio where more is better, else the greatest. Names that begin with "lmkv" are lmkv's own.
    """

    title: str
    unit: str
    bars: Mapping[str, float]
    reference: str
    log: bool = False
    note: str = ""
    targets: Mapping[str, float] = field(factory=dict)
    ratios: Mapping[str, Sequence[float]] = field(factory=dict)

    @classmethod
    def of_rounds(
        cls,
        title: str,
        unit: str,
        rounds: Mapping[str, Sequence[float]],
        reference: str,
        targets: Mapping[str, float],
        *,
        note: str = "",
    ) -> Comparison:
        """Medians, and ratios within each round."""
        bars = {name: statistics.median(values) for name, values in rounds.items()}
        others = rounds[reference]
        beside = {
            name: [value / other for value, other in zip(values, others, strict=True)]
            for name, values in rounds.items()
            if name != reference and min(others) > 0
        }
        return cls(title, unit, bars, reference, note=note, targets=targets, ratios=beside)

    @property
    def better(self) -> str:
        return "less is better" if self.unit in LESS_IS_BETTER else "more is better"

    @property
    def bound(self) -> str:
        """How ratios have to be beside their targets."""
        return "at most" if self.unit in LESS_IS_BETTER else "at least"

    def rows(self) -> Iterator[Row]:
        for name, value in self.bars.items():
            title = f"{self.title}: {name}"
            if name == self.reference or self.bars[self.reference] <= 0:
                yield Row(title, value, self.unit)
                continue
            ratio = statistics.median(self.ratios.get(name) or [value / self.bars[self.reference]])
            target = self.targets.get(name)
            yield Row(title, value, self.unit, self.reference, ratio, target, self._met(name, ratio))

    def _met(self, name: str, ratio: float) -> bool | None:
        """Whether the target is reached; None without one, and where few rounds do not say so with one voice."""
        target, ratios = self.targets.get(name), self.ratios.get(name, ())
        if target is None or (len(ratios) < SURE and (len(ratios) < 2 or min(ratios) <= target <= max(ratios))):
            return None
        return ratio <= target if self.unit in LESS_IS_BETTER else ratio >= target


def rounded(value: float, unit: str) -> str:
    """The value with as many digits as a measurement deserves; seconds come with their unit, which may be ms."""
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


OURS, THEIRS = "#1b6ca8", "#b8bec6"
COLUMNS = 2
NAME = 32
TITLE = 36
"""Characters of a name, and of a title, in one line."""


def draw(comparisons: Sequence[Comparison], machine: str, path: Path, *, title: str = "lmkv on this machine") -> None:
    """Horizontal bars, one chart per comparison; the name of the file says which format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = -(-len(comparisons) // COLUMNS)
    heights = [max(map(_lines, comparisons[at : at + COLUMNS])) for at in range(0, len(comparisons), COLUMNS)]
    figure = Figure(figsize=(12, 1.3 + sum(0.95 + 0.42 * lines for lines in heights)), dpi=150)
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.02, ha="left", fontsize=15, fontweight="bold")
    figure.text(0.02, 0.012, machine, fontsize=8, color="#555555")
    grid = figure.add_gridspec(rows, COLUMNS, height_ratios=[1 + lines for lines in heights])
    for number, comparison in enumerate(comparisons):
        row, column = divmod(number, COLUMNS)
        alone = column == 0 and number == len(comparisons) - 1
        _bars(figure.add_subplot(grid[row, :] if alone else grid[row, column]), comparison)
    figure.tight_layout(rect=(0.01, 0.03, 0.99, 0.97), h_pad=2, w_pad=3)
    figure.savefig(path)


def _lines(comparison: Comparison) -> int:
    """Lines of the names of all bars."""
    return sum(len(wrap(name, NAME)) for name in comparison.bars)


def _bars(axes: Any, comparison: Comparison) -> None:
    names, values = [fill(name, NAME) for name in comparison.bars], list(comparison.bars.values())
    colours = [OURS if name.startswith("lmkv") else THEIRS for name in names]
    bars = axes.barh(names, values, color=colours, height=0.65)
    axes.bar_label(bars, [rounded(value, comparison.unit) for value in values], padding=4, fontsize=9)
    axes.invert_yaxis()
    if comparison.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlim(min(values) / 3, max(values) * 4)
    else:
        axes.set_xlim(0, max(values) * 1.25)
    scale = ", logarithmic" if comparison.log else ""
    parts = [f"{comparison.unit}{scale}", comparison.note, comparison.better]
    axes.set_xlabel("; ".join(filter(None, parts)), fontsize=8, color="#555555")
    axes.set_title(fill(comparison.title, TITLE), loc="left", fontsize=10.5, fontweight="bold")
    axes.tick_params(axis="y", length=0, labelsize=9.5)
    axes.tick_params(axis="x", labelsize=8, colors="#555555")
    axes.spines[["top", "right", "left"]].set_visible(False)
