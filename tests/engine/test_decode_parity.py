"""vLLM #36580, NeMo-RL #2100: the log-probability recorded while decoding against that of a full forward pass."""

import pytest
import torch

from kv4rl.config import PRECISIONS
from kv4rl.engine.sampler import Sampling
from kv4rl.formats.affine import dequantize_affine, quantize_affine
from kv4rl.formats.hadamard import rotate
from kv4rl.formats.symmetric import dequantize_symmetric, quantize_symmetric
from kv4rl.model.attend import PackedCausal


def through_affine(x):
    return dequantize_affine(quantize_affine(x))


def through_symmetric(x):
    return dequantize_symmetric(quantize_symmetric(x))


class RoundedCache:
    """Causal attention whose keys and values went through a format: the cost of the format alone, all in one pass."""

    def __init__(self, rows, through):
        self.causal, self.through = PackedCausal([0, rows]), through

    def __call__(self, layer, q, k, v):
        q, k = rotate(q), self.through(rotate(k))
        return self.causal(layer, q, k, self.through(v.contiguous()))


def teacher_forced(decoder, response, attend=None):
    """FP32 log-probability of each response token given everything before it."""
    ids = torch.tensor(response.prompt_tokens + response.tokens)
    rows, first = len(ids), len(response.prompt_tokens)
    with torch.no_grad():
        hidden = decoder(ids, torch.arange(rows), attend or PackedCausal([0, rows]))
        logp = torch.log_softmax(decoder.logits(hidden[first - 1 : -1]), -1)
    return logp.gather(-1, ids[first:, None])[:, 0]


def rms(parts):
    return torch.cat(parts).square().mean().sqrt().item()


@pytest.fixture
def responses(make_engine, prompts):
    """Responses of the engine at a precision, to prompts whose decode contexts cross pages and the ring's length."""

    def sample(precision, **sizes):
        engine = make_engine(precision, eos=(), **sizes)
        return engine.generate(prompts, Sampling(), samples=2)

    return sample


@pytest.mark.parametrize("sizes", [{}, {"step_tokens": 8, "cache_pages": 12}])
def test_unquantised_decode_logp_is_the_full_forward_logp(make_decoder, responses, sizes):
    """Yardstick: how far the full forward in float32 is from the one in float64."""
    decoder, double = make_decoder(), make_decoder().double()
    error = peer = 0.0
    for response in responses("bf16", **sizes):
        exact = teacher_forced(double, response)
        error = max(error, (torch.tensor(response.sampler_logp).double() - exact).abs().max().item())
        peer = max(peer, (teacher_forced(decoder, response).double() - exact).abs().max().item())
    assert error <= 4 * peer


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_quantised_decode_logp_is_as_far_from_the_full_forward_as_its_format(make_decoder, responses, precision):
    """Yardstick: a full forward whose keys and values went through the format (of kv4rl: without protection).

    Decoding adds the INT8 query and prefills stay exact, so the two agree in size and not token by token. A wrong
    slot, page or position in either direction would be far outside.
    """
    decoder = make_decoder()
    through = through_symmetric if precision == "kv8" else through_affine
    error, yardstick = [], []
    for response in responses(precision):
        exact = teacher_forced(decoder, response)
        rows = len(response.prompt_tokens) + len(response.tokens)
        error.append(torch.tensor(response.sampler_logp) - exact)
        yardstick.append(teacher_forced(decoder, response, RoundedCache(rows, through)) - exact)
    ratio = rms(error) / rms(yardstick)
    assert 0.3 < ratio < (1.0 if precision == "kv4rl" else 1.3)
    first = torch.cat([part[:1] for part in error])
    assert first.abs().max() < 1e-3 * rms(error), "the first token comes from an unquantised prefill"
