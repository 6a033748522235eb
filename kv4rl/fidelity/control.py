"""The zero-KL control: an independent process repeats the unquantised run and must give the same bits (§B.5)."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kv4rl.fidelity.corpus import History, load_histories, save_histories
from kv4rl.fidelity.measure import Probe
from kv4rl.model.decoder import Decoder
from kv4rl.model.weights import load_decoder


def repeat_in_new_process(
    model: str, histories: Sequence[History], decoder: Decoder, *, backend: str, way: str = "engine"
) -> Tensor:
    """Unquantised logits [histories, 8, vocab] from a fresh interpreter that loads `model` from disk again.

    `way` as in `measure.Probe`. It uses this process's dtype, device and number of threads: another number may sum in
    another order. Raises RuntimeError if that process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_histories(Path(folder) / "histories.json", histories)
        settings = [str(decoder.dtype).removeprefix("torch."), str(decoder.device), str(torch.get_num_threads())]
        command = [sys.executable, "-m", "kv4rl.fidelity.control", model, folder, way, backend, *settings]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the control process failed:\n{done.stderr}")
        return load_file(Path(folder) / "logits.safetensors")["logits"]


def main(model: str, folder: str, way: str, backend: str, dtype: str, device: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    decoder = load_decoder(model, dtype=getattr(torch, dtype), device=device)
    histories = load_histories(Path(folder) / "histories.json")
    save_file(
        {"logits": Probe(decoder, histories, way=way, backend=backend).reference}, Path(folder) / "logits.safetensors"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
