"""A memory budget in place of a plan: the plan is computed, compiled for the machine, and corrected."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import popxl
from popxl.extend.arguments import check_type
from popxl.extend.memory import (
    BudgetedPlan,
    Compiled,
    MemoryRequest,
    bytes_of,
    compiled_function,
    compiled_program,
    plan_within,
    requesting_memory,
)
from popxl_addons.transforms.activations import MemoryPolicy
from popxl_addons.transforms.memory_plan import MemoryPlan


def plan_memory(
    build: Callable[[MemoryPlan | MemoryPolicy], popxl.Ir | partial[Any]],
    budget: str | int,
    target: str | popxl.Target | None = None,
    told: Callable[[str], object] = lambda line: None,
    compilations: int = 4,
) -> BudgetedPlan:
    """A memory plan with which a program fits into a budget of device memory, and takes least time.

    The plan comes from one integer program over the activations of the graphs that the model calls: sizes, operations
    and bytes are those of the graphs, times those that the published figures of the target give. The program is then
    compiled, and the plan corrected by the memory that the compiler says: four compilations at most, the first with
    everything kept, and a further one for the smallest plan if none of these fits. Nothing is run.

    A program with several models, such as two training steps or stages of a pipeline, gets one plan for all models that
    `build` gives its argument to. Each device has a peak within the budget.

    Args:
        build: builds the program with the memory plan or policy that it is given, as `train_step(memory=…)`,
            `autodiff(memory=…)` and `value_and_grad(memory=…)` take it, and returns its Ir; or a jitted function of JAX
            with its arguments, as `functools.partial(step, *arguments)`: trees of arrays or `jax.ShapeDtypeStruct`. It
            is called once for each compilation.
        budget: memory of a device for the program, including its variables: text such as `"14 GB"`, or bytes.
        target: the machine, which need not be here, such as `"gpu h100"`; by default the devices of this host.
        told: function called with a line after each compilation.
        compilations: most compilations, 2 or more. With more of them the plan uses more of the budget, where the memory
            as compiled does not grow evenly with what is kept.

    Returns:
        The plan, the memory and cost of the compiled program, and those of the program with everything kept. `print`
        shows them as tables.

    Raises:
        TypeError: if `build` returns neither an Ir nor a partial function, if it or `told` is no function, or for a
            budget that is neither text nor an integer.
        ValueError: for a budget without a known unit, or not above zero; for fewer than 2 compilations; if `build`
            plans no memory, or gives its argument to fewer models than before, or to some training steps and not to
            others that state no `memory`.
        PopxlError: if no plan within the budget is found; the message has the smallest, and its largest values.

    Example:
        >>> def program(memory):
        ...     ir = popxl.Ir()
        ...     with ir.main_graph:
        ...         x = popxl.variable(np.ones((64, 64)), popxl.float32, "x")
        ...         model = ir.create_graph(lambda x: popxl.ops.sum(popxl.ops.exp(popxl.ops.tanh(x))), x)
        ...         graph = addons.GraphWithNamedArgs(model)
        ...         grad = addons.autodiff(graph, memory=memory)
        ...         site = graph.call_with_info(x)
        ...         args = grad.grad_graph_info.inputs_dict(site)
        ...         (dx,) = grad.call(popxl.constant(1.0), args=args)
        ...         addons.host_store(dx)
        ...     return ir
        >>> found = addons.plan_memory(program, "1 MB")
        >>> found.peak <= found.budget, found.plan.bytes("recompute")
        (True, 0)
    """
    if not callable(build):
        raise TypeError(f"plan_memory: `build` is {build!r}; expected a function of a memory plan that returns an Ir.")
    if not callable(told):
        raise TypeError(f"plan_memory: `told` is {told!r}; expected a function of a line of text, such as `print`.")
    check_type(compilations, int, "plan_memory: `compilations`", "a whole number")
    size = bytes_of(budget, "plan_memory: `budget`")

    def compiled(request: MemoryRequest) -> Compiled:
        with requesting_memory(*request) as requested:
            program = build(requested.request.memory)
            if isinstance(program, partial):
                machine = popxl.Target(target) if isinstance(target, str) else target
                analysis = popxl.analyze(program.func, *program.args, target=machine, **program.keywords)
                return compiled_function(analysis, machine, requested)
            result = "plan_memory: what `build` returns"
            check_type(program, popxl.Ir, result, "the Ir of the program, or a jitted function with its arguments")
            session = popxl.Session(program, "ipu_hw" if target is None else target)
        return compiled_program(program, session.program, requested)

    return plan_within(compiled, size, told, compilations)


def is_budget(memory: Any) -> TypeGuard[str | int]:
    """Whether `memory` is a budget: bytes, or text that starts with a number."""
    if isinstance(memory, str):
        return memory.strip()[:1] in tuple("0123456789.+-")
    return isinstance(memory, int) and not isinstance(memory, bool)
