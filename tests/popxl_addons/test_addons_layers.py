"""Layers against their namesakes in torch: results and every gradient; initial values; errors."""

from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.layers.conv import Conv2D
from popxl_addons.layers.embedding import MULTISLICE_MAGIC_NUMBER, Embedding
from popxl_addons.layers.group_norm import GroupNorm
from popxl_addons.layers.layer_norm import LayerNorm
from popxl_addons.layers.linear import Linear
from popxl_addons.layers.linear_fp8 import LinearFP8
from popxl_addons.layers.linear_gq import (
    LinearGQ,
    group_quantize_compress_numpy,
    group_quantize_decompress_numpy,
)
from popxl_addons.layers.rms_norm import RMSNorm
from popxl_addons.testing_utils import TensorInput, run_module
from tests.tolerances import assert_near

SPEC = popxl.TensorSpec((5, 4), popxl.float32)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def normal(*shape, dtype=np.float32):
    return np.random.normal(size=shape).astype(dtype)


class Differentiated(addons.Module):
    """Outputs of `layer`, then the gradients of its inputs, variables last, for a gradient `dy` of the first output."""

    def __init__(self, layer, required=None):
        super().__init__()
        self.inner, self.required = [layer], required  # in a list: not a submodule, its variables come in by hand

    def build(self, x, dy):
        facts, graph = self.inner[0].create_graph(x)
        args = self.add_variable_inputs("layer", facts)
        required = [graph.graph.inputs[0], *graph.args.values_flat()]
        if self.required is not None:
            required = [t for t in required if t.name in self.required]
        y = graph.graph.outputs[0]
        grad = graph.autodiff(grads_provided=[y], grads_required=required)
        info = graph.bind(args).call_with_info(x)
        return info.outputs[0], *grad.call(dy, args=grad.grad_graph_info.inputs_dict(info))


def compare(layer, torch_layer, x, atol=1e-4, required=None, **mapping):
    """`layer` and a torch layer with the same weights: the result, the gradients of x and of each parameter."""
    import torch

    with torch.no_grad():
        for parameter in torch_layer.parameters():
            parameter.copy_(torch.tensor(normal(*parameter.shape)))
    torch_x = torch.tensor(x.astype(np.float32), requires_grad=True)
    torch_y = torch_layer(torch_x)
    dy = normal(*torch_y.shape, dtype=x.dtype)
    torch_y.backward(torch.tensor(dy.astype(np.float32)))
    expected = {"y": torch_y, "x": torch_x.grad} | {name: p.grad for name, p in torch_layer.named_parameters()}

    dtype = popxl.dtype.as_dtype(x.dtype)
    found = run_module(
        Differentiated(layer, required),
        TensorInput(x),
        TensorInput(dy),
        weights=lambda variables: layer.torch_mapping(variables.layer, torch_layer, dtype, **mapping),
    )
    names = [name for name in expected if required is None or name in ("y", *required)]
    for name, array in zip(names, found, strict=True):
        reference = expected[name].detach().numpy()
        if name == "weight" and isinstance(layer, Linear):
            reference = reference.T
        assert_near(array.reshape(reference.shape), reference, max(atol, 1e-4), name)


class TestLinear:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
    def test_against_torch(self, shape, bias, torch):
        compare(Linear(3, bias=bias), torch.nn.Linear(4, 3, bias=bias), normal(*shape))

    def test_specification(self):
        (y,) = run_module(
            Linear(2),
            TensorInput(np.ones((1, 4)), popxl.float32),
            weights=lambda v: {v.weight: np.ones((4, 2), np.float32), v.bias: np.zeros(2, np.float32)},
        )
        np.testing.assert_array_equal(y, [[4, 4]])

    def test_variables(self, ir):
        facts, graph = Linear(3).create_graph(popxl.TensorSpec((5, 4), popxl.float16))
        assert facts.weight.shape, facts.bias.shape == ((4, 3), (3,))
        assert facts.weight.dtype is facts.bias.dtype is popxl.float16
        assert [op.op_type for op in graph.graph.ops] == ["MatMul", "Add"]
        assert Linear(3, bias=False).create_graph(SPEC)[0].keys() == ["weight"]

    def test_initial_values(self, ir):
        facts, _ = Linear(500).create_graph(popxl.TensorSpec((1, 300), popxl.float32))
        weight, bias = facts.weight.next_data(), facts.bias.next_data()
        assert np.abs(weight).max() <= 0.04 and abs(weight.mean()) < 2e-4
        assert weight.std() == pytest.approx(0.02 * 0.87963, rel=1e-2)  # that of a normal distribution cut at 2
        assert not bias.any()

    def test_numpys_seed_fixes_the_initial_values(self, ir):
        def weight():
            np.random.seed(5)
            return Linear(3).create_graph(SPEC)[0].weight.next_data()

        np.testing.assert_array_equal(weight(), weight())

    def test_a_grouping_gives_each_group_its_own_values(self):
        ir = popxl.Ir(replication=4)
        group = ir.replica_grouping(group_size=2)
        with ir.main_graph:
            variables = Linear(3, replica_grouping=group).create_graph(SPEC)[0].init()
        assert variables.weight.shape_on_host == (2, 4, 3) and variables.bias.shape_on_host == (2, 3)

    def test_a_grouping_where_a_flag_is_expected(self, ir):
        assert Linear(3, ir.replica_grouping()).create_graph(SPEC)[0].keys() == ["weight", "bias"]

    def test_a_scalar_has_no_features(self, ir):
        with pytest.raises(ValueError, match="Linear: `x` is a scalar; expected a tensor of shape"):
            Linear(3).create_graph(popxl.TensorSpec((), popxl.float32))

    def test_mapping_errors(self, ir, torch):
        variables = Linear(3).create_graph(SPEC)[0].init()
        with pytest.raises(ValueError, match=r"the variables have a `bias`, but Linear\(.*\) has none"):
            Linear.torch_mapping(variables, torch.nn.Linear(4, 3, bias=False))
        with pytest.raises(ValueError, match="of float16, expected float32"):
            Linear.torch_mapping(variables, torch.nn.Linear(4, 3), popxl.float16)
        with pytest.raises(ValueError, match=r"shape \(5, 3\), expected \(4, 3\)"):
            Linear.torch_mapping(variables, torch.nn.Linear(5, 3))


class TestLayerNorm:
    def test_against_torch(self, torch):
        compare(LayerNorm(), torch.nn.LayerNorm(4), normal(5, 4))
        compare(LayerNorm(), torch.nn.LayerNorm(4), normal(2, 5, 4))

    def test_several_axes_are_flattened(self, torch):
        torch_layer = torch.nn.LayerNorm((2, 3))
        with torch.no_grad():
            torch_layer.weight.copy_(torch.tensor(normal(2, 3)))
        x = normal(5, 6)
        (y,) = run_module(LayerNorm(), TensorInput(x), weights=partial(LayerNorm.torch_mapping, nn_layer=torch_layer))
        expected = torch_layer(torch.tensor(x.reshape(5, 2, 3))).detach().numpy()
        np.testing.assert_allclose(y.reshape(5, 2, 3), expected, atol=1e-5)

    def test_eps(self, torch):
        x = normal(5, 4)
        (y,) = run_module(LayerNorm(), TensorInput(x), 0.5)
        expected = torch.nn.functional.layer_norm(torch.tensor(x), (4,), eps=0.5).numpy()
        np.testing.assert_allclose(y, expected, atol=1e-5)

    def test_initial_values_and_errors(self, ir, torch):
        facts, graph = LayerNorm().create_graph(SPEC)
        assert (facts.weight.next_data() == 1).all() and (facts.bias.next_data() == 0).all()
        assert [op.op_type for op in graph.graph.ops] == ["GroupNormalization"]
        with pytest.raises(ValueError, match="`x` is a scalar"):
            LayerNorm().create_graph(popxl.TensorSpec((), popxl.float32))
        with pytest.raises(ValueError, match="the variables have a `weight`"):
            LayerNorm.torch_mapping(facts.init(), torch.nn.LayerNorm(4, elementwise_affine=False))


class TestGroupNorm:
    @pytest.mark.parametrize("shape", [(5, 6), (5, 6, 4), (2, 6, 4, 3)])
    def test_against_torch(self, shape, torch):
        compare(GroupNorm(3), torch.nn.GroupNorm(3, 6), normal(*shape))

    def test_eps_grouping_and_cache(self):
        ir = popxl.Ir(replication=2)
        layer = GroupNorm(2, ir.replica_grouping(group_size=1), 0.1, cache=True)
        spec = popxl.TensorSpec((5, 4, 3), popxl.float32)
        with ir.main_graph:
            facts, graph = layer.create_graph(spec)
            assert layer.create_graph(spec)[1].graph is graph.graph
        assert facts.weight.replica_grouping.num_groups == 2
        assert graph.graph.ops[0].attributes["eps"] == 0.1

    def test_rank(self, ir):
        with pytest.raises(ValueError, match=r"GroupNorm: `x` has the shape \(4,\); expected \(N, C, \.\.\.\)"):
            GroupNorm(2).create_graph(popxl.TensorSpec((4,), popxl.float32))


class TestEmbedding:
    def test_against_torch(self, ir, evaluate, torch):
        indices = np.array([[1, 7, 1], [15, 0, 3]], np.int32)
        table, dy = normal(16, 4), normal(2, 3, 4)
        torch_table = torch.tensor(table, requires_grad=True)
        torch_y = torch.nn.functional.embedding(torch.tensor(indices.astype(np.int64)), torch_table)
        torch_y.backward(torch.tensor(dy))

        facts, graph = Embedding(popxl.float32, 16, 4).create_graph(popxl.constant(indices))
        grad = graph.autodiff(grads_required=[graph.args.weight])
        variables = addons.NamedTensors(weight=popxl.variable(table))
        info = graph.bind(variables).call_with_info(popxl.constant(indices))
        (dw,) = grad.call(popxl.constant(dy), args=grad.grad_graph_info.inputs_dict(info))
        y, dw = evaluate(info.outputs[0], dw)
        np.testing.assert_array_equal(y, torch_y.detach().numpy())
        np.testing.assert_allclose(dw, torch_table.grad.numpy(), rtol=1e-6)
        assert facts.weight.shape == (16, 4)

    def test_sizes(self):
        assert MULTISLICE_MAGIC_NUMBER == 16
        assert Embedding.get_vocab_shard_size(100, 1) == 112
        assert Embedding.get_vocab_shard_size(100, 4) == 32
        assert Embedding.get_vocab_shard_size(128, 4) == 32
        assert list(Embedding.get_offsets(100, 4)) == [0, 32, 64, 96]
        assert all(hasattr(offset, "shape") for offset in Embedding.get_offsets(100, 4))  # as `VariableFactory` needs

    def test_a_table_in_shards(self):
        """The sum over the shards is the embedding, with the shards' offsets as a variable of the program."""
        ir = popxl.Ir(replication=4)
        shards = ir.replica_grouping(group_size=1)
        indices = np.array([[1, 50, 99], [31, 32, 64]], np.int32)
        layer = Embedding(popxl.float32, 100, 3, replica_grouping=shards)
        assert (layer.n_shards, layer.vocab_shard_size, list(layer.offsets)) == (4, 32, [0, 32, 64, 96])
        with ir.main_graph:
            offset = addons.VariableFactory(iter(layer.offsets), popxl.int32, "offset", replica_grouping=shards)
            local = popxl.constant(indices) - offset.create_tensor()
            facts, graph = layer.create_graph(local)
            variables = facts.init()
            (part,) = graph.bind(variables).call(local)
            whole = ops.collectives.replicated_all_reduce(part)
            out = addons.host_store(whole)
        with popxl.Session(ir, "ipu_model") as session:
            y = session.run()[out]
        table = session.get_tensor_data(variables.weight).reshape(128, 3)
        for replica in range(4):
            np.testing.assert_array_equal(y[replica], table[indices])


class TestConv2D:
    @pytest.mark.thorough(but_each=3)
    @pytest.mark.parametrize(
        "kwargs, torch_kwargs",
        [
            (dict(), dict()),
            (dict(kernel_size=3), dict(kernel_size=3)),
            (dict(strides=(2, 1)), dict(stride=(2, 1))),
            (dict(paddings=(1, 2, 1, 2)), dict(padding=(1, 2))),
            (dict(paddings="same_upper", kernel_size=(3, 5)), dict(padding="same", kernel_size=(3, 5))),
            (dict(paddings="valid"), dict(padding="valid")),
            (dict(dilations=(2, 1)), dict(dilation=(2, 1))),
            (dict(strides=2, dilations=3, kernel_size=2), dict(stride=2, dilation=3, kernel_size=2)),
            (dict(strides=np.int64(2), kernel_size=np.int64(2)), dict(stride=2, kernel_size=2)),
            (dict(groups=2), dict(groups=2)),
            (dict(bias=False), dict(bias=False)),
        ],
        ids=str,
    )
    def test_against_torch(self, kwargs, torch_kwargs, torch):
        size = dict(kernel_size=(3, 2))
        compare(Conv2D(6, **size | kwargs), torch.nn.Conv2d(4, 6, **size | torch_kwargs), normal(2, 4, 7, 8))

    def test_variables_and_errors(self, ir):
        images = popxl.TensorSpec((2, 4, 7, 8), popxl.float16)
        layer = Conv2D(6, 3, groups=2, available_memory_proportions=(0.1,), partials_types=("half",))
        facts, graph = layer.create_graph(images)
        assert facts.weight.shape == (6, 2, 3, 3) and facts.bias.shape == (1, 6, 1, 1)
        assert layer.bias is True
        assert [op.op_type for op in graph.graph.ops] == ["Conv", "Add"]
        with pytest.raises(AssertionError, match=r"Conv2D: `x` has the shape \(5, 4\); expected images"):
            Conv2D(6, 3).create_graph(SPEC)
        with pytest.raises(TypeError, match="Conv2D: `strides` must be an integer or a sequence of integers"):
            Conv2D(6, 3, 1.5)


@pytest.mark.parametrize("layer", [LayerNorm(), RMSNorm(), GroupNorm(1), Conv2D(4, 3)], ids=lambda m: type(m).__name__)
def test_layers_refuse_arrays(ir, layer):
    expected = rf"(?s){type(layer).__name__}: `x` must be a Tensor, .*popxl\.constant.* \(ndarray\)"
    with ir.main_graph, pytest.raises(TypeError, match=expected):
        layer(np.ones((1, 2, 5, 5), np.float32))


class TestLinearFP8:
    METRICS = [dict(scale_metric="amax"), dict(scale_metric="mse"), dict(scale_metric="manual_scale", scale=4)]

    @pytest.mark.thorough(but_each=5)
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("metric", METRICS, ids=str)
    @pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
    def test_against_torch(self, shape, metric, bias, torch):
        x = np.random.uniform(-0.5, 0.5, shape).astype(np.float32)
        compare(LinearFP8(3, bias, **metric), torch.nn.Linear(4, 3, bias=bias), x, atol=0.25)

    @pytest.mark.thorough(but_each=5)
    @pytest.mark.parametrize("metric", METRICS, ids=str)
    @pytest.mark.parametrize("dtype", [np.float16, np.float32])
    def test_against_the_formula(self, metric, dtype):
        """With casts made on the host."""
        x, weight, dy = normal(5, 4, dtype=dtype), normal(4, 3, dtype=dtype), normal(5, 3, dtype=dtype)

        def in_float8(t, format_, less=0):
            if metric["scale_metric"] == "manual_scale":
                scale = metric["scale"]
            elif metric["scale_metric"] == "mse":
                scale = popxl.fp8_utils.host_fp8_mse_scale(t, format_)[1]
            else:
                scale = int(np.floor(np.log2({"3": 240, "2": 57344}[format_.name[-1]] / np.abs(t).max())))
            small = popxl.fp8_utils.host_pow2scale_cast_to_fp8(t, format_, scale - less)
            return popxl.fp8_utils.host_pow2scale_cast_from_fp8(small, popxl.float64, less - scale)

        x8, weight8 = in_float8(x, popxl.float8_143), in_float8(weight, popxl.float8_143)
        dy8 = in_float8(dy, popxl.float8_152, 3)
        expected = x8 @ weight8, dy8 @ weight8.T, x8.T @ dy8
        layer = LinearFP8(3, bias=False, **metric)
        found = run_module(
            Differentiated(layer), TensorInput(x), TensorInput(dy), weights=lambda v: {v.layer.weight: weight}
        )
        for array, reference in zip(found, expected, strict=True):
            assert array.dtype == dtype
            np.testing.assert_allclose(array, reference, rtol=2e-3 if dtype == np.float16 else 1e-5, atol=1e-6)

    @pytest.mark.thorough(but_each=3)
    @pytest.mark.parametrize("metric", ["amax", "mse"])
    @pytest.mark.parametrize("size", [0, 1e-9])
    def test_zeros_and_small_gradients(self, metric, size):
        """Their scales are so large that a product's is out of the range of one scale."""
        layer, dy = LinearFP8(3, scale_metric=metric), np.full((5, 3), size, np.float32)
        _, dx, dw, db = run_module(Differentiated(layer), TensorInput(normal(5, 4)), TensorInput(dy))
        assert np.isfinite(dx).all() and np.isfinite(dw).all()
        np.testing.assert_allclose(db, dy.sum(0), rtol=1e-5)
        assert dw.any() == dx.any() == bool(size)

    def test_it_is_outlined_with_its_gradient(self, ir, evaluate):
        class Two(addons.Module):
            def build(self, x):
                (y,) = self.call_module(LinearFP8(3), name="first")(x)
                (z,) = self.call_module(LinearFP8(2), name="second")(y)
                return z

        data = normal(5, 4)
        facts, graph = Two().create_graph(SPEC)
        variables = facts.init()
        z = graph.graph.outputs[0]
        grad = graph.autodiff(grads_provided=[z], grads_required=graph.graph.inputs[:1])
        info = graph.bind(variables).call_with_info(popxl.constant(data))
        (dx,) = grad.call(popxl.constant(np.ones((5, 2), np.float32)), args=grad.grad_graph_info.inputs_dict(info))
        dx, first, second = evaluate(dx, variables.first.weight, variables.second.weight)
        np.testing.assert_allclose(dx, np.ones((5, 2)) @ second.T @ first.T, rtol=0.2, atol=1e-3)
        with pytest.raises(addons.errors.GradientError, match="`build_grad` has been implemented"):
            ir.create_graph(LinearFP8(2), SPEC)

    def test_errors(self):
        with pytest.raises(ValueError, match=r"`scale_metric` is 'max'; expected one of \('amax', 'mse', 'manual"):
            LinearFP8(3, scale_metric="max")
        with pytest.raises(ValueError, match="`scale` is 40; expected a power of two from -31 to 31"):
            LinearFP8(3, scale_metric="manual_scale", scale=40)


class TestLinearGQ:
    @pytest.mark.thorough(but_each=5)
    @pytest.mark.parametrize("dim", [-1, 0, 1])
    @pytest.mark.parametrize("dtype", [np.float16, np.float32])
    @pytest.mark.parametrize("bias", [True, False])
    def test_against_torch(self, dim, dtype, bias, torch):
        compare(
            LinearGQ(12, bias=bias, group_size=4, dim=dim),
            torch.nn.Linear(8, 12, bias=bias),
            np.random.uniform(-0.1, 0.1, (5, 8)).astype(dtype),
            atol=1.0,  # of sums of 12 products with weights that are up to 0.1 off
            required=["x", "bias"] if bias else ["x"],
            group_size=4,
            dim=dim,
        )

    @pytest.mark.parametrize("dim", [-1, 0])
    def test_against_the_decompressed_weight(self, dim, torch):
        torch_layer, x = torch.nn.Linear(8, 12, bias=False), normal(5, 8)
        layer = LinearGQ(12, bias=False, group_size=4, dim=dim)
        weights = partial(layer.torch_mapping, nn_layer=torch_layer, group_size=4, dim=dim)
        (y,) = run_module(layer, TensorInput(x), weights=weights)
        packed = group_quantize_compress_numpy(torch_layer.weight.detach().numpy().T, 4, dim)
        rounded = group_quantize_decompress_numpy(*packed, dim).astype(
            np.float32
        )  # which the layer does not, in float32
        np.testing.assert_allclose(y, x @ rounded, atol=2e-3)
        np.testing.assert_allclose(y, x @ torch_layer.weight.detach().numpy().T, atol=0.1)

    @pytest.mark.parametrize("dim, rows, length", [(-1, 8, 12), (1, 8, 12), (0, 12, 8)])
    def test_variables(self, ir, dim, rows, length):
        facts, _ = LinearGQ(12, group_size=4, dim=dim).create_graph(popxl.TensorSpec((5, 8), popxl.float16))
        names = ["weight_compressed", "weight_decompression_scale", "weight_decompression_bias", "bias"]
        assert facts.keys() == names
        assert facts.weight_compressed.shape == (rows, length // 4, 1)
        assert facts.weight_compressed.dtype is popxl.uint16
        for name in names[1:3]:
            assert facts[name].shape == (rows, length // 4, 1) and facts[name].dtype is popxl.float16
        assert not any(factory.next_data().any() for factory in facts.values())

    def test_errors(self, ir):
        for group_size in (0, -4, 6):
            with pytest.raises(ValueError, match="`group_size` is .*; expected a positive multiple of 4"):
                LinearGQ(12, group_size=group_size)
        with pytest.raises(ValueError, match="`dim` is 2; expected an axis of the weight"):
            LinearGQ(12, group_size=4, dim=2)
        with pytest.raises(ValueError, match=r"`group_size` is 8; expected a divisor of 12, the size of axis -1"):
            LinearGQ(12, group_size=8).create_graph(SPEC)


def test_weights_of_no_dtype_of_popxl(ir):
    """Arrays instead of tensors, and arguments in another order."""
    indices = popxl.TensorSpec((2, 3), popxl.int32)
    for layer, x in [(Linear(4), np.zeros((2, 3))), (Embedding(16, 4, popxl.float32), indices)]:
        with pytest.raises(TypeError, match=f"^{type(layer).__name__}: the dtype of the weights must be a popxl dtype"):
            layer.create_graph(x)


def test_weights_are_no_integers(ir):
    """Random numbers around 0 would all be zeros."""
    indices, image = popxl.TensorSpec((2, 3), popxl.int32), popxl.TensorSpec((1, 2, 4, 4), popxl.int32)
    for layer, spec in [(Linear(4), indices), (Conv2D(3, 2), image), (Embedding(popxl.int32, 16, 4), indices)]:
        with pytest.raises(ValueError, match=f"^{type(layer).__name__}: the weights would be of int32"):
            layer.create_graph(spec)
