"""Directories of weights and tokenizers: what loads, what is written, and what bad ones answer."""

import json

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from kv4rl.model import weights
from kv4rl.model.attend import PackedCausal
from kv4rl.model.decoder import Decoder, DecoderConfig
from kv4rl.model.weights import check_tokenizer, eos_token_ids, load_decoder, load_tokenizer, resolve, save_decoder

TIED, UNTIED = "llama-9q3kv-d64-tied", "qwen3-9q3kv-d64-bias"


@pytest.fixture(params=[TIED, UNTIED])
def family(request, some_config, make_family):
    return make_family(some_config(request.param))


@pytest.fixture
def saved(tmp_path, some_config):
    """A saved untied model: its directory."""
    save_decoder(Decoder.random(DecoderConfig.from_hf(some_config(UNTIED)), seed=0), tmp_path / "model")
    return tmp_path / "model"


def _edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(size):
    vocabulary = {f"w{index}": index for index in range(size)}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")), unk_token="w0"
    )


def _logits(decoder, ids):
    with torch.no_grad():
        return decoder.logits(decoder(ids, torch.arange(len(ids)), PackedCausal([0, len(ids)])))


@pytest.mark.parametrize("shard_size", ["10GB", "100KB"])
def test_what_transformers_saves_loads(family, tmp_path, shard_size):
    family.hf.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "100KB")
    loaded = load_decoder(tmp_path)
    state = family.decoder.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_what_we_save_transformers_loads_with_equal_logits(family, tmp_path):
    save_decoder(family.decoder, tmp_path)
    ids = torch.arange(40)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(ids[None]).logits, family.hf(ids[None]).logits)
    assert torch.equal(_logits(load_decoder(tmp_path), ids), _logits(family.decoder, ids))


def test_bfloat16_models_keep_their_dtype_on_disk(some_config, tmp_path):
    save_decoder(Decoder.random(DecoderConfig.from_hf(some_config(TIED)), seed=0, dtype=torch.bfloat16), tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert load_decoder(tmp_path).dtype == torch.float32  # cast on request; float32 is the default
    assert load_decoder(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


def test_saving_again_replaces_the_weights(saved, some_config):
    other = Decoder.random(DecoderConfig.from_hf(some_config(UNTIED)), seed=1)
    save_decoder(other, saved)
    assert torch.equal(load_decoder(saved).head_weight, other.head_weight)
    assert not list(saved.glob("*.partial"))


def test_a_tied_head_in_the_file_must_be_the_embedding(some_config, tmp_path):
    save_decoder(Decoder.random(DecoderConfig.from_hf(some_config(TIED)), seed=0), tmp_path)
    embedding = "model.embed_tokens.weight"
    _edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    assert load_decoder(tmp_path).config.tied_head
    _edit_tensors(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"tie_word_embeddings=True: expected false in config\.json"):
        load_decoder(tmp_path)


def test_unknown_family_is_refused_before_transformers_sees_it(saved):
    _edit(saved / "config.json", lambda config: config.update(model_type="mamba_of_tomorrow"))
    with pytest.raises(ValueError, match=r"model_type='mamba_of_tomorrow'.*qwen3, qwen2, llama"):
        load_decoder(saved)


def test_missing_config_is_named(saved):
    (saved / "config.json").unlink()
    with pytest.raises(ValueError, match=r"a directory with config\.json"):
        load_decoder(saved)


def test_missing_shard_is_named(family, tmp_path):
    family.hf.save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name}.*all .* shards .* fetch again"):
        load_decoder(tmp_path)


def test_missing_weights_are_named(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"a directory with model\.safetensors or model\.safetensors\.index\.json"):
        load_decoder(saved)


def test_cut_file_is_named(saved):
    content = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors'.*expected a whole safetensors file.*fetch again"):
        load_decoder(saved)


def test_missing_and_unexpected_tensors_are_named(saved):
    name = "model.layers.1.mlp.up_proj.weight"
    _edit_tensors(saved, lambda tensors: tensors.update({"surplus.weight": tensors.pop(name)}))
    with pytest.raises(ValueError, match=r"weights='surplus\.weight': expected only tensors of a qwen3 model"):
        load_decoder(saved)
    _edit_tensors(saved, lambda tensors: tensors.pop("surplus.weight"))
    with pytest.raises(ValueError, match=f"weights='{name}'.*lacks them"):
        load_decoder(saved)


def test_a_bias_the_configuration_does_not_announce_is_refused(saved):
    _edit(saved / "config.json", lambda config: config.update(attention_bias=False))
    with pytest.raises(ValueError, match=r"\.bias': expected only tensors of a qwen3 model of its config"):
        load_decoder(saved)


def test_vocabulary_and_shape_mismatches_give_both_shapes(saved):
    _edit(saved / "config.json", lambda config: config.update(vocab_size=300))
    with pytest.raises(ValueError, match=r"=\(211, 96\): expected \(300, 96\) by config\.json \(vocab_size=300\)"):
        load_decoder(saved)
    _edit(saved / "config.json", lambda config: config.update(vocab_size=211, intermediate_size=10))
    with pytest.raises(ValueError, match=r"mlp\.down_proj\.weight=\(96, 160\): expected \(96, 10\)"):
        load_decoder(saved)


def test_tokenizer_travels_with_the_model_and_must_fit_it(saved, some_config):
    decoder = Decoder.random(DecoderConfig.from_hf(some_config(UNTIED)), seed=0)
    save_decoder(decoder, saved, _tokenizer(211))
    assert len(load_tokenizer(saved)) == 211
    with pytest.raises(ValueError, match="tokenizer's largest id=211: expected < vocab_size=211"):
        save_decoder(decoder, saved, _tokenizer(212))
    _tokenizer(250).save_pretrained(saved)
    with pytest.raises(ValueError, match="tokenizer's largest id=249: expected < vocab_size=211"):
        load_tokenizer(saved)
    check_tokenizer(_tokenizer(100), 211)  # a padded embedding is fine


def test_missing_tokenizer_is_named(saved):
    with pytest.raises(ValueError, match=r"tokenizer='.*': expected a directory with one of tokenizer\.json"):
        load_tokenizer(saved)
    (saved / "model").mkdir()
    with pytest.raises(ValueError, match=rf"vocab\.json: {saved / 'model'}\?"):
        load_tokenizer(saved)


def test_eos_ids_come_from_the_generation_config_first(saved):
    with pytest.raises(ValueError, match=r"eos_token_id=None: expected an id or a list"):
        eos_token_ids(saved)
    _edit(saved / "config.json", lambda config: config.update(eos_token_id=5))
    assert eos_token_ids(saved) == (5,)
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert eos_token_ids(saved) == (7, 5)


def test_names_are_looked_up_under_data_models(saved, monkeypatch):
    monkeypatch.setattr(weights, "MODELS_DIR", saved.parent)
    assert resolve("model") == saved
    with pytest.raises(ValueError, match=r"model='modle': expected .* \(model\), or a hub id owner/name"):
        resolve("modle")
    with pytest.raises(ValueError, match=r"python -m kv4rl\.model\.fetch smollm2"):
        resolve("smollm2-135m")


def test_hub_ids_without_network_say_how_to_go_on(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match=r"'nobody/nothing': no such directory here.*HF_HUB_OFFLINE.*pass that"):
        load_decoder("nobody/nothing")


def test_a_hub_id_loads_from_its_snapshot(saved, monkeypatch):
    asked = []
    monkeypatch.setattr(weights, "snapshot_download", lambda name, **_: asked.append(name) or str(saved))
    assert load_decoder("owner/name").config.family == "qwen3"
    assert asked == ["owner/name"]


def test_a_full_disk_leaves_the_old_weights_whole(saved, some_config, monkeypatch):
    before = (saved / "model.safetensors").read_bytes()

    def full(tensors, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_decoder(Decoder.random(DecoderConfig.from_hf(some_config(UNTIED)), seed=1), saved)
    assert (saved / "model.safetensors").read_bytes() == before
    assert not list(saved.glob("*.partial"))
