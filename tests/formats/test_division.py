import torch

from kv4rl.formats.division import divided


def test_a_quotient_is_the_nearest_float_to_the_exact_one():
    x = torch.randn(20000, generator=torch.Generator().manual_seed(3)) * 1e3
    for by in (3, 15, 127, 255):
        assert torch.equal(divided(x, by), (x.double() / by).float())
        assert not torch.equal(x * (torch.ones(()) / by), divided(x, by))  # the product with a reciprocal is not it
    assert divided(x.half(), 127).dtype == torch.float16
