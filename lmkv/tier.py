"""A tier: a backend with a capacity, an eviction policy and an admission filter."""

from __future__ import annotations

from typing import Literal

from attrs import define, field, validators

from lmkv.protocols import Admission, Backend, Policy


@define(eq=False)
class Tier:
    """How a store uses a backend. Plain data: build it, hand it to a `TieredStore`.

    Of a primary tier only backend and policy count: its capacity is its slab. `capacity_bytes`: None means as
    much as the backend takes. `write`: "through" copies chunks down as they are stored, "back" when they
    leave host memory. `admission`: None admits all.
    """

    backend: Backend
    policy: Policy
    capacity_bytes: int | None = None
    admission: Admission | None = None
    write: Literal["through", "back"] = field(
        default="through", validator=validators.in_(("through", "back"))
    )

    @property
    def name(self) -> str:
        return self.backend.name
