"""Weights & Biases, an optional package: imported on use, with an error that names it if it is missing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SCHEME = "wandb://"


def wandb() -> Any:
    """Import wandb. Raises `ImportError` if missing."""
    try:
        import wandb
    except ImportError as problem:
        raise ImportError("Weights & Biases is not installed. Install it with `pip install wandb`.") from problem
    return wandb


def log_arrays(arrays: Mapping[str, np.ndarray], step: int) -> None:
    """Log histogram and non-finite count of each array at `step` of the active run."""
    package = wandb()
    record: dict[str, Any] = {}
    for name, array in arrays.items():
        finite = np.isfinite(array)
        record[f"{name}:histogram"] = package.Histogram(array[finite].astype(np.float32))
        record[f"{name}:not_finite"] = int(array.size - np.count_nonzero(finite))
    package.log(record, step=step)


def upload(name: str, directory: Path) -> None:
    """Upload `directory` as an artifact of the active run. Raises `RuntimeError` without active run."""
    package = wandb()
    if package.run is None:
        raise RuntimeError(f"There is no active run to store `{SCHEME}{name}` in. Start one with `wandb.init(...)`.")
    artifact = package.Artifact(name, type="checkpoints")
    artifact.add_dir(str(directory))
    package.run.log_artifact(artifact)


def download(name: str, directory: Path) -> None:
    """Fetch the files of an artifact, by default the latest version, into `directory`."""
    package = wandb()
    version = name if ":" in name else f"{name}:latest"
    source = package.Api().artifact(version) if package.run is None else package.run.use_artifact(version)
    source.download(root=str(directory))
