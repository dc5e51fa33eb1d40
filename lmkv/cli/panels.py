"""What one comparison found: bars of one unit, one of them the reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

from lmkv.cli.rounds import Row


@frozen
class Panel:
    """`bars`: value by name. `reference`: the bar that the others are compared with. `log`: for the axis.

    Names that begin with "lmkv" are lmkv's own.
    """

    title: str
    unit: str
    bars: Mapping[str, float]
    reference: str
    log: bool = False
    note: str = ""

    @property
    def better(self) -> str:
        return "less is better" if self.unit == "s" else "more is better"

    def rows(self) -> Iterator[Row]:
        for name, value in self.bars.items():
            ratio = None if name == self.reference else value / self.bars[self.reference]
            of = None if name == self.reference else self.reference
            yield Row(f"{self.title}: {name}", value, self.unit, of, ratio)


def rounded(value: float, unit: str) -> str:
    """As many digits as a measurement deserves; seconds come with their unit, which may be ms."""
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
