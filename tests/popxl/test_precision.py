"""How exactly float32 numbers are multiplied: the session option `precision`, and what of a program it reaches."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from tests.popxl.elsewhere import layout_for, lowered_text

F32 = popxl.float32


def products(text: str) -> list[str]:
    """How exact each product and convolution is, in order; one level, or those of its operands."""
    lines = (line for line in text.splitlines() if "stablehlo.dot_general" in line or "stablehlo.convolution" in line)
    found = (re.findall(r"\b(HIGHEST|HIGH|DEFAULT)\b", line) for line in lines)
    return ["/".join(dict.fromkeys(levels)) or "DEFAULT" for levels in found]


def multiplying(ir: popxl.Ir) -> None:
    """Ten products: of two ops, forward and backward; of an op of a user; of equations of JAX, also in a loop and in a
    function with its own derivative."""

    @jax.custom_jvp
    def own(x):
        return jnp.dot(x, x)

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0]))

    def plain(x):
        return jax.lax.scan(lambda carry, _: (carry @ x, None), x @ x, None, 3)[0] + own(x)

    with ir.main_graph:
        x = popxl.variable(np.ones((4, 4)), F32)
        image, kernel = popxl.variable(np.ones((1, 2, 5, 5)), F32), popxl.variable(np.ones((3, 2, 2, 2)), F32)
        forward = ir.create_graph(lambda x, image, kernel: (x @ x, ops.conv(image, kernel)), x, image, kernel)
        info = ops.call_with_info(forward, x, image, kernel)
        grad = popxl.transforms.autodiff(forward)
        grads = ops.call(grad.graph, *info.outputs, inputs_dict=grad.inputs_dict(info))
        w = popxl.OpKind("Dot", lambda x: jnp.dot(x, x))(x)
        v = popxl.from_jax(plain)(x)
        for t in (*info.outputs, *grads, w, v):
            ops.host_store(popxl.d2h_stream(t.shape, F32), t)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("level", ["highest", "high", "default"])
def test_every_product_is_as_exact_as_the_option_says(level, platform):
    ir = popxl.Ir()
    assert ir.options.precision == "highest"
    ir.options.precision = level
    multiplying(ir)
    assert products(lowered_text(ir, platform)) == [level.upper()] * 10


def test_jax_itself_is_as_exact_as_it_was(ir):
    """The option is a session's."""
    multiplying(ir)
    lowered_text(ir, "tpu")
    assert jax.config.jax_default_matmul_precision is None
    assert products(jax.jit(jnp.dot).lower(jnp.ones((2, 2)), jnp.ones((2, 2))).as_text()) == ["DEFAULT"]


def test_half_partials_allow_fewer_digits(ir):
    """Of the products that were made while the option said so, or that say so themselves."""
    with ir.main_graph:
        x = popxl.variable(np.ones((4, 4)), F32)
        y = ops.matmul(x, x, partials_type=popxl.float16) @ x
        ir.options.partialsTypeMatMuls = "half"
        y = ops.matmul(y @ x, x, partials_type=F32)
        ops.host_store(popxl.d2h_stream(y.shape, F32), y)
    assert products(lowered_text(ir, "tpu")) == ["DEFAULT", "HIGHEST", "DEFAULT", "HIGHEST"]


def test_a_level_that_jax_has_not_is_refused(ir):
    with pytest.raises(ValueError, match="'highest', 'high' or 'default'"):
        ir.options.precision = "low"


def test_pieces_of_other_levels_are_not_shared(ir):
    """A plan shares what is compiled with other sessions, where that makes no difference."""
    keys = set()
    for level in ("highest", "high"):
        ir.options.precision = level
        keys.add(layout_for(ir, "cpu").compile_options[0].key())
    assert len(keys) == 2


def test_floats_of_8_and_16_bits_are_multiplied_as_they_are(ir):
    """Units for float16 take them, and need not be told of float32. A CPU has none."""
    with ir.main_graph:
        half, image = (
            popxl.variable(np.ones((4, 4)), popxl.float16),
            popxl.variable(np.ones((1, 2, 5, 5)), popxl.float16),
        )
        scale = popxl.constant(0)
        eight, images = (ops.pow2scale_cast_to_fp8(t, scale, popxl.float8_143) for t in (half, image))
        y = half @ half
        z = ops.matmul_pow2scaled(eight, eight, scale)
        for t in (y, z, ops.conv_pow2scaled(images, images, scale)):
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)

    def operands(text: str) -> list[str]:
        return re.findall(r"stablehlo.dot_general.*: \(tensor<4x4x(\w+)>", text)

    for platform in ("tpu", "cuda"):
        text = lowered_text(ir, platform)
        assert operands(text) == ["f16", "f16"]
        written = re.findall(r"dot_general.*-> tensor<4x4x(\w+)>", text)
        assert written == (["f16", "f32"] if platform == "cuda" else ["f32", "f32"])
        assert not re.search(r"f8\w+> .*-> tensor<\w*xf32>", text)
    assert operands(lowered_text(ir, "cpu")) == ["f16", "f32"]
