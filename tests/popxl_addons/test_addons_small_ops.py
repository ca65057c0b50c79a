"""The sum of squares of gradients, sparse products and layouts, against NumPy and SciPy."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl.errors import PopxlError
from popxl_addons.ops.grad_reduce_square_add import grad_reduce_square_add
from popxl_addons.ops.linear_layout import linear_layout
from popxl_addons.ops.static_sparse_ops import dense_const_sparse_matmul, random_sparse
from tests.tolerances import assert_near


def gradient_of(ir, fn, x, dy):
    """Of the graph of `fn`, called on the tensor `x`."""
    graph = addons.GraphWithNamedArgs(ir.create_graph(fn, x))
    grad = addons.autodiff(graph)
    info = graph.call_with_info(x)
    return grad.call(popxl.constant(dy), args=grad.grad_graph_info.inputs_dict(info))[0]


class TestGradReduceSquareAdd:
    @pytest.mark.parametrize("scaling", [64, 64.0, np.float32(64), "tensor", "vector"])
    def test_numbers(self, ir, evaluate, scaling):
        if isinstance(scaling, str):
            scaling = popxl.constant(64.0 if scaling == "tensor" else [64.0])
        y = grad_reduce_square_add(popxl.constant(np.arange(6, dtype=np.float32).reshape(2, 3)), scaling)
        assert (y.dtype, y.shape) == (popxl.float32, ())
        np.testing.assert_allclose(evaluate(y)[0], 0.0134277, rtol=1e-5)

    def test_float16_is_squared_in_float32(self, ir, evaluate):
        data = np.full((3, 5), 300, np.float16)  # the square of which is beyond float16
        np.testing.assert_allclose(evaluate(grad_reduce_square_add(popxl.constant(data), 2))[0], 15 * 300**2 / 4)

    def test_one_op(self, ir):
        graph = ir.create_graph(grad_reduce_square_add, popxl.TensorSpec((2, 3), popxl.float16), 8)
        assert [op.op_type for op in graph.ops] == ["GradReduceSquareAdd"]

    def test_errors(self, ir):
        x = popxl.constant([1.0, 2.0])
        with pytest.raises(TypeError, match=r"grad_reduce_square_add: `loss_scaling` must be a number or a Tensor"):
            grad_reduce_square_add(x, "64")
        with pytest.raises(PopxlError, match="a number or a tensor of one element"):
            grad_reduce_square_add(x, x)
        graph = ir.create_graph(grad_reduce_square_add, x, 1)
        with pytest.raises(PopxlError, match="GradReduceSquareAdd"):
            popxl.transforms.autodiff(graph)


class TestSparse:
    @pytest.mark.parametrize("dtype, shape", [(np.float16, (2, 3)), (np.float32, (1, 2, 3)), (np.float32, (5, 3))])
    def test_numbers(self, ir, evaluate, dtype, shape):
        sparse = pytest.importorskip("scipy.sparse")
        lhs = np.random.normal(size=shape).astype(dtype)
        rhs = random_sparse(np.random.normal(size=(3, 4)).astype(dtype))
        y = dense_const_sparse_matmul(popxl.constant(lhs), sparse.csr_matrix(rhs.astype(np.float32)), 4)
        assert y.shape == (*shape[:-1], 4) and y.dtype == popxl.dtype.as_dtype(dtype)
        tolerance = 1e-3 if dtype == np.float16 else 1e-6
        expected = lhs.astype(np.float64) @ rhs.astype(np.float64)
        np.testing.assert_allclose(evaluate(y)[0], expected, rtol=tolerance, atol=tolerance)

    def test_columns_that_scipy_did_not_infer(self, ir, evaluate):
        sparse = pytest.importorskip("scipy.sparse")
        rhs = sparse.csr_matrix((np.float32([4, 5]), [1, 0], [0, 1, 2]))  # 2 × 2
        y = dense_const_sparse_matmul(popxl.constant([[1.0, 2.0]]), rhs, 3)
        np.testing.assert_array_equal(evaluate(y)[0], [[10, 4, 0]])

    def test_gradient(self, ir, evaluate):
        sparse = pytest.importorskip("scipy.sparse")
        rhs = random_sparse(np.random.normal(size=(3, 4)).astype(np.float32))
        dy = np.random.normal(size=(2, 4)).astype(np.float32)
        x = popxl.variable(np.ones((2, 3), np.float32))
        dx = gradient_of(ir, lambda x: dense_const_sparse_matmul(x, sparse.csr_matrix(rhs), 4), x, dy)
        assert_near(evaluate(dx)[0], dy @ rhs.T, 1e-5)

    def test_schedule(self, ir):
        sparse = pytest.importorskip("scipy.sparse")
        spec = popxl.TensorSpec((2, 3), popxl.float32)
        graph = ir.create_graph(dense_const_sparse_matmul, spec, sparse.csr_matrix(np.eye(3)), 3)
        assert [op.op_type for op in graph.ops] == ["SparseMatmul"]

    def test_errors(self, ir):
        sparse = pytest.importorskip("scipy.sparse")
        rhs = sparse.csr_matrix(np.eye(3, 4))
        x = popxl.constant(np.ones((2, 3), np.float32))
        with pytest.raises(RuntimeError, match="`lhs` is of int32; expected float16, bfloat16 or float32"):
            dense_const_sparse_matmul(popxl.constant([[1, 2, 3]], popxl.int32), rhs, 4)
        with pytest.raises(TypeError, match="`rhs` is a ndarray; expected a sparse matrix"):
            dense_const_sparse_matmul(x, np.eye(3, 4), 4)
        for shape in [(3,), (3, 2), (2, 1, 3)]:
            with pytest.raises(ValueError, match=r"expected \(m, 3\) or \(1, m, 3\) for `lhs`"):
                dense_const_sparse_matmul(popxl.constant(np.ones(shape, np.float32)), rhs, 4)
        with pytest.raises(ValueError, match="`output_cols` is 3; expected 4"):
            dense_const_sparse_matmul(x, rhs, 3)

    def test_random_sparse(self):
        dense = np.ones((40, 50))
        kept = random_sparse(dense, 0.25)
        assert kept is dense
        assert 0.2 < np.count_nonzero(kept) / kept.size < 0.3
        assert np.count_nonzero(random_sparse(np.ones((4, 5)), 0)) == 1
        assert np.count_nonzero(random_sparse(np.ones((4, 5)), 1)) == 20
        assert random_sparse(np.ones((0, 3))).size == 0
        with pytest.raises(ValueError, match="`density` is 1.5; expected a probability"):
            random_sparse(np.ones(3), 1.5)

    def test_random_sparse_draws_from_the_global_generator(self):
        np.random.seed(3)
        first = random_sparse(np.ones((4, 5)))
        np.random.seed(3)
        np.testing.assert_array_equal(random_sparse(np.ones((4, 5))), first)


class TestLinearLayout:
    def test_it_is_the_identity(self, ir, evaluate):
        data = np.random.normal(size=(3, 4)).astype(np.float16)
        y = linear_layout(popxl.constant(data), bs=2)
        assert (y.shape, y.dtype) == ((3, 4), popxl.float16)
        np.testing.assert_array_equal(evaluate(y)[0], data)

    def test_gradient(self, ir, evaluate):
        dy = np.float32([3, 4])
        dx = gradient_of(ir, linear_layout, popxl.variable([1.0, 2.0]), dy)
        np.testing.assert_array_equal(evaluate(dx)[0], dy)

    def test_schedule_and_errors(self, ir):
        graph = ir.create_graph(linear_layout, popxl.TensorSpec((2,), popxl.int32))
        assert [op.op_type for op in graph.ops] == ["LinearLayout"]
        with pytest.raises(ValueError, match="`bs` is 0; expected the number of elements"):
            linear_layout(popxl.constant(1.0), 0)
        with pytest.raises(TypeError, match="`bs` must be an integer"):
            linear_layout(popxl.constant(1.0), 1.5)


def test_each_package_has_a_module_of_its_name():
    from popxl_addons.ops.fp8_mse_scale.fp8_mse_scale import fp8_mse_scale
    from popxl_addons.ops.grad_reduce_square_add.grad_reduce_square_add import grad_reduce_square_add as inner
    from popxl_addons.ops.group_quantize_decompress.group_quantize_decompress import group_quantize_decompress
    from popxl_addons.ops.linear_layout.linear_layout import linear_layout as inner_layout
    from popxl_addons.ops.static_sparse_ops.dense_sparse_matmul import random_sparse as inner_sparse

    assert inner is grad_reduce_square_add and inner_layout is linear_layout and inner_sparse is random_sparse
    assert addons.ops.fp8_mse_scale.fp8_mse_scale is fp8_mse_scale
    assert addons.ops.group_quantize_decompress.group_quantize_decompress is group_quantize_decompress
