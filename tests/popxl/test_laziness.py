"""Building never computes: programs are imported, written, differentiated and printed before any device is started."""

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BUILD = """
    import numpy as np
    import popxl
    from popxl import ops

    def model(x, w):
        return ops.sum(ops.gelu(x @ w) * ops.softmax(x @ w, axis=1))

    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((2, 3), popxl.float32))
        w = popxl.variable(np.ones((3, 4)), popxl.float32)
        graph = ir.create_graph(model, x, w)
        info = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        site = ops.call_with_info(graph, x, w)
        (dw,) = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
        ops.var_updates.accumulate_(w, dw, -0.1)
        ops.repeat(ir.create_graph(lambda w: ops.exp(w), w), 3, w)
        popxl.OpKind("Softplus", jax.nn.softplus)(w)
"""

EVERY_OP = """
    import popxl
    from popxl.transforms import autodiff
    from tests.popxl.ops.rows import ROWS
    from tests.popxl.ops.test_rows import flat, nested, tensors_for

    for row in ROWS:
        for sample in row.samples[:1]:
            ir = popxl.Ir()
            with ir.main_graph:
                tensors = [t for t in flat(tensors_for(sample.operands)) if isinstance(t, popxl.Tensor)]
                if row.name in ("host_load", "init"):
                    row.op(*tensors_for(sample.operands), **sample.attributes)
                    continue
                graph = ir.create_graph(lambda *ts: nested(row.build or row.op, sample, ts), *tensors)
                if row.differentiable:
                    autodiff(graph, grads_required=[graph.inputs[i] for i in row.differentiable if i < len(tensors)])
"""

OPTAX = """
    import optax
    from popxl_addons import optimizers

    with popxl.Ir().main_graph:
        v, g = popxl.variable(np.ones(3), popxl.float32, "v"), popxl.constant(np.ones(3), popxl.float32)
        optimizers.from_optax(optax.adamw(1e-3))({"v": v}, {"v": g})
"""

STEPS = {
    "import": "import sys, popxl\nassert not [name for name in sys.modules if name.startswith('popxl.extend')]",
    "import of the addons": "import popxl_addons",
    "build": BUILD,
    "print": "str(ir), ir.main_graph.print_schedule(), repr(info)",
    "every op": EVERY_OP,
    **({"optax": OPTAX} if importlib.util.find_spec("optax") else {}),
}

CHECK = """
assert not xla_bridge.backends_are_initialized(), 'a device was started: {step}'
"""


def test_no_device_is_started():
    """By one step after the other, in one process."""
    program = "import jax\nfrom jax._src import xla_bridge\n"
    for step, text in STEPS.items():
        program += textwrap.dedent(text) + CHECK.format(step=step)
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120, cwd=ROOT)


@pytest.mark.thorough
def test_a_program_that_saves_nothing_needs_no_library_of_files():
    blocked = "import sys\nsys.modules['safetensors'] = None\n"
    program = blocked + "import jax, popxl_addons, popart\n" + textwrap.dedent(BUILD)
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120, cwd=ROOT)
