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

    def rows(self) -> Iterator[Row]:
        for name, value in self.bars.items():
            ratio = None if name == self.reference else value / self.bars[self.reference]
            of = None if name == self.reference else self.reference
            yield Row(f"{self.title}: {name}", value, self.unit, of, ratio)
