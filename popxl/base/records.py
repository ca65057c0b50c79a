"""`Record`: results of an analysis as immutable data."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Frozen record of results. `model_dump_json()` writes it."""

    model_config = ConfigDict(frozen=True, defer_build=True)  # built when the first one is made, not at import
