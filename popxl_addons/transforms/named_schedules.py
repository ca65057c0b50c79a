"""Rows of named pipeline schedules.

Sources: GPipe is from Huang et al. 2019, https://arxiv.org/abs/1811.06965; 1F1B from Narayanan et al. 2019,
https://arxiv.org/abs/1806.03377; interleaved stages from Narayanan et al. 2021, https://arxiv.org/abs/2104.04473; zero
bubble (the form H1) from Qi et al. 2023, https://arxiv.org/abs/2401.10241; zero bubble with V-shaped stages (ZB-V) from
Qi et al. 2024, https://arxiv.org/abs/2405.15362; DualPipeV from https://github.com/deepseek-ai/DualPipe, after the
DualPipe of DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest

from popxl.extend.arguments import integer, integers
from popxl_addons.transforms.list_scheduling import Pipeline, PipelineValue, Rows, Rule, Task, list_schedule


def check(placement: Sequence[int], steps: int) -> None:
    """Check that `placement` names devices of stages, and `steps` a number of micro-batches."""
    if not integers(placement, "PipelineSchedule: `placement`"):
        raise ValueError("PipelineSchedule: `placement` has no stage; expected the device of each, as in (0, 1, 1, 0).")
    integer(steps, "PipelineSchedule: `steps`")


def numbered_devices(placement: Sequence[int]) -> list[int]:
    """Device per stage, numbered by first appearance."""
    numbers = {device: i for i, device in enumerate(dict.fromkeys(placement))}
    return [numbers[device] for device in placement]


def cycles(placement: Sequence[int], steps: int) -> Rows:
    """Each cycle runs every stage once, on consecutive micro-batches."""
    check(placement, steps)
    device_of = numbered_devices(placement)
    rows: Rows = [[] for _ in range(max(device_of) + 1)]
    for cycle in range(len(device_of) + steps - 1):
        for stage, device in enumerate(device_of):
            if 0 <= cycle - stage < steps:
                rows[device].append(Task(stage, cycle - stage))
    return rows


def forward_and_backward(
    name: str, placement: Sequence[int], steps: int, warm_up: Callable[[int, int, int], int | None]
) -> Rows:
    """Per device: warm-up forward tasks, alternating forward and backward, remaining backward tasks.

    `warm_up` gives the number of the first ones, by device, devices and forward stages a device; `None` for all.
    """
    check(placement, steps)
    device_of = numbered_devices(placement)
    trains = len(device_of) > 1 and device_of == device_of[::-1]
    forward = device_of[: (len(device_of) + 1) // 2] if trains else device_of
    devices = max(forward) + 1
    stages_per_device, rest = divmod(len(forward), devices)
    if rest or forward != [*range(devices)] * stages_per_device:
        raise ValueError(
            f"PipelineSchedule: for {name!r} the stages are on the devices {tuple(placement)}, expected devices that "
            "take turns in the forward stages, and for training the same in reverse in the backward stages, such as "
            "(0, 1, 1, 0), (0, 1, 2, 1, 0) or, interleaved, (0, 1, 0, 1, 1, 0, 1, 0)."
        )
    if stages_per_device > 1 and steps % devices:
        raise ValueError(
            f"PipelineSchedule: `steps` is {steps}, expected a multiple of {devices}, the number of devices, as each "
            f"has {stages_per_device} forward stages."
        )
    groups = [range(first, min(first + devices, steps)) for first in range(0, steps, devices)]
    ends = 2 * len(forward) - 1  # forward stage s has the backward stage `ends - s`
    rows = []
    for device in range(devices):
        stages = range(device, len(forward), devices)
        is_ready = [Task(s, m) for group in groups for s in stages for m in group]
        add_backward = (
            [Task(ends - s, m) for group in groups for s in reversed(stages) for m in group] if trains else []
        )
        first = warm_up(device, devices, stages_per_device)
        first = len(is_ready) if first is None else min(first, len(is_ready))
        pairs = chain.from_iterable(zip_longest(is_ready[first:], add_backward))
        rows.append([*is_ready[:first], *(task for task in pairs if task is not None)])
    if trains and len(device_of) % 2:  # the last forward stage does the first backward one's work, too
        middle = len(forward)
        rows = [[Task(s - (s > middle), m) for s, m in row if s != middle] for row in rows]
    return rows


# Gradients of weights as stages of their own --------------------------------------------------------------------------


def training(placement: Sequence[int], steps: int) -> Pipeline:
    """Pipeline of equally long stages, each of which reads its predecessor.

    If the placement is that of a training, each backward stage also reads the activations of a forward stage, of size
    1, and so does each stage with gradients of weights.
    """
    check(placement, steps)
    device_of = numbered_devices(placement)
    count = len(device_of)
    needs = [[s - 1] * (s > 0) for s in range(count)]
    is_palindrome = count % 2 == 0 and device_of == device_of[::-1]
    forward, num_phases = (count // 3, 3) if _is_split(device_of) else (count // 2, 2) if is_palindrome else (0, 0)
    for s in range(forward, count):
        activations = (2 if s < 2 * forward else 3) * forward - 1 - s
        needs[s] = sorted({s - 1 if s < 2 * forward else s - forward, activations})
    values = [
        PipelineValue("activations", s, tuple(n * forward - 1 - s for n in range(2, num_phases + 1)), 1, device_of[s])
        for s in range(forward)
    ]
    return Pipeline(device_of, needs, steps, [1.0] * count, values)


def _is_split(device_of: Sequence[int]) -> bool:
    """Whether stages are forward stages, backward stages in reverse, then weight gradients in backward order."""
    forward, rest = divmod(len(device_of), 3)
    backward = [*reversed(device_of[:forward])]
    return not rest and [*device_of[forward:]] == backward * 2


def _split(
    name: str, placement: Sequence[int], steps: int, forward: Callable[[int], list[int]], example: str
) -> Pipeline:
    """Pipeline with separate stages for weight gradients, and forward stages on the devices `forward`."""
    check(placement, steps)
    device_of = numbered_devices(placement)
    if not _is_split(device_of) or device_of[: len(device_of) // 3] != forward(max(device_of) + 1):
        raise ValueError(
            f"PipelineSchedule: for {name!r} the stages are on the devices {tuple(placement)}, expected {example}."
        )
    return training(placement, steps)


def zero_bubble(placement: Sequence[int], steps: int) -> tuple[Rows, Pipeline]:
    """Rows of zero bubble: forward as far ahead as with 1F1B, else back, else the gradients of weights."""
    pipeline = _split(
        "zero_bubble",
        placement,
        steps,
        lambda devices: [*range(devices)],
        "forward stages on one device each, backward stages in reverse, and stages with the gradients of weights in "
        "the same order as the backward ones, such as (0, 1, 1, 0, 1, 0)",
    )
    rows = list_schedule(pipeline, Rule(forward_first=True, limits_lead=True, under_way=None), pipeline.devices)
    assert rows is not None, "1F1B holds as many activations"
    return rows, pipeline


def dualpipe_v(placement: Sequence[int], steps: int) -> tuple[Rows, Pipeline]:
    """Rows of DualPipeV. A device has two forward stages, "outer" and "inner", and runs one forward while it runs the
    other backward."""
    pipeline = v_shaped("dualpipe_v", placement, steps)
    devices = pipeline.devices
    if steps < 2 * devices:
        raise ValueError(
            f"PipelineSchedule: for 'dualpipe_v' `steps` is {steps}, expected at least {2 * devices}, two for each of "
            f"{devices} devices."
        )
    return [_dualpipe_row(device, devices, steps) for device in range(devices)], pipeline


def _dualpipe_row(device: int, devices: int, steps: int) -> list[Task]:
    """Tasks of one device: filling, alternating forward and backward, draining."""
    row: list[Task] = []
    count: Counter[int] = Counter()
    late: deque[int] = deque()  # stages whose gradients of weights are still to come
    outer, inner = device, 2 * devices - 1 - device  # the forward stages

    def add_task(stage: int) -> None:
        row.append(Task(stage, count[stage]))
        count[stage] += 1

    def back(forward: int, with_weights: bool = True) -> None:
        add_task(4 * devices - 1 - forward)
        if with_weights:
            add_task(6 * devices - 1 - forward)
        else:
            late.append(6 * devices - 1 - forward)

    followers = devices - 1 - device  # the devices that follow
    for _ in range(2 * followers):
        add_task(outer)
    for _ in range(device + 1):
        add_task(outer)
        add_task(inner)
    for _ in range(followers):
        back(inner)
        add_task(inner)
    for _ in range(steps - 2 * devices + device + 1):
        add_task(outer)
        back(inner)
        add_task(inner)
        back(outer)
    for _ in range(followers):
        back(inner)
        add_task(inner)
        back(outer)
    for i in range(2 * (device + 1)):  # in the second half, gradients of weights wait
        back(outer if i % 2 else inner, with_weights=i <= device)
    for _ in range(followers):
        add_task(late.popleft())
        back(outer, with_weights=False)
    for stage in late:
        add_task(stage)
    return row


def v_shaped(name: str, placement: Sequence[int], steps: int) -> Pipeline:
    """V-shaped pipeline: two forward stages per device, and separate stages for weight gradients."""
    return _split(
        name,
        placement,
        steps,
        lambda devices: [*range(devices), *reversed(range(devices))],
        "two forward stages on each device, in a V, backward stages in reverse, and stages with the gradients of "
        "weights in the same order as the backward ones, such as (0, 1, 1, 0) three times",
    )
