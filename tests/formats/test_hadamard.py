import pytest
import torch

from kv4rl.formats.hadamard import hadamard_matrix, rotate


@pytest.mark.parametrize("d", [1, 2, 64, 128, 256])
def test_matrix_is_orthogonal_symmetric_and_made_of_two_values(d):
    h = hadamard_matrix(d, dtype=torch.float64)
    torch.testing.assert_close(h @ h.T, torch.eye(d, dtype=torch.float64), rtol=0, atol=1e-14)
    assert torch.equal(h, h.T)
    assert torch.equal(h.abs(), torch.full((d, d), d**-0.5, dtype=torch.float64))


def test_matrix_follows_sylvester():
    signs = hadamard_matrix(4).sign().int().tolist()
    assert signs == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotate_equals_the_matrix_product_to_fp32_rounding(d, dtype):
    x = torch.randn(3, 5, d, generator=torch.Generator().manual_seed(d)).to(dtype)
    exact = x.double() @ hadamard_matrix(d, dtype=torch.float64)
    by_matmul = x.float() @ hadamard_matrix(d)
    rotated = rotate(x)
    assert rotated.dtype == torch.float32
    assert (rotated - exact).abs().max() <= (by_matmul - exact).abs().max()


def test_rotating_both_sides_keeps_every_score():
    q, k = torch.randn(2, 7, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    torch.testing.assert_close(rotate(q) @ rotate(k).T, q @ k.T)


def test_rotated_query_sums_to_sqrt_d_times_its_first_channel():
    q = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotate(q).sum(-1), 8 * q[:, 0])


def test_rotation_spreads_an_outlier_over_all_channels():
    x = torch.zeros(128)
    x[17] = 100.0
    torch.testing.assert_close(rotate(x).abs(), torch.full((128,), 100 / 128**0.5))


@pytest.mark.parametrize("d", [0, 3, 96, 100])
def test_other_dimensions_are_refused_by_name(d):
    with pytest.raises(ValueError, match=rf"head_dim={d}: expected a power of two"):
        hadamard_matrix(d)
    with pytest.raises(ValueError, match="head_dim"):
        rotate(torch.zeros(2, d))
