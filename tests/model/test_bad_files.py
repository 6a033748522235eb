"""A model directory that is damaged, or of something else, is named with the file and what to do about it."""

import json
import re

import pytest
import torch

from kv4rl.config import InputError
from kv4rl.model.decoder import Decoder, DecoderConfig
from kv4rl.model.weights import eos_token_ids, load_decoder, load_tokenizer, resolve, save_decoder
from kv4rl.tasks.tokenizer import save_tokenizer

INDEX = "model.safetensors.index.json"


@pytest.fixture
def saved(tmp_path, some_config):
    """A saved model with a tokenizer: its directory."""
    directory = tmp_path / "model"
    save_decoder(Decoder.random(DecoderConfig.from_hf(some_config("qwen3-9q3kv-d64-bias")), seed=0), directory)
    save_tokenizer(directory)
    return directory


def refused(message):
    return pytest.raises(InputError, match=re.escape(message))


@pytest.mark.parametrize("content", [b"", b'{"model_type": "qw', b"\xff\xfe", b"[]", b'"qwen3"', b"null"])
def test_a_config_that_is_no_whole_json_object(saved, content):
    (saved / "config.json").write_bytes(content)
    for load in (load_decoder, load_tokenizer):
        with refused(f"file='{saved / 'config.json'}': expected"):
            load(saved)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", "64", "expected what transformers takes for qwen3"),
        ("rms_norm_eps", "x", "expected what transformers takes for qwen3"),
        ("num_hidden_layers", 0, "expected what transformers takes for qwen3"),
        ("rope_parameters", {"rope_type": "dynamic"}, "expected what transformers takes for qwen3"),
        ("max_position_embeddings", -4, "max_position_embeddings=-4: expected an integer >= 1"),
        ("num_key_value_heads", 4, "query_heads, kv_heads=(9, 4): expected a whole group per KV head"),
        ("head_dim", 97, "head_dim=97: expected an even number"),
        ("hidden_act", "gelu", "hidden_act='gelu': expected silu"),
        ("model_type", "gemma", "model_type='gemma': expected a supported model family"),
        ("model_type", ["qwen3"], "model_type=['qwen3']: expected a supported model family"),
        ("vocab_size", 99, "expected (99, "),
    ],
)
def test_fields_of_a_config(saved, field, value, message):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {field: value}))
    with refused(message):
        load_decoder(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"weight_map": {', "expected whole JSON"),
        ("[]", "expected a JSON object"),
        ("{}", f"{INDEX}=None: expected an object, tensor name to file name"),
        ('{"weight_map": []}', f"{INDEX}=[]: expected an object, tensor name to file name"),
        ('{"weight_map": {"x": 3}}', "expected an object, tensor name to file name"),
        ('{"weight_map": {"x": "b.safetensors"}}', "weights='b.safetensors': expected all 1 shards"),
        ('{"weight_map": {}}', "weights='lm_head.weight, model.embed_tokens.weight"),
    ],
)
def test_an_index_of_shards(saved, content, message):
    (saved / "model.safetensors").rename(saved / "a.safetensors")
    (saved / INDEX).write_text(content)
    with refused(message):
        load_decoder(saved)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_cut_off(saved, name):
    (saved / name).write_bytes((saved / name).read_bytes()[:90])
    with refused(f"file='{saved / name}': expected whole JSON"):
        load_tokenizer(saved)


@pytest.mark.parametrize("content", ["", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, -1]}'])
def test_end_of_sequence_ids_that_are_none(saved, content):
    (saved / "generation_config.json").write_text(content)
    with refused("generation_config.json"):
        eos_token_ids(saved)


def test_names_dtypes_and_devices(saved):
    for name in (None, "", 3):
        with refused(f"model={name!r}: expected a directory, a name"):
            resolve(name)
    with refused("model='README.md': expected a model directory"):
        resolve("README.md")
    for dtype in ("float32", torch.int8):
        with refused(f"dtype={dtype!r}: expected torch.float32"):
            load_decoder(saved, dtype=dtype)
    there = "one of auto, cpu" if torch.cuda.is_available() else "cpu: this machine has no CUDA device"
    with refused(f"device='cuda:99': expected {there}"):
        load_decoder(saved, device="cuda:99")
