"""Inference with residual sums and norms taken together: the layer-by-layer forward, uncompiled and compiled."""

import copy
import shutil

import pytest
import torch

from kv4rl.model.attend import PackedCausal
from kv4rl.model.pointwise import Pointwise, compiled

IDS = torch.randint(211, (40,), generator=torch.Generator().manual_seed(3))


def hidden(decoder, ids=IDS):
    return decoder(ids, torch.arange(len(ids)), PackedCausal([0, len(ids)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_is_the_layers_one_after_another_to_the_bit(config, make_family, dtype):
    decoder = make_family(config, dtype).decoder
    with torch.no_grad():
        expected = hidden(decoder)
        decoder.pointwise = Pointwise()
        assert torch.equal(hidden(decoder), expected)
    used = []
    decoder.pointwise = Pointwise(add_norm=lambda *rest: used.append(1))
    hidden(decoder).float().sum().backward()
    assert not used, "training keeps to the layers"


def test_a_copied_decoder_keeps_working(config, make_family):
    decoder = make_family(config).decoder
    decoder.pointwise = Pointwise()
    with torch.no_grad():
        assert torch.equal(hidden(copy.deepcopy(decoder)), hidden(decoder))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler: apt-get install g++")
def test_compiled_functions_err_no_more_than_plain_ones(some_config, make_family):
    """One compilation serves any number of rows."""
    family = make_family(some_config("qwen3-4q2kv-d128-tied"))
    exact = make_family(some_config("qwen3-4q2kv-d128-tied"), torch.float64).decoder
    with torch.no_grad():
        for ids in (IDS, IDS[:7]):
            reference = hidden(exact, ids)
            family.decoder.pointwise = None
            plain = (hidden(family.decoder, ids).double() - reference).norm()
            family.decoder.pointwise = compiled()
            assert (hidden(family.decoder, ids).double() - reference).norm() <= 1.5 * plain


def test_swiglu_is_compiled_once_for_all_rows_of_a_width_that_its_kernel_knows(monkeypatch):
    """Of unknown width its kernel read at half the speed."""
    shapes, real = [], torch.compile

    def watched(function, **options):
        def backend(graph, inputs):
            shapes.append([node.meta["example_value"].shape for node in graph.graph.find_nodes(op="placeholder")
                           if isinstance(node.meta["example_value"], torch.Tensor)])  # fmt: skip
            return graph

        return real(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", watched)
    swiglu = compiled.__wrapped__("test").swiglu
    for rows in (40, 7, 300):
        gate, up = torch.randn(rows, 64).split(32, -1)
        assert torch.equal(swiglu(gate, up), Pointwise().swiglu(gate, up))
    ((gate, up),) = shapes
    for shape in (gate, up):
        assert isinstance(shape[0], torch.SymInt) and isinstance(shape[1], int)
