"""Collections of streams, and streams made in passing."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl_addons.streams import StreamType


@pytest.fixture
def ins(ir):
    return addons.InputStreams(x=((4, 2), popxl.float32), label=((4,), popxl.int32))


def test_access(ins):
    assert isinstance(ins.x, popxl.HostToDeviceStream)
    assert (ins.x.shape, ins.label.dtype, ins.x.tensor_id) == ((4, 2), popxl.int32, "x")
    assert ins.x is ins["x"] is ins[0] is ins[-2]
    assert ins[:1] == [ins.x] and ins[0:2] == [ins.x, ins.label]
    assert len(ins) == 2 and "x" in ins and "y" not in ins
    assert list(ins) == list(ins.values()) == [ins.x, ins.label]
    assert list(ins.keys()) == ["x", "label"]
    assert list(ins.items()) == [("x", ins.x), ("label", ins.label)]
    assert dict(zip(ins, [1, 2], strict=True)) == {ins.x: 1, ins.label: 2}


def test_how_streams_are_made(ins):
    made = [streams.stream_init((3,), popxl.float16, "s") for streams in (type(ins), addons.OutputStreams)]
    assert [type(stream) for stream in made] == list(StreamType.__constraints__)
    assert all((stream.shape, stream.dtype) == ((3,), popxl.float16) for stream in made)


def test_numbers_of_transfers(ir):
    ir.num_host_transfers = 4
    with ir.main_graph:
        ins = addons.InputStreams(x=((3,), popxl.float32), rate=((), popxl.float32, 1))
        _, stream, x = addons.host_load(np.ones(3), popxl.float32, "y", num_host_transfers=2)
        out = addons.host_store(x, num_host_transfers=2)
    assert [s.num_host_transfers for s in (*ins, stream, out)] == [4, 1, 2, 2]


def test_missing_streams(ins):
    with pytest.raises(AttributeError, match=r"no stream 'y'; it has \['x', 'label'\]"):
        _ = ins.y
    with pytest.raises(KeyError, match="no stream 'y'"):
        ins["y"]
    with pytest.raises(IndexError):
        ins[2]


def test_adding_and_collecting(ins):
    ins["new"] = stream = popxl.h2d_stream((), popxl.float32, "other")
    assert ins.new is stream and ins[2] is stream
    collected = addons.InputStreams.from_streams([ins.label, stream])
    assert list(collected.keys()) == ["label", "other"] and collected.other is stream


@pytest.mark.parametrize("spec", [(2,), (2, 3, 4, 5), popxl.float32])
def test_what_describes_no_stream(ir, spec):
    with pytest.raises(TypeError, match=r"InputStreams: `x` is .*; expected `\(shape, dtype\)`"):
        addons.InputStreams(x=spec)


def test_output_streams(ir):
    outs = addons.OutputStreams(loss=((), popxl.float32))
    assert isinstance(outs.loss, popxl.DeviceToHostStream) and outs[0] is outs["loss"]
    assert repr(outs).startswith("OutputStreams([")


def test_they_need_a_graph():
    with pytest.raises(RuntimeError):
        addons.InputStreams(x=((2,), popxl.float32))


def test_a_program_fed_by_name(ins):
    x, label = (popxl.ops.host_load(stream) for stream in ins)
    outs = addons.OutputStreams(y=((4, 2), popxl.float32), z=((4,), popxl.int32))
    popxl.ops.host_store(outs.y, x * 2.0)
    popxl.ops.host_store(outs.z, label + 1)
    arrays = [np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(4, dtype=np.int32)]
    with popxl.Session(x.ir, "cpu") as session:
        results = session.run(dict(zip(ins, arrays, strict=True)))
    np.testing.assert_array_equal(results[outs.y], 2 * arrays[0])
    np.testing.assert_array_equal(results[outs.z], arrays[1] + 1)


def test_host_load_and_store(ir):
    sample = np.random.rand(3, 2)
    x_host, x_stream, x = addons.host_load(sample, popxl.float32, "x")
    assert x_host.dtype == np.float32 and x_host.shape == (3, 2)
    assert (x_stream.tensor_id, x_stream.shape, x_stream.dtype) == ("x_stream", (3, 2), popxl.float32)
    assert (x.name, x.shape, x.dtype) == ("x_hostload", (3, 2), popxl.float32)
    out = addons.host_store(x * 2.0)
    assert out.tensor_id == "mul_out_stream"
    with popxl.Session(ir, "cpu") as session:
        np.testing.assert_allclose(session.run({x_stream: x_host})[out], 2 * sample, rtol=1e-6)


def test_a_graph_is_no_tensor_to_store(ir):
    graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: x + 1, popxl.TensorSpec((2,), popxl.float32)))
    with pytest.raises(
        TypeError, match=r"host_store: `t` must be a Tensor; got .*BoundGraph.*`\(y,\) = graph.call\(x\)`"
    ):
        addons.host_store(graph.bind(addons.NamedTensors()))


@pytest.mark.parametrize("sample", [np.float32(3), 3.0, [1, 2]])
def test_samples_of_other_kinds(ir, sample):
    host, stream, t = addons.host_load(sample, popxl.float32, "s")
    assert host.shape == stream.shape == t.shape == np.shape(sample)


def test_torch_samples(ir):
    torch = pytest.importorskip("torch")
    host, stream, _ = addons.host_load(torch.ones(3, 2, requires_grad=True), popxl.float32, "t")
    assert host.shape == stream.shape == (3, 2)


def test_the_same_functions_everywhere():
    from popxl_addons.ops.streams import host_load, host_store

    assert addons.host_load is addons.ops.host_load is host_load
    assert addons.host_store is addons.ops.host_store is host_store
