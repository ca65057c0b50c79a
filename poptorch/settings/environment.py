"""Defaults of options from environment variables."""

from __future__ import annotations

import json
import os
from typing import Any


def flag(name: str) -> bool:
    """Whether a variable is set, and neither `0` nor `false`."""
    return os.environ.get(name, "").lower() not in ("", "0", "false")


def _json_variable(name: str) -> dict[str, Any]:
    """JSON object in an environment variable."""
    text = os.environ.get(name) or "{}"
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise ValueError(f"The environment variable {name} is {text!r}; expected a JSON object.") from None


def profile_dir_of_environment() -> str | None:
    """Report folder named in the environment."""
    engine, tracing = _json_variable("POPLAR_ENGINE_OPTIONS"), _json_variable("PVTI_OPTIONS")
    return engine.get("autoReport.directory") or tracing.get("directory")


def requested_profile_dir() -> str | None:
    """Report folder, if the environment switches reports on."""
    asked = _json_variable("POPLAR_ENGINE_OPTIONS").get("autoReport.all") or _json_variable("PVTI_OPTIONS").get(
        "enable"
    )
    return (profile_dir_of_environment() or ".") if asked == "true" else None
