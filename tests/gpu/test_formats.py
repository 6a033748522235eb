"""The formats have the same bits on a GPU as on a CPU, whatever torch makes of an operation there."""

import pytest
import torch

from kv4rl.attention.reference import prepare_query
from kv4rl.formats.affine import quantize_affine
from kv4rl.formats.division import divided
from kv4rl.formats.fp4 import quantize_mxfp4, quantize_nvfp4
from kv4rl.formats.hadamard import rotate
from kv4rl.formats.symmetric import quantize_symmetric

pytestmark = pytest.mark.gpu
# Not `quantize_affine_mse`: it compares sums, whose order is the device's own.
QUANTISERS = {
    "affine": quantize_affine, "symmetric": quantize_symmetric, "nvfp4": quantize_nvfp4, "mxfp4": quantize_mxfp4,
    "query": lambda x: prepare_query(x, 2),
    "rotate": lambda x: (rotate(x),), "divided": lambda x: tuple(divided(x, by) for by in (3, 15, 127, 255)),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantised_bits_do_not_depend_on_the_device(name, dtype):
    x = torch.randn(10000, 8, 128, generator=torch.Generator().manual_seed(11)).to(dtype)
    there = QUANTISERS[name](x.cuda())
    for ours, wanted in zip(there, QUANTISERS[name](x), strict=True):
        assert torch.equal(ours.cpu().float(), wanted.float())
