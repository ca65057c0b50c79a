"""What every test stands on: the CPU, fixed seeds, golden text, and the smoke test before all others.

Tests marked `thorough` repeat others with more dtypes, sizes, seeds and steps. So do the cases of a test marked
`thorough(but_each=5)`, all but the first, the sixth and so on; with `rotated=True`, from another one on for each test,
so that among tests with the same cases each case is run. They are left out, unless they are asked for: all of them by
`-m thorough`, which runs nothing else; a part of them by `--thorough=3/10`, beside all other tests. `--part=3/10` runs
a part of whatever is asked for.

Tests marked `targets` compile for TPUs and GPUs. They are left out where the compilers of the extras `tpu` and `gpu`
are not installed.
"""

import argparse
import gc
import os
import re
import signal
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports JAX: no search for other devices, no warnings
os.environ.setdefault("POPXL_CPU_DEVICES", "8")  # however few cores there are
# Each test compiles in a thread of its own: dividing a program among several takes a third more, and all are busy.
os.environ["XLA_FLAGS"] = "--xla_cpu_parallel_codegen_split_count=1 " + os.environ.get("XLA_FLAGS", "")

if sys.dont_write_bytecode:  # a hundred processes start: each would compile these packages, for a third of a second
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # the tests run in the background, and interrupt programs
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import numpy as np
import pytest
from hypothesis.internal.conjecture import providers

TESTS = Path(__file__).parent

gc.set_threshold(50_000, 20)  # programs are many small objects: by default, a tenth of the time goes to looking at them
gc.disable()  # until the tests are collected: what modules make as they are imported stays

hypothesis.settings.register_profile(  # the first example compiles, and the machine may have more to do than this
    "popxl", max_examples=40, deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("popxl")
# Examples depend on tests alone, not on numbers that stand in the packages: parsing all of them takes three seconds.
providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts instead of comparing them")
    parser.addoption(
        "--thorough", metavar="K/N", type=_part, help="also run the K-th of N parts of the thorough tests; 1/1: all"
    )
    parser.addoption("--part", metavar="K/N", type=_part, help="only the K-th of N parts of the tests")


def _part(text: str) -> tuple[int, int]:
    """`3/10` as (3, 10)."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"expected a part such as 3/10, the third of ten; got {text!r}")
    return part, parts


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests wait for other processes, a sixth of the time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The smoke test first: if it fails, nothing that follows is worth reading. Thorough tests only if asked for."""
    items.sort(key=lambda item: item.path.name != "test_a_smoke.py")  # a stable sort
    _leave_out_thorough(config, items)
    if chosen := config.getoption("part"):
        part, parts = chosen
        others = [item for item in items if _part_of(item.nodeid, parts) != part]
        _leave_out(config, items, OTHER_PARTS, others)


def _leave_out_thorough(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not has_compilers():
        _leave_out(config, items, TARGETS_LEFT_OUT, [item for item in items if item.get_closest_marker("targets")])
    thorough = list(_thorough(items))
    for item in thorough:
        item.add_marker("compiled_whole")
    if "thorough" in config.getoption("markexpr"):
        return
    part, parts = config.getoption("thorough") or (0, 1)
    _leave_out(config, items, LEFT_OUT, [item for item in thorough if _part_of(item.nodeid, parts) != part])


def _leave_out(
    config: pytest.Config, items: list[pytest.Item], count: pytest.StashKey[int], left_out: list[pytest.Item]
) -> None:
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        config.stash[count] = len(left_out)
        without = set(left_out)
        items[:] = [item for item in items if item not in without]


def has_compilers() -> bool:
    """Whether the compilers of TPUs and GPUs are installed: the extras `tpu` and `gpu`."""
    plugins = find_spec("jax_plugins")
    found = {} if plugins is None else {info.name for info in iter_modules(plugins.submodule_search_locations)}
    return find_spec("libtpu") is not None and any(name.startswith("xla_cuda") for name in found)


def _part_of(name: str, parts: int) -> int:
    """Which of so many parts something is in, from 1 on."""
    return zlib.crc32(name.encode()) % parts + 1


def _thorough(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests that are thorough. Of each that is so but for some of its cases, at least one is not."""
    marked: defaultdict[str, list[tuple[pytest.Item, pytest.Mark]]] = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("thorough"):
            marked[item.nodeid.partition("[")[0]].append((item, mark))
    for function, cases in marked.items():
        for i, (item, mark) in enumerate(cases):
            step = mark.kwargs.get("but_each")
            first = zlib.crc32(function.encode()) % min(step, len(cases)) if mark.kwargs.get("rotated") else 0
            if step is None or (i - first) % step:
                yield item


LEFT_OUT = pytest.StashKey[int]()
"""How many thorough tests there are that do not run."""

OTHER_PARTS = pytest.StashKey[int]()
"""How many tests are in other parts than the one that runs."""

TARGETS_LEFT_OUT = pytest.StashKey[int]()
"""How many tests need the compilers of TPUs and GPUs, and do not run."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # pytest collects five times, to find what fails as it is freed
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # a process of pytest-xdist
        output["left out"] = [session.config.stash.get(count, 0) for count in (LEFT_OUT, TARGETS_LEFT_OUT)]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended. All of them have left out the same tests."""
    counts = getattr(node, "workeroutput", {}).get("left out", (0, 0))
    node.config.stash[LEFT_OUT], node.config.stash[TARGETS_LEFT_OUT] = counts


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{count} thorough tests left out; run them with `-m thorough`, or a tenth of them with `--thorough=1/10`."
        )
    if count := config.stash.get(TARGETS_LEFT_OUT, 0):
        terminalreporter.write_line(
            f"{count} tests left out that compile for TPUs and GPUs; install the compilers with "
            "`pip install -e '.[tpu,gpu]'`."
        )


def pytest_collection_finish() -> None:
    """What is there by now stays to the end of the tests: the garbage collector need not look at it, now or later."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def only_new_objects() -> None:
    """The garbage collector sees no others, which are millions: for tests of what it finds."""
    gc.freeze()  # what has become garbage, too: looking for it takes a third of a second, for each of such tests


def _seed() -> None:
    np.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:  # tests without it do not wait for its import
        torch.default_generator.manual_seed(0)  # `torch.manual_seed` asks for all accelerators: 2 ms for each test


def pytest_collectstart() -> None:
    """What modules draw as they are imported does not depend on which others were imported before them."""
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws does not depend on others."""
    _seed()


@pytest.fixture
def quickly_compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """XLA takes a third of the time for CPUs, for tests of numbers: they compile much and run it once.

    LLVM does not optimise; loops do not go through MLIR before, which costs ten milliseconds for each; and MLIR need
    not learn its dialects for each program, which costs another three. All else that compiling does stays as users have
    it. So does all of it in thorough tests, and in those that are marked `compiled_whole`; with `--thorough=3/10`, as
    in `.ci/run`, in a part of the files, each day another one.
    """
    import jax
    from jax._src import compiler
    from jax._src.interpreters import mlir

    part, parts = request.config.getoption("thorough") or (0, 1)
    if request.node.get_closest_marker("compiled_whole") or _part_of(request.path.name, parts) == part:
        yield
        return
    options, contexts, get_compile_options = _without_mlir(), _contexts(), compiler.get_compile_options

    def get_quick_options(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        """Also of what tests call `jax.jit` for."""
        found = get_compile_options(*args, backend=backend, **kwargs)
        if options and backend is not None and backend.platform == "cpu":
            found.env_option_overrides = [*found.env_option_overrides, *options.items()]
        return found

    monkeypatch.setattr(compiler, "get_compile_options", get_quick_options)
    monkeypatch.setattr(mlir, "make_ir_context", contexts.take)
    jax.config.update("jax_disable_most_optimizations", True)
    request.node.add_report_section("call", "XLA", "It took less time than for users: see `compiled_whole`.")
    yield
    jax.config.update("jax_disable_most_optimizations", False)


class _Contexts(threading.local):
    """MLIR's context of a thread. It keeps what programs are written in, so that it is made anew now and then."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._uses = make, 0

    def take(self) -> Any:
        if self._uses % 50 == 0:
            self._context = self._make()
        self._uses += 1
        return self._context


@cache
def _contexts() -> _Contexts:
    from jax._src.interpreters.mlir import make_ir_context

    return _Contexts(make_ir_context)


@cache
def _without_mlir() -> dict[str, str | bool]:
    """The option with which XLA writes loops as LLVM's instructions at once, as it did before, where it still does.

    It computes float8_152 wrongly so, and float8_143 where numbers are converted to it.
    """
    import jax

    options: dict[str, str | bool] = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as problem:
        if "No such compile option" not in str(problem):
            raise
        return {}
    return options


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(text)` compares `text` with the golden text of this test, `golden(text, "after")` with a second one.

    The text of `test_add[x-y]` in tests/popxl/test_ops.py lies in tests/golden/popxl/test_ops/test_add-x-y.txt. Only
    `--update-golden` writes it, so that a difference is looked at before it is accepted.
    """
    folder = TESTS / "golden" / request.path.relative_to(TESTS).with_suffix("")
    how = f"python -m pytest '{request.node.nodeid}' --update-golden"

    def check(text: str, part: str = "") -> None:
        name = re.sub(r"[^\w.]+", "-", f"{request.node.name} {part}").strip("-")
        path = folder / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("update_golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists():
            pytest.fail(f"There is no golden text {path} yet. If this is right, create it:\n{how}\n\n{text}")
        else:
            expected = path.read_text(encoding="utf-8")
            assert text == expected, f"differs from {path}; if the new text is right, accept it:\n{how}"

    return check
