"""Weights and tokenizers from a directory, a name under data/models/ or a hub id; safetensors only."""

import json
import os
import shutil
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

import kv4rl
from kv4rl.config import InputError, require, require_integer
from kv4rl.device import choose_device
from kv4rl.model.config import FAMILIES, DecoderConfig
from kv4rl.model.decoder import Decoder

MODELS_DIR = Path(kv4rl.__file__).resolve().parents[1] / "data" / "models"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def resolve(name: str | Path) -> Path:
    """The directory of a model: `name` itself, `data/models/<name>`, or a snapshot of the hub repository `name`.

    Raises ValueError when `name` is none of them, ConnectionError when the hub cannot be reached.
    """
    named = isinstance(name, str | Path) and bool(str(name).strip())
    require(named, "model", name, "a directory, a name under data/models, or a hub id owner/name")
    for directory in (Path(name), MODELS_DIR / name):
        if directory.is_dir():
            return directory
    parts = str(name).split("/")
    here = sorted(path.name for path in MODELS_DIR.glob("[!.]*") if path.is_dir())
    places = f"a model directory, a name under {MODELS_DIR} ({', '.join(here) or 'empty'}), or a hub id owner/name"
    if "smollm2" in str(name):
        places += "; `python -m kv4rl.model.fetch smollm2` makes smollm2-135m"
    require(len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~"), "model", str(name), places)
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(HUB_FILES)))
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise InputError(f"model={str(name)!r}: expected {places}; the hub says: {_line(error)}") from error
    except (HfHubHTTPError, OSError) as error:
        raise ConnectionError(
            f"model={str(name)!r}: no such directory here, and the hub did not deliver it ({_line(error)}). Fix: allow "
            f"network access (and unset HF_HUB_OFFLINE), or put its files into a directory and pass that."
        ) from error


def load_config(path_or_id: str | Path) -> DecoderConfig:
    """The configuration of a model.

    Raises ValueError without a whole config.json, for one that transformers refuses, and for a family the decoder does
    not build.
    """
    path = resolve(path_or_id) / "config.json"
    require(path.is_file(), "model", str(path.parent), "a directory with config.json (is the download complete?)")
    family = read_json(path).get("model_type")
    require(family in FAMILIES, "model_type", family, f"a supported model family in {path}: {', '.join(FAMILIES)}")
    try:
        hf = AutoConfig.from_pretrained(path.parent, trust_remote_code=False)
    except (StrictDataclassError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"config={str(path)!r}: expected what transformers takes for {family} ({error})") from error
    return DecoderConfig.from_hf(hf)


def read_json(path: Path) -> dict:
    """The JSON object in a model's file; ValueError naming the file when it is cut off or holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:  # no JSON, or no UTF-8
        raise InputError(f"file={str(path)!r}: expected whole JSON ({error}): fetch again") from error
    require(isinstance(content, dict), "file", str(path), "a JSON object: fetch again")
    return content


def load_decoder(path_or_id: str | Path, *, dtype: torch.dtype = torch.float32, device="cpu") -> Decoder:
    """A decoder with its weights cast to `dtype` on `device`.

    Raises ValueError naming the file or tensor: missing shard, missing or unexpected tensor, wrong shape; or naming a
    dtype that is no floating-point torch.dtype, or a device that this machine lacks.
    """
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    require(floating, "dtype", dtype, "torch.float32, torch.bfloat16 or another floating-point torch.dtype")
    device = choose_device(str(device))
    directory = resolve(path_or_id)
    config = load_config(directory)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    wanted = decoder.state_dict()
    loaded: dict[str, Tensor] = {}
    for file in weight_files(directory):
        loaded.update(_read(file, wanted, config, dtype=dtype, device=device))
    missing = sorted(wanted.keys() - loaded.keys())
    require(not missing, "weights", _some(missing), f"these tensors in {directory}, which lacks them")
    if HEAD in loaded and config.tied_head:
        same = torch.equal(loaded.pop(HEAD), loaded[EMBEDDING])
        require(same, "tie_word_embeddings", True, f"false in config.json: {HEAD} differs from the embedding")
    decoder.load_state_dict(loaded, assign=True)
    return decoder


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory; ValueError when there are none or a shard is missing."""
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    index = directory / INDEX
    require(index.is_file(), "model", str(directory), f"a directory with {WEIGHTS} or {INDEX} (other formats: convert)")
    weight_map = read_json(index).get("weight_map")
    whole = isinstance(weight_map, dict) and all(isinstance(shard, str) for shard in weight_map.values())
    require(whole, f"weight_map of {index}", weight_map, "an object, tensor name to file name: fetch again")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    require(not missing, "weights", _some(missing), f"all {len(shards)} shards of {INDEX} in {directory}: fetch again")
    return [directory / shard for shard in shards]


def _read(file: Path, wanted: dict[str, Tensor], config: DecoderConfig, *, dtype, device) -> dict[str, Tensor]:
    """Tensors of one file that the decoder wants, checked against its shapes; unknown ones are refused."""
    loaded = {}
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                if name.endswith("rotary_emb.inv_freq"):
                    continue  # old checkpoints carry it; it follows from the configuration
                tied = name == HEAD and config.tied_head
                expected = wanted.get(EMBEDDING if tied else name)
                known = expected is not None
                require(known, "weights", name, f"only tensors of a {config.family} model of its config ({file})")
                shape = tuple(tensors.get_slice(name).get_shape())
                hint = f"{tuple(expected.shape)} by config.json (vocab_size={config.vocab_size}) in {file}"
                require(shape == tuple(expected.shape), f"shape of {name}", shape, hint)
                loaded[name] = tensors.get_tensor(name).to(dtype)
    except SafetensorError as error:
        raise InputError(f"weights={str(file)!r}: expected a whole safetensors file ({error}): fetch again") from error
    return loaded


def load_tokenizer(path_or_id: str | Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer (no remote code). ValueError if its ids do not fit the model's vocabulary."""
    directory = resolve(path_or_id)
    there = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    # Without any, transformers makes an empty one.
    wanted = f"a directory with one of {', '.join(TOKENIZER_FILES)}"
    if (directory / "model").is_dir():  # of a training run
        wanted += f": {directory / 'model'}?"
    require(bool(there), "tokenizer", str(directory), wanted)
    for name in (*there, "tokenizer_config.json"):
        if name.endswith(".json") and (directory / name).is_file():
            read_json(directory / name)
    vocab_size = load_config(directory).vocab_size
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    check_tokenizer(tokenizer, vocab_size)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """ValueError when the tokenizer can make an id for which the model has no embedding."""
    largest = max(tokenizer.get_vocab().values())
    fix = f"< vocab_size={vocab_size} of the model: take the tokenizer that belongs to it, or resize the embedding"
    require(largest < vocab_size, "tokenizer's largest id", largest, fix)


def eos_token_ids(path_or_id: str | Path) -> tuple[int, ...]:
    """Ids that end a response, from generation_config.json or else config.json; ValueError if neither names any."""
    directory = resolve(path_or_id)
    for name in ("generation_config.json", "config.json"):
        if (directory / name).is_file():
            ids = read_json(directory / name).get("eos_token_id")
            if ids is not None:
                ids = ids if isinstance(ids, list) else [ids]
                for token in ids:
                    require_integer(token, f"eos_token_id of {directory / name}", 0)
                return tuple(ids)
    raise InputError(
        f"eos_token_id=None: expected an id or a list in generation_config.json or config.json of {directory}"
    )


def save_decoder(decoder: Decoder, directory: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Write config.json and model.safetensors (and the tokenizer's files) so that transformers loads them.

    Each weight file is whole or absent: it is written beside its name and then renamed.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        check_tokenizer(tokenizer, decoder.config.vocab_size)
        tokenizer.save_pretrained(directory)
    config = AutoConfig.for_model(**decoder.config.hf.to_dict())
    config.architectures = [
        {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[decoder.config.family] + "ForCausalLM"
    ]
    config.dtype = decoder.dtype
    config.save_pretrained(directory)
    partial = directory / f"{WEIGHTS}.partial"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in decoder.state_dict().items()}
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
        shutil.copymode(directory / "config.json", partial)  # safetensors leaves 0600; others may read the rest too
        os.replace(partial, directory / WEIGHTS)
    finally:
        partial.unlink(missing_ok=True)


def _line(error: Exception) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
