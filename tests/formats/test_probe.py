import pytest
import torch

from kv4rl.formats.hadamard import rotate
from kv4rl.formats.probe import FORMATS

GENERATOR = torch.Generator().manual_seed(0)
GAUSSIAN = torch.randn(64, 128, generator=GENERATOR)
OUTLIERS = GAUSSIAN * torch.where(torch.arange(128) % 37 == 0, 12.0, 1.0)  # a few large channels, as keys have


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_is_that_of_what_comes_back(name):
    form = FORMATS[name]
    back = form.reconstruct(OUTLIERS, rotated=True)
    expected = rotate(form.dequantize(form.quantize(rotate(OUTLIERS))))
    assert torch.equal(back, expected)
    relative = ((back - OUTLIERS).norm() / OUTLIERS.norm()).item()
    assert form.error(OUTLIERS, rotated=True) == pytest.approx(relative, rel=1e-4)


def test_rotation_helps_one_scale_per_vector_with_outliers_and_not_without():
    form = FORMATS["int4"]
    assert form.error(OUTLIERS, rotated=True) < 0.8 * form.error(OUTLIERS)
    assert form.error(GAUSSIAN, rotated=True) == pytest.approx(form.error(GAUSSIAN), rel=0.05)


def test_bits_are_the_papers():
    bits = {name: form.bits_per_element(GAUSSIAN) for name, form in FORMATS.items()}
    assert bits == {
        "int4": 4.25, "int4_g64": 4.5, "int4_g32": 5.0, "int4_g16": 6.0, "nvfp4": 4.75, "mxfp4": 4.25, "int8": 8.125
    }  # fmt: skip
