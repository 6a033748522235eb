"""The generate command: texts through four caches, what they cost, and clear refusals."""

import pytest

from kv4rl.config import PRECISIONS
from kv4rl.generate import main
from kv4rl.model.weights import MODELS_DIR
from kv4rl.results import REPOSITORY

TASK = "n=08 k=02 r=2 x=12,45,78,03\n"
SMOLLM2 = MODELS_DIR / "smollm2-135m" / "model.safetensors"


def test_the_mini_model_answers_through_four_caches(capsys):
    samples = main(["--model", "mini-qwen3", "--prompt", TASK, "--max-new-tokens", "60", "--temperature", "0"])
    assert [sample.precision for sample in samples] == list(PRECISIONS)
    for sample in samples:
        assert sample.response.finish_reason == "eos" and sample.greedy is sample.response
        assert sample.tokens_per_s > 0
    # 3 layers x 2 KV heads x (K and V) x 128 channels in FP32; 8.25 and 4.25 bits of it as counted in §5.1.
    assert [sample.bytes_per_token for sample in samples] == [6144, 1560, 816, 816]
    # 144 positions x 6 (layer, KV head) pairs x (K and V) x (128 codes and an FP16 scale)
    assert [sample.side_bytes for sample in samples] == [0, 0, 0, 144 * 6 * 2 * 130]
    assert samples[0].leaves(samples[0]) is None and samples[3].leaves(samples[0]) is None
    printed = capsys.readouterr().out
    assert printed.count("\\boxed{") == 4 and "leaves bf16's greedy text at" in printed


def test_seeds_and_precisions_choose_what_is_sampled():
    words = ["--model", "mini-qwen3", "--prompt", TASK, "--max-new-tokens", "12", "--precisions", "kv4"]
    first, again, other = (main([*words, "--seed", seed]) for seed in ("1", "1", "2"))
    assert [sample.precision for sample in first] == ["kv4"]
    assert first[0].response == again[0].response and first[0].greedy == other[0].greedy


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--model modle --prompt n", "model='modle': expected a model directory"),
        ("--model mini-qwen3 --prompt Hello", "characters of the prompt=['H', 'e', 'l', 'o']: expected only"),
        ("--model mini-qwen3 --prompt=", "prompt='': expected some text"),
        ("--model mini-qwen3 --prompt \udcff", "prompt='\\udcff': expected UTF-8"),
        ("--model mini-qwen3 --prompt n --max-new-tokens 2048", "prompt and new tokens=2049: expected at most the mo"),
        ("--model mini-qwen3 --prompt n --max-new-tokens 0", "max-new-tokens=0: expected an integer >= 1"),
        ("--model mini-qwen3 --prompt n --temperature -1", "temperature=-1.0: expected a number >= 0"),
        ("--model mini-qwen3 --prompt n --recent 2048", "sink_tokens + recent_tokens = 16 + 2048=2064: expected at m"),
        ("--model mini-qwen3 --prompt n --device cuda:9", "device='cuda:9'"),
        ("--model mini-qwen3 --prompt-file nowhere.txt", "nowhere.txt"),
        ("--model mini-qwen3 --prompt n --precisions kv5", "invalid choice: 'kv5'"),
        ("--model mini-qwen3", "one of the arguments --prompt --prompt-file is required"),
    ],
)
def test_what_it_cannot_use_ends_with_one_sentence(capsys, words, sentence):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    out, err = capsys.readouterr()
    assert sentence in err and out == ""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SMOLLM2.exists(), reason="smollm2-135m is absent: python -m kv4rl.model.fetch smollm2")
def test_smollm2_generates_past_300_tokens_through_four_caches(tmp_path):
    """A long question, so that most of the context is read through each cache; greedy, so that only caches differ."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text((REPOSITORY / "LICENSE").read_text()[:1500] + "\n\nSay in one sentence what this text permits.")
    words = ["--model", "smollm2-135m", "--prompt-file", str(prompt), "--max-new-tokens", "8", "--temperature", "0"]
    samples = main(words)
    assert [sample.precision for sample in samples] == list(PRECISIONS)
    for sample in samples:
        assert len(sample.response.prompt_tokens) >= 300 and len(sample.response.tokens) >= 2
        assert sample.leaves(samples[0]) != 1  # the first token comes of an unquantised prefill
    # 30 layers x 3 KV heads x (K and V) x 64 channels in FP32; INT4 with an FP16 scale and offset: 4.5 bits
    assert [sample.bytes_per_token for sample in samples] == [46080, 11880, 6480, 6480]
