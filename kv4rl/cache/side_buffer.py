"""The side buffer: INT8 copies of the sink and the recent positions, one fixed block per request slot (§5.2, §A.3)."""

import torch

from kv4rl.config import KVConfig, require
from kv4rl.formats.symmetric import SymmetricCodes, dequantize_symmetric, quantize_symmetric


class SideBuffer:
    """s sink entries, then a ring of w recent ones; position p lives at `attention.regions.side_entry(p, s, w)`.

    k_codes, v_codes: int8 [layers, slots, kv_heads, s + w, d], keys rotated (Eq. 3.4).
    k_scale, v_scale: float16 [layers, slots, kv_heads, s + w].
    Entries are quantised from the source vectors, so a position leaving the ring needs no conversion: its INT4 copy
    is in the main cache already and the entry is simply overwritten (§5.3). Empty unless the precision is `kv4rl`.
    """

    def __init__(self, kv: KVConfig, *, num_layers: int, num_slots: int, kv_heads: int, head_dim: int, device):
        require(num_slots >= 0, "num_slots", num_slots, "an integer >= 0")
        self.entries = kv.protected_tokens
        shape = (num_layers, num_slots, kv_heads, self.entries)
        self.k_codes = torch.zeros(*shape, head_dim, dtype=torch.int8, device=device)
        self.v_codes = torch.zeros_like(self.k_codes)
        self.k_scale = torch.zeros(shape, dtype=torch.float16, device=device)
        self.v_scale = torch.zeros_like(self.k_scale)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.k_codes, self.v_codes, self.k_scale, self.v_scale))

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, entries: torch.Tensor) -> None:
        """Store k (rotated), v [N, kv_heads, d] at (slots, entries), int64 [N], each place at most once."""
        place = (slots, slice(None), entries)
        for codes, scale, source in ((self.k_codes, self.k_scale, k), (self.v_codes, self.v_scale, v)):
            quantised = quantize_symmetric(source)
            codes[layer][place] = quantised.codes
            scale[layer][place] = quantised.scale

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[SymmetricCodes, SymmetricCodes]:
        """Codes and scales of the keys and of the values of `slots` int64 [B]: codes [B, kv_heads, s + w, d]."""
        k, v = (
            SymmetricCodes(codes[layer].index_select(0, slots), scale[layer].index_select(0, slots))
            for codes, scale in ((self.k_codes, self.k_scale), (self.v_codes, self.v_scale))
        )
        return k, v

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised entries of `slots` int64 [B]: (k, v), each float32 [B, kv_heads, s + w, d]; keys rotated."""
        k, v = self.gather(layer, slots)
        return dequantize_symmetric(k), dequantize_symmetric(v)
