"""The plan of the house: what the floors of `pyproject.toml` cannot say."""

import ast
import importlib
import inspect
import pickle
import re
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

import popxl
from popxl_addons.checkpoint_session import CheckpointSession
from popxl_addons.task_session import TaskSession

ROOT = Path(__file__).parents[1]

# Paths that programs import by name. Ops may live in any file, but for those that have one of their own here.
POPXL = """
    context dtypes errors fp8_utils graph ir module ops ops.call ops.collectives ops.collectives.collectives
    ops.conditional ops.conv ops.negative_log_likelihood ops.repeat ops.utils ops.var_updates initial random_seed
    remote_buffer replica_grouping session streams tensor tensorlocation transforms transforms.autodiff
    transforms.decompose_sum transforms.merge_exchange typing_ utils op options testing
    extend extend.arguments extend.collectives extend.files extend.graphs extend.jax extend.kernels extend.memory
    extend.ops
    extend.pages extend.processes extend.sessions extend.source extend.targets
""".split()
ADDONS = """
    array_munging debugging dot_tree graph graph_cache graph_common layers layers.conv layers.embedding
    layers.group_norm layers.layer_norm layers.layer_norm_distributed layers.linear layers.linear_fp8
    layers.linear_gq module named_replica_grouping named_tensors ops ops.cross_entropy ops.cross_entropy_sharded_loss
    ops.cross_entropy_sharded_wr_loss ops.fp8_amax_scale ops.fp8_mse_scale ops.fp8_utils ops.grad_reduce_square_add
    ops.group_quantize_decompress ops.layer_norm_distributed ops.linear_layout ops.replicated_all_reduce_TP
    ops.replicated_strided_collectives ops.rotary_pos_embed ops.static_sparse_ops ops.streams optimizers optimizers.adam
    patterns performance_utils remote route_tensor rts seed_variable streams task_session testing_utils transforms
    transforms.autodiff transforms.available_memory_proportion transforms.batch_serialisation transforms.pipelining
    transforms.recomputation transforms.repeat_graph transforms.use_fc_pass utils variable_factory
""".split()
POPTORCH = """
    _impl _poplar_executor _utils enums errors lightning ops optim options popdist.poptorch poptorch_core profiling
    testing
""".split()


PATHS = [*(f"popxl.{p}" for p in POPXL), *(f"popxl_addons.{p}" for p in ADDONS), *(f"poptorch.{p}" for p in POPTORCH)]


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_programs_import(path: str) -> None:
    if path.startswith("poptorch"):
        pytest.importorskip("torch")
    if path == "poptorch.lightning":
        pytest.importorskip("lightning")
    assert importlib.import_module(path).__name__ == path


def test_sessions_tell_their_source_and_types() -> None:
    """Programs import them as `popxl.Session`; editors and notebooks look into `runtime.session`."""
    assert inspect.getsource(popxl.Session).startswith("class Session(")
    assert pickle.loads(pickle.dumps(popxl.Session)) is popxl.Session
    assert set(get_type_hints(popxl.Session)) == {"machine"}


def test_sessions_of_kits_use_no_private_members() -> None:
    """Nor define any of the same name: `popxl.extend.sessions` has what they need."""
    own = "\n".join(map(inspect.getsource, popxl.Session.__mro__[:-1]))
    private = {*re.findall(r"\b(?:self\.|def )(_[a-z]\w*)", own)}
    for of_kit in (CheckpointSession, TaskSession):
        assert not private.intersection(re.findall(r"\b_[a-z]\w*", inspect.getsource(of_kit))), of_kit


@cache
def code(package: str) -> list[tuple[str, str]]:
    """The sources of a package, without docstrings and comments."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                node.value = ast.Constant(None)
        found.append((str(path.relative_to(ROOT)), ast.unparse(tree)))
    return found


def found(package: str, pattern: str, *without: str) -> list[str]:
    """Where a pattern occurs in a package, but for some of its files."""
    return [
        f"{path}: {match.group()}"
        for path, text in code(package)
        for match in re.finditer(pattern, text)
        if not path.startswith(without)
    ]


def test_the_language_names_no_platform_and_compiles_nothing() -> None:
    forbidden = (
        r"\bjit\b|platform_dependent|xla_metadata|default_backend|\bjax\.devices|local_devices|['\"](cpu|gpu|tpu)['\"]"
    )
    assert not found("popxl", forbidden, "popxl/transforms/from_jax.py", "popxl/transforms/jax_")


def test_only_ops_and_the_lowering_ask_which_op_it_is() -> None:
    asked = r"\bkind (is|in|==|!=|is not|not in) [(\w., ]*_kind\b"
    assert not found("popxl", asked, "popxl/ops/")
    assert not found("runtime", asked, "runtime/lowering/")
    assert not found("popxl_addons", asked, "popxl_addons/ops/")
    assert not found("poptorch", asked)


def test_what_is_there_for_cpus_is_imported_for_cpus_only() -> None:
    """By the parts of machines and by targets, inside of the functions that ask for it; nobody else."""
    assert found("runtime", r"\n *(from|import) runtime\.cpu\b.*", "runtime/cpu/") == [
        "runtime/lowering/platform_hooks.py: \n        "
        "from runtime.cpu import collective_lock, feeds, kernel_overrides, update_order",
        "runtime/targets/compile_target.py: \n        from runtime.cpu.flags import compile_options",
    ]
    for package in ("popxl", "popxl_addons", "poptorch"):
        assert not found(package, r"runtime\.cpu\b")


def test_one_file_knows_the_private_side_of_jax() -> None:
    for package in ("popxl", "runtime", "popxl_addons", "poptorch"):
        assert not found(package, r"\bjax\._src\b", "runtime/jax_private.py")


def test_private_files_of_popxl_stand_on_a_floor() -> None:
    """A file directly under `popxl/` is a path that users import."""
    files = {path.stem for path in (ROOT / "popxl").glob("*.py")} - {"__init__", "__main__"}
    assert files == {p for p in POPXL if "." not in p and not (ROOT / "popxl" / p).is_dir()} | {"compat", "operators"}


def test_all_of_extend_is_a_path_of_programs_and_has_a_page() -> None:
    modules = {f"extend.{path.stem}" for path in (ROOT / "popxl" / "extend").glob("*.py")} - {"extend.__init__"}
    assert modules <= set(POPXL)
    reference = (ROOT / "docs" / "reference.py").read_text(encoding="utf-8")
    assert {f"popxl.{module}" for module in modules} <= set(reference.split())


def test_private_files_of_poptorch_stand_in_a_folder() -> None:
    """A file directly under `poptorch/` is a path that users import."""
    files = {path.stem for path in (ROOT / "poptorch").glob("*.py")} - {"__init__", "__main__"}
    assert files == {path for path in POPTORCH if "." not in path} - {"ops"}


PACKAGES = ["popxl", "popxl_addons", "runtime", "poptorch", "poptorch_geometric"]

FUNCTION_WORDS = set(
    "a after all alone also an and anew any apart are around as at be been before beside both by can did do does "
    "done each every far few for found from given had has have here how if in inside into is it its kept look "
    "looked looks made may met more most near no not note of off on one ones only or other others out outside own "
    "put read said same say says seen so some such taken tell than that the their them then there these they "
    "thing this those to together told too under until was way ways were what when where which while who whole "
    "whom whose will with would".split()
)
PRIVATE_WORDS = set(
    "aside doubt doubts lend lent loan loans meeting meetings nobody seemingly somebody story told whoever whom".split()
)
PUBLIC_NAMES = {"told"}  # a parameter of `plan_memory`


@cache
def definitions(package: str) -> list[tuple[ast.AST, str, str]]:
    """Classes and functions of a package, with their names and files."""
    return [
        (node, node.name, str(file.relative_to(ROOT)))
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_name_stands_twice_in_a_package(package: str) -> None:
    """Nor with an underscore before it; but for `Options` of PopTorch and of PopDist, both names of programs."""
    found: dict[str, list[str]] = {}
    for node, name, file in definitions(package):
        if isinstance(node, ast.ClassDef) and name != "Options":
            found.setdefault(name.lstrip("_"), []).append(file)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def words_of(name: str) -> set[str]:
    """Words of an identifier."""
    return {word.lower() for word in re.split(r"_+|(?<=[a-z])(?=[A-Z])", name) if word}


@pytest.mark.parametrize("package", PACKAGES)
def test_names_have_no_private_words(package: str) -> None:
    """Of modules, parameters, variables and attributes, too."""
    found: dict[str, str] = {}
    for file in (ROOT / package).rglob("*.py"):
        found[file.stem] = file.name
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[node.name] = file.name
            elif isinstance(node, ast.arg):
                found[node.arg] = file.name
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found[node.id if isinstance(node, ast.Name) else node.attr] = file.name
    assert {name: file for name, file in found.items() if words_of(name) & PRIVATE_WORDS} == {
        name: found[name] for name in PUBLIC_NAMES & {*found}
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_terms_of_the_field(package: str) -> None:
    """Hardly any consists of function words alone."""
    words = {f"{name} ({file})": words_of(name) for _, name, file in definitions(package) if not name.startswith("__")}
    vague = [name for name, parts in words.items() if parts <= FUNCTION_WORDS]
    assert len(vague) <= 0.02 * len(words), vague


def test_terms_name_files_that_exist() -> None:
    named = re.findall(r"\| `([a-z_/]+\.py)` \|", (ROOT / "docs" / "terms.md").read_text(encoding="utf-8"))
    assert len(named) >= 50 and [file for file in named if not (ROOT / file).is_file()] == []
