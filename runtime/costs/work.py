"""Work of one run of a compiled program: kernels, operations, bytes, and traffic between chips.

Operations and bytes are counted as in XLA's own cost analysis, which is not available for GPUs without the hardware. In
contrast to it, loops count with their number of iterations, and each graph of the program has its own account.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from runtime.costs.hlo import HOST, Computation, Instruction, Module, Shape
from runtime.lowering.scopes import graph_of, source_of

COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)

_NOTHING = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier domain "
    "add-dependency while conditional call async-start".split()
)
"""Instructions that are no kernels: they run nothing, or other instructions."""

_ELEMENTWISE = frozenset(
    "abs add and atan2 cbrt ceil clamp compare convert cosine divide erf exponential exponential-minus-one floor "
    "is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power real remainder "
    "round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic shift-right-logical sign sine "
    "sqrt subtract tan tanh xor".split()
)
"""Instructions that compute each element of their result with one operation."""

_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8", "u8": "int8"}
"""XLA's names of dtypes, and those of the figures. All that begin with "f8" are float8."""

_SLICES = frozenset({"dynamic-slice", "slice", "gather"})

_REARRANGED = frozenset({"bitcast", "broadcast", "copy", "reshape", "reverse", "transpose"})
"""Instructions that rearrange elements: each element of the result is one of the operand."""


class Collective(NamedTuple):
    """Collective between chips.

    Attributes:
        kind: kind of collective: "all-reduce".
        bytes: bytes on one chip: of operands or results, whichever is more.
        group_size: number of chips in a group; 0 for all.
        source: the user's line; "" where it is not known.
        graph: name of the graph.
        runs: number of executions in a run.
        is_repeated: whether it is a repetition, because there was no memory to keep the first result.
        groups: numbers of the chips in each group; empty for all.
    """

    kind: str
    bytes: int
    group_size: int
    source: str
    graph: str
    runs: int
    is_repeated: bool = False
    groups: tuple[tuple[int, ...], ...] = ()


class Product(NamedTuple):
    """Key of matrix products: dtype of the factors, as the figures of chips name it, and requested precision
    ("highest", "high" or "default")."""

    dtype: str
    precision: str


class SizedProduct(NamedTuple):
    """Matrix product of (batch, rows, depth) and (batch, depth, columns).

    Attributes:
        product: dtype and precision.
        flops: operations: fewer than the sizes say for a convolution with padding.
    """

    product: Product
    flops: int
    batch: int
    rows: int
    columns: int
    depth: int


@dataclass
class Work:
    """Work of one chip in one run.

    Attributes:
        kernels: number of kernels that the chip runs one after the other.
        copies: number of kernels that only copy, and of asynchronous copies between memories.
        cycles: XLA's own estimate for TPUs; 0 elsewhere.
        products: operations of matrix products and convolutions.
        elementwise: number of other operations, one for each element that is computed or reduced.
        bytes: read and written, as XLA counts them: in whichever memory.
        memory_bytes: bytes in device memory among these.
        host_bytes: bytes in host memory among these.
        sized: products one by one; only for a single kernel.
    """

    kernels: int = 0
    copies: int = 0
    cycles: int = 0
    products: Counter[Product] = field(default_factory=Counter)
    elementwise: int = 0
    bytes: int = 0
    memory_bytes: int = 0
    host_bytes: int = 0
    sized: list[SizedProduct] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """Total operations, including products."""
        return sum(self.products.values()) + self.elementwise

    def add(self, more: Work, times: int = 1) -> None:
        """Add `more`, multiplied by `times`."""
        for name in ("kernels", "copies", "cycles", "elementwise", "bytes", "memory_bytes", "host_bytes"):
            setattr(self, name, getattr(self, name) + times * getattr(more, name))
        self.products.update({key: times * count for key, count in more.products.items()})


@dataclass
class Account:
    """Work of each graph, keyed by graph name, and collectives between chips."""

    graphs: dict[str, Work] = field(default_factory=lambda: defaultdict(Work))
    collectives: list[Collective] = field(default_factory=list)

    @property
    def total(self) -> Work:
        """The work of all graphs."""
        total = Work()
        for work in self.graphs.values():
            total.add(work)
        return total

    def add(self, more: Account, times: int = 1) -> None:
        """Add `more`, executed `times` times."""
        for name, work in more.graphs.items():
            self.graphs[name].add(work, times)
        self.collectives += (collective._replace(runs=collective.runs * times) for collective in more.collectives)


def account_of(
    module: Module, key: Callable[[Instruction], str] = lambda instruction: graph_of(instruction.scope)
) -> Account:
    """Account of one run of a compiled program.

    Args:
        key: function that returns the key of an instruction's account entry, in place of its graph.
    """
    account = Account()
    for instruction, times in module.entry.runs():
        if is_kernel(instruction):
            graph = key(instruction)
            account.graphs[graph].add(work_of(instruction), times)
            account.collectives += collectives_of(instruction, graph, times)
    return account


def is_kernel(instruction: Instruction) -> bool:
    """Whether an instruction is a kernel, or starts an asynchronous copy. XLA allocates a buffer by a custom call."""
    is_nothing = instruction.opcode in _NOTHING or instruction.target == "AllocateBuffer"
    return not (is_nothing or instruction.opcode.endswith(("-done", "-update")))


def work_of(instruction: Instruction) -> Work:
    """Work of one run of a kernel."""
    is_async_copy = instruction.opcode.endswith("-start") and instruction.kind not in COLLECTIVES
    is_counted = not (is_async_copy or _is_number(instruction))
    work = Work(int(is_counted), int(instruction.kind == "copy"), instruction.cycles)
    _add_operations(instruction, work)
    for memory, count in _traffic(instruction):
        work.bytes += count
        work.memory_bytes += count * (memory == 0)
        work.host_bytes += count * (memory == HOST)
    return work


def collectives_of(instruction: Instruction, graph: str, times: int = 1) -> list[Collective]:
    """Collectives that a kernel carries out, or begins."""
    return [_collective(each, graph, times) for each in _collective_instructions(instruction)]


def _is_number(instruction: Instruction) -> bool:
    """Whether an instruction computes a single scalar outside of fusions: TPUs execute these on their scalar unit."""
    return instruction.kind in _ELEMENTWISE and all(shape.elements == 1 for shape in instruction.results)


# Operations ----------------------------------------------------------------------------------------------------------


def _add_operations(instruction: Instruction, work: Work) -> None:
    """Add an instruction's operations to `work`."""
    kind, result = instruction.kind, instruction.results[0] if instruction.results else Shape("token", ())
    operands = [shapes[0] for shapes in instruction.operand_shapes if shapes]
    if kind == "fusion":
        for computation in instruction.called:
            for each in computation.instructions.values():
                _add_operations(each, work)
    elif product := _sized_product(instruction, operands, result):
        work.products[product.product] += product.flops
        work.sized.append(product)
    elif kind in _ELEMENTWISE:
        work.elementwise += result.elements
    elif kind == "reduce":
        work.elementwise += operands[0].elements * _ops_per_element(instruction)
    elif kind == "reduce-window":
        window = math.prod(_window(instruction, "size") or [1])
        work.elementwise += result.elements * window * _ops_per_element(instruction)
    elif kind == "scatter":
        work.elementwise += operands[-1].elements * _ops_per_element(instruction)


def _sized_product(instruction: Instruction, operands: list[Shape], result: Shape) -> SizedProduct | None:
    """Matrix product of an instruction; `None` if there is none. Convolutions count as products with a matrix of
    windows."""
    target = instruction.target if instruction.kind == "custom-call" else ""
    if instruction.kind == "dot" or ("cublas" in target and operands):
        if instruction.kind == "dot":
            contracting, batched = instruction.sizes("lhs_contracting_dims"), instruction.sizes("lhs_batch_dims")
        else:
            contracting, batched = (_library_dimensions(instruction, name) for name in ("contracting", "batch"))
        dimensions = operands[0].dimensions
        depth, batch = (math.prod(dimensions[d] for d in each) for each in (contracting, batched))
        rows = math.prod(dimensions) // max(1, depth * batch)
        columns = result.elements // max(1, rows * batch)
        flops = 2 * result.elements * depth
    elif instruction.kind == "convolution":
        flops = _convolution_flops(instruction, operands[0], operands[1], result)
        batch, columns = 1, result.dimensions[re.split("[_>-]+", instruction.attribute("dim_labels"))[2].index("f")]
        rows = result.elements // max(1, columns)
        depth = flops // max(1, 2 * result.elements)
    elif "fmha" in target:
        return _library_attention_product(instruction, operands[0])
    elif "conv" in target and len(operands) > 1:
        flops, columns = _library_convolution_flops(instruction, operands, result)
        batch, rows = 1, result.elements // max(1, columns)
        depth = flops // max(1, 2 * result.elements)
    else:
        return None
    return SizedProduct(_product(operands[0], instruction), flops, batch, rows, columns, depth)


def _library_attention_product(instruction: Instruction, queries: Shape) -> SizedProduct | None:
    """Products of cuDNN's attention, as one: of scores and results, or of scores anew and four gradients.

    Its settings have the shape of the scores; `None` without it. Kernels leave out blocks that a causal mask hides.
    """
    scores = re.search(r'"intermediate_tensor_shape":.*?"dimensions": ?\[(.*?)\]', instruction.text)
    if scores is None:
        return None
    batch, heads, rows, columns = map(int, re.findall(r"\d+", scores[1]))
    depth = queries.dimensions[-1]
    is_causal = re.search(r'"mask_type": ?"CAUSAL"', instruction.text)
    pairs = sum(min(i + 1, columns) for i in range(rows)) if is_causal else rows * columns
    products = 5 if instruction.target.endswith("Backward") else 2
    flops = 2 * products * batch * heads * pairs * depth
    return SizedProduct(_product(queries, instruction), flops, batch * heads, rows, columns, depth)


def _library_dimensions(instruction: Instruction, name: str) -> tuple[int, ...]:
    match = re.search(rf'"lhs_{name}_dimensions":\["?([\d",]*)', instruction.text)
    return tuple(map(int, re.findall(r"\d+", match[1]))) if match else ()


def _ops_per_element(instruction: Instruction) -> int:
    """Elementwise operations per element of an instruction: one for a sum."""
    return sum(
        op.kind in _ELEMENTWISE for computation in instruction.called for op in computation.instructions.values()
    )


def _product(factor: Shape, instruction: Instruction) -> Product:
    match = re.search(r'\boperand_precision"?[=:][{\[]([^}\]]*)', instruction.text)  # in the settings of a library, too
    precisions = set(re.findall(r"\w+", match[1].lower())) if match else set()
    precision = next((each for each in ("highest", "high") if each in precisions), "default")
    dtype = "float8" if factor.dtype.startswith("f8") else _DTYPES.get(factor.dtype, factor.dtype)
    return Product(dtype, precision)


def _window(instruction: Instruction, name: str) -> list[int]:
    """Numeric window attribute, such as `size=3x3`."""
    match = re.search(rf"\b{name}=([\d_x\-]+)", instruction.attribute("window"))
    return list(map(int, re.split("[x_]", match[1]))) if match else []


def _convolution_flops(instruction: Instruction, image: Shape, kernel: Shape, result: Shape) -> int:
    """Operation count of a convolution: two per product of actual elements, excluding padding and dilation gaps."""
    of_image, of_kernel, of_result = re.split("[_>-]+", instruction.attribute("dim_labels"))
    sizes = _window(instruction, "size")
    count = len(sizes)
    strides = _window(instruction, "stride") or [1] * count
    pads = _window(instruction, "pad") or [0] * (2 * count)
    image_dilation = _window(instruction, "lhs_dilate") or [1] * count
    kernel_dilation = _window(instruction, "rhs_dilate") or [1] * count
    products = 1
    for d in range(count):
        image_size = image.dimensions[of_image.index(str(d))]
        result_size = result.dimensions[of_result.index(str(d))]
        last = (image_size - 1) * image_dilation[d]
        positions = (
            o * strides[d] + k * kernel_dilation[d] - pads[2 * d]
            for o, k in product(range(result_size), range(sizes[d]))
        )
        products *= sum(0 <= position <= last and position % image_dilation[d] == 0 for position in positions)
    features_in = kernel.dimensions[of_kernel.index("i")]
    features_out = result.dimensions[of_result.index("f")]
    batch = result.dimensions[of_result.index("b")]
    return 2 * products * features_in * features_out * batch


def _library_convolution_flops(instruction: Instruction, operands: list[Shape], result: Shape) -> tuple[int, int]:
    """Operation count of a library's convolution, and the columns of its product."""
    target = instruction.target
    labels = re.split("[_>-]+", instruction.attribute("dim_labels"))
    kernel, larger = operands[1], result
    if "BackwardFilter" in target:
        kernel, larger = result, operands[1]
    elif "BackwardInput" in target:
        larger = operands[0]
    features = kernel.dimensions[labels[1].index("o")]
    return 2 * larger.elements * kernel.elements // features, features


# Bytes ---------------------------------------------------------------------------------------------------------------


def _traffic(instruction: Instruction) -> Iterator[tuple[int, int]]:
    """Memory traffic of an instruction: pairs of memory space number and byte count."""
    operands, results = instruction.operand_shapes, instruction.results
    if instruction.kind == "fusion":
        (fused,) = instruction.called
        needed = _elements_read(fused)
        for number, shapes in enumerate(operands):
            parameter = fused.parameters[number]
            nbytes = sum(shape.bytes for shape in parameter.results)
            yield shapes[0].memory if shapes else 0, nbytes * needed[parameter] // max(1, _elements(parameter))
        result_bytes = _bytes_written(fused.root)
        if instruction.opcode.endswith("-start"):  # its operands and a number stand around the results
            results = results[-1 - len(result_bytes) : -1]
        yield from zip((shape.memory for shape in results), result_bytes, strict=False)
        return
    if instruction.kind in _SLICES:
        slice_shape = results[-2] if instruction.opcode.endswith("-start") else results[0]
        yield operands[0][0].memory, slice_shape.bytes
        yield slice_shape.memory, slice_shape.bytes
        return
    if instruction.kind == "dynamic-update-slice":
        slice_shape = operands[1][0]
        yield slice_shape.memory, slice_shape.bytes
        yield operands[0][0].memory, slice_shape.bytes
        return
    operand_shapes = [shape for shapes in operands for shape in shapes]
    yield from ((shape.memory, shape.bytes) for shape in operand_shapes)
    if instruction.kind == "copy":
        yield results[0].memory, results[0].bytes
    elif instruction.opcode.endswith("-start"):
        yield 0, _exchanged_bytes(instruction)
    else:  # of library calls, other results of bytes are workspaces of any size
        is_of_library = instruction.kind == "custom-call" and re.search("cublas|cudnn", instruction.target)
        for i, shape in enumerate(results):
            if not (i and is_of_library and shape.dtype in ("s8", "u8")):
                yield shape.memory, shape.bytes


def _elements_read(fused: Computation) -> Counter[Instruction]:
    """Elements of each instruction of a fusion that the results need; for sliced values, those of the slice.

    A fusion computes, and reads, no others. An element that several instructions need counts for each of them, up to
    the size of the whole.
    """
    needed_elements = Counter({fused.root: _elements(fused.root)})
    for user in reversed(fused.instructions.values()):
        for position, operand in enumerate(user.operands):
            if operand is not None:
                needed = _elements_needed(user, position, needed_elements[user])
                needed_elements[operand] = min(_elements(operand), needed_elements[operand] + needed)
    return needed_elements


def _elements_needed(user: Instruction, position: int, count: int) -> int:
    """Maximum number of operand elements that an instruction reads for `count` elements of its results."""
    all_elements = sum(shape.elements for shape in user.operand_shapes[position])
    if user.opcode in _SLICES and position == 0 or user.opcode in _ELEMENTWISE or user.opcode in _REARRANGED:
        return min(all_elements, count)
    if user.opcode == "dynamic-update-slice" and position == 0:
        return 0
    if user.opcode == "fusion":
        (nested,) = user.called
        return _elements_read(nested)[nested.parameters[position]]
    return all_elements


def _elements(instruction: Instruction) -> int:
    return sum(shape.elements for shape in instruction.results)


def _bytes_written(root: Instruction) -> list[int]:
    """Bytes written by a fusion, per result; only the updated slice for in-place updates."""
    root = root.source
    if root.opcode == "tuple":
        return [sum(_bytes_written(part)) for part in root.operands if part is not None]
    if root.opcode == "dynamic-update-slice":
        return [root.operand_shapes[1][0].bytes]
    if root.opcode == "fusion":
        return _bytes_written(root.called[0].root)
    return [sum(shape.bytes for shape in root.results)]


# Between chips -------------------------------------------------------------------------------------------------------


def _collective_instructions(instruction: Instruction) -> Iterator[Instruction]:
    """Collectives in an instruction: itself, or instructions nested in its fusion.

    A TPU may split a collective among several fusions, to overlap products. It counts in the first of them.
    """
    if instruction.kind in COLLECTIVES:
        is_split = "chain_id=" in instruction.text
        if not is_split or any(nested.target == "AsyncCollectiveStart" for nested in instruction.users):
            yield instruction
    elif instruction.opcode == "fusion":
        for computation in instruction.called:
            for nested in computation.instructions.values():
                yield from _collective_instructions(nested)


def _exchanged_bytes(instruction: Instruction) -> int:
    """Bytes of a collective: the maximum of operand and result bytes."""
    operands = [shape for shapes in instruction.operand_shapes for shape in shapes]
    operand_bytes = sum(shape.bytes for shape in operands)
    if instruction.kind == "collective-permute":  # the results are as large; on TPUs, contexts follow them
        return operand_bytes
    result_bytes = sum(shape.bytes for shape in instruction.results)
    if instruction.opcode.endswith("-start") and len(instruction.results) > len(operands):
        result_bytes -= operand_bytes  # results include operands: of all-reduce from JAX 0.12 on
    return max(operand_bytes, result_bytes)


def _collective(instruction: Instruction, graph: str, times: int) -> Collective:
    return Collective(
        kind=instruction.kind,
        bytes=_exchanged_bytes(instruction),
        group_size=instruction.group_size,
        source=source_of(instruction.scope) or instruction.line,
        graph=graph,
        runs=times,
        is_repeated=re.search(r"\.remat\d*$", instruction.name) is not None,
        groups=instruction.groups,
    )
