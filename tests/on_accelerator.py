"""Tests on the accelerator of this machine: with `--on`, all sessions are there, whatever device a test names.

    python -m pytest -p tests.on_accelerator --on gpu -n 12 tests/popxl/ops

Programs are compiled as those of users are. Tests that are marked `here` are left out: they are about CPUs. Those that
ask JAX for its CPUs still get them. On a single device, tests of programs that are placed on several (`test_placement`,
`test_ipu_costs`) fail.
"""

from __future__ import annotations

import os

import pytest

KINDS = ("gpu", "cuda", "rocm", "tpu")
"""Those of `runtime.targets.devices`, which is not imported here: JAX reads its environment as it is imported."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", choices=KINDS, help="run all sessions on this kind of hardware")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before tests/conftest.py asks JAX for CPUs alone."""
    if (kind := early_config.known_args_namespace.on) is not None:
        os.environ["JAX_PLATFORMS"] = f"{'cuda' if kind == 'gpu' else kind},cpu"
        os.environ["POPXL_OFFLINE_DEVICE"] = kind
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # for what programs are compared with
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes share the memory


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("on") is not None:
        items[:] = [item for item in items if item.get_closest_marker("here") is None]
        for item in items:
            item.add_marker("compiled_whole")
