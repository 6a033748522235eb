import pytest
import torch

from kv4rl.config import HEAD_DIMS
from kv4rl.formats import packing


def random_codes(kind: str, lead: tuple[int, ...], d: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind.endswith("4"):
        return torch.randint(0, 16, (*lead, 16, d), generator=generator, dtype=torch.uint8)
    return torch.randint(-128, 128, (*lead, 16, d), generator=generator, dtype=torch.int8)


KINDS = ("k4", "v4", "k8", "v8")


def functions(kind: str):
    return tuple(getattr(packing, name.format(kind)) for name in ("pack_{}", "unpack_{}", "{}_index"))


@pytest.mark.parametrize(
    ("precision", "head_dim", "size"),
    [("kv4", 128, 2176), ("kv4rl", 128, 2176), ("kv4", 64, 1152), ("kv4", 256, 4224), ("kv8", 128, 4160)],
)
def test_chunk_sizes_are_those_of_the_format(precision, head_dim, size):
    assert packing.chunk_bytes(precision, head_dim) == size


def test_bf16_chunk_stores_the_model_dtype():
    assert packing.chunk_bytes("bf16", 128, torch.bfloat16) == 8192
    assert packing.chunk_bytes("bf16", 128, torch.float32) == 16384
    with pytest.raises(ValueError, match="dtype"):
        packing.chunk_bytes("bf16", 128)


def test_int4_costs_four_and_a_quarter_bits_per_element():
    assert packing.chunk_bytes("kv4", 128) * 8 / (2 * 16 * 128) == 4.25


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 0), (2, 3)])
def test_unpack_inverts_pack(kind, d, lead):
    pack, unpack, _ = functions(kind)
    codes = random_codes(kind, lead, d)
    packed = pack(codes)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*lead, 16 * d // (2 if kind.endswith("4") else 1))
    assert torch.equal(unpack(packed), codes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_index_finds_every_code_where_pack_put_it(kind, d):
    pack, _, index = functions(kind)
    codes = random_codes(kind, (), d, seed=1)
    place, shift = index(d)
    found = pack(codes)[place] >> shift
    if kind.endswith("4"):
        assert torch.equal(found & 15, codes)
    else:
        assert torch.equal(found.view(torch.int8), codes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_every_place_holds_exactly_one_code(kind, d):
    place, shift = functions(kind)[2](d)
    wide = (place * 8 + shift).flatten()
    assert wide.unique().numel() == 16 * d


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("lane", [0, 5, 31])
def test_k4_words_are_tensor_core_operands(d, lane):
    """Register i of lane 4g+t: row g + 8*(i & 1), bytes are channels 16t + 4*(i >> 1) .. + 3; high nibbles 8 on."""
    codes = random_codes("k4", (), d, seed=2)
    words = packing.pack_k4(codes).view(d // 64, 32, 4, 4)[:, lane]
    g, t = lane // 4, lane % 4
    for step in range(d // 64):
        for i in range(4):
            row, column = g + 8 * (i & 1), 64 * step + 16 * t + 4 * (i >> 1)
            assert torch.equal(words[step, i] & 15, codes[row, column : column + 4])
            assert torch.equal(words[step, i] >> 4, codes[row, column + 8 : column + 12])


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("lane", [0, 5, 31])
def test_v4_words_are_tensor_core_operands(d, lane):
    """Register i of lane 4g+t: row g + 8*(i & 1), columns 2t + 8*(i >> 1) and the next (PTX m16n8k16 A)."""
    codes = random_codes("v4", (), d, seed=3).to(torch.int64)
    words = packing.pack_v4(codes.to(torch.uint8)).view(torch.int32).view(d // 64, 32, 4)[:, lane].flatten().tolist()
    g, t = lane // 4, lane % 4
    for j, word in enumerate(words):
        for i in range(4):
            channel, token = g * d // 8 + 2 * j + (i & 1), 2 * t + 8 * (i >> 1)
            pair = (word >> (4 * i)) & 0x000F000F
            assert (pair & 15, pair >> 16) == (codes[token, channel], codes[token + 1, channel])


def test_split_chunk_views_alias_the_storage():
    storage = torch.zeros(5, 2, packing.chunk_bytes("kv4", 128), dtype=torch.uint8)
    view = packing.split_chunk(storage, "kv4", 128)
    assert view.k_codes.shape == view.v_codes.shape == (5, 2, 1024)
    for number, name in enumerate(("k_scale", "k_offset", "v_scale", "v_offset"), start=1):
        getattr(view, name)[3, 1, 7] = number
    metadata = storage[3, 1, 2048:].view(torch.float16).view(16, 4)
    assert metadata[7].tolist() == [1, 2, 3, 4]
    assert metadata.count_nonzero() == 4
    view.v_codes[0, 0] = 9
    assert storage[0, 0, 1024:2048].eq(9).all()


def test_split_chunk_of_int8_has_no_offsets():
    view = packing.split_chunk(torch.zeros(4, 4160, dtype=torch.uint8), "kv8", 128)
    assert view.k_offset is None
    assert view.v_offset is None
    assert view.k_scale.shape == (4, 16)
    view.v_scale[2, 15] = 2.0
    assert view.k_scale.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_split_chunk_of_bf16_is_token_major(dtype):
    storage = torch.zeros(3, packing.chunk_bytes("bf16", 64, dtype), dtype=torch.uint8)
    view = packing.split_chunk(storage, "bf16", 64, dtype)
    view.v[1, 2, 3] = 1.5
    assert view.k.shape == view.v.shape == (3, 16, 64)
    assert storage.view(dtype)[1, 16 * 64 + 2 * 64 + 3] == 1.5


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: packing.chunk_bytes("int4", 128), "precision"),
        (lambda: packing.chunk_bytes("kv4", 96), "head_dim"),
        (lambda: packing.pack_k4(torch.zeros(16, 128, dtype=torch.int8)), "codes"),
        (lambda: packing.pack_k4(torch.zeros(15, 128, dtype=torch.uint8)), "codes"),
        (lambda: packing.unpack_v8(torch.zeros(100, dtype=torch.uint8)), "packed"),
        (lambda: packing.k4_index(96), "head_dim"),
        (lambda: packing.split_chunk(torch.zeros(2, 2175, dtype=torch.uint8), "kv4", 128), "chunk"),
    ],
)
def test_wrong_input_is_named(call, names):
    with pytest.raises(ValueError, match=f"^{names}="):
        call()
