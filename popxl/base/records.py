"""`Record`: results of an analysis as immutable data."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """What was found out, by name. Attributes cannot be set; `model_dump_json()` writes them."""

    model_config = ConfigDict(frozen=True, defer_build=True)  # built when the first one is made, not at import
