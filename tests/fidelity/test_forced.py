"""Teacher forcing through the deployed decode path: equal to a full forward pass, and to what the engine recorded."""

import json

import numpy as np
import pytest
import torch

from kv4rl.config import KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.engine.sampler import Sampling
from kv4rl.fidelity.__main__ import bits_per_element, main
from kv4rl.fidelity.control import repeat_in_new_process
from kv4rl.fidelity.corpus import (
    PROMPTS_FILE,
    History,
    load_histories,
    mini_prompts,
    sample_histories,
    save_histories,
    text_prompts,
)
from kv4rl.fidelity.forced import forced_logits, prefill
from kv4rl.fidelity.measure import make_arm, measure_kl
from kv4rl.model.attend import PackedCausal
from kv4rl.model.decoder import Decoder
from kv4rl.model.weights import save_decoder
from kv4rl.rewards.boxes import last_box
from kv4rl.tasks.tokenizer import build_tokenizer


def full_forward(decoder, histories):
    """Logits at the eight states of every history from one unquantised pass over prompt and response."""
    states = []
    for h in histories:
        tokens = torch.tensor(h.prompt + h.response[:-1])
        hidden = decoder(tokens, torch.arange(len(tokens)), PackedCausal([0, len(tokens)]))
        states.append(decoder.logits(hidden[[len(h.prompt) - 1 + position for position in h.positions]]))
    return torch.stack(states)


def test_the_unquantised_arm_is_as_close_to_float64_as_a_full_pass(tiny_decoder, histories):
    exact_decoder = Decoder(tiny_decoder.config).double()
    exact_decoder.load_state_dict(tiny_decoder.state_dict())
    exact = full_forward(exact_decoder.requires_grad_(False), histories)
    peer = (full_forward(tiny_decoder, histories) - exact).abs().max()
    assert (forced_logits(tiny_decoder, KVConfig("bf16"), histories) - exact).abs().max() <= 4 * peer


@pytest.mark.parametrize("precision", ["kv8", "kv4", "kv4rl"])
def test_forcing_repeats_what_the_engine_recorded(tiny_decoder, precision):
    kv = KVConfig(precision, sink_tokens=2, recent_tokens=8)
    limits = RolloutConfig(max_response_tokens=40, max_active_requests=2, cache_pages=16)
    engine = RolloutEngine(tiny_decoder, kv, limits, eos_token_ids=())
    responses = engine.generate([[5, 6, 7], list(range(2, 22))], Sampling(seed=1))
    histories = [History(r.prompt_id, list(r.prompt_tokens), r.tokens) for r in responses]

    def recorded_less_forced(config):
        logp = torch.log_softmax(forced_logits(tiny_decoder, config, histories), -1)
        return max(
            abs(logp[row, state, r.tokens[position]].item() - r.sampler_logp[position])
            for row, (h, r) in enumerate(zip(histories, responses, strict=True))
            for state, position in enumerate(h.positions)
        )

    assert recorded_less_forced(kv) < recorded_less_forced(KVConfig("bf16")) / 20


def test_the_state_before_the_first_token_is_the_prefills(tiny_decoder, histories):
    kl, _ = measure_kl(tiny_decoder, histories, [make_arm("kv4"), make_arm("kv8")])
    for arm in kl.values():
        assert (arm[:, 0] == 0).all() and (arm[:, 1:] > 0).all()


def test_more_bits_and_more_protection_mean_less_kl(tiny_decoder, histories):
    names = [make_arm("kv8"), make_arm("kv4"), make_arm("kv4rl", sink_tokens=4, recent_tokens=8)]
    kl, _ = measure_kl(tiny_decoder, histories, names)
    assert kl["kv8"].mean() < kl["kv4rl-s4-w8"].mean() < kl["kv4"].mean()


def test_a_shared_prefill_changes_no_bit(tiny_decoder, histories):
    kv = KVConfig("kv4rl", sink_tokens=4, recent_tokens=8)
    shared = forced_logits(tiny_decoder, kv, histories, prompts=prefill(tiny_decoder, histories))
    assert torch.equal(shared, forced_logits(tiny_decoder, kv, histories))


def test_a_control_process_that_fails_is_reported(tiny_decoder, histories, tmp_path, monkeypatch):
    monkeypatch.setattr("kv4rl.fidelity.control.sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="control process failed"):
        repeat_in_new_process(str(tmp_path), histories, tiny_decoder, backend="auto")


def test_histories_survive_a_file(histories, tmp_path):
    save_histories(tmp_path / "h.json", histories)
    assert load_histories(tmp_path / "h.json") == histories


def test_sampled_histories_repeat_and_short_ones_are_refused(tiny_decoder):
    prompts = mini_prompts(build_tokenizer(), 2, min_steps=10)
    settings = {"eos_token_ids": (), "seed": 3}
    first = sample_histories(tiny_decoder, prompts, max_response_tokens=12, **settings)
    assert first == sample_histories(tiny_decoder, prompts, max_response_tokens=12, **settings)
    assert [h.prompt_id for h in first] == [prompt_id for prompt_id, _ in prompts]
    with pytest.raises(ValueError, match="response tokens of mini-evaluation"):
        sample_histories(tiny_decoder, prompts, max_response_tokens=7, **settings)


def test_empty_lists_are_refused(tiny_decoder):
    with pytest.raises(ValueError, match="prompts"):
        sample_histories(tiny_decoder, [], eos_token_ids=(), max_response_tokens=8, seed=0)
    with pytest.raises(ValueError, match="histories"):
        forced_logits(tiny_decoder, KVConfig("kv4"), [])
    with pytest.raises(ValueError, match="arms"):
        measure_kl(tiny_decoder, [History("a", [2], [3] * 8)], [])


def test_prompts_of_a_tokenizer_that_cannot_chat_are_refused():
    with pytest.raises(ValueError, match="no chat template"):
        text_prompts(build_tokenizer(), 2)
    with pytest.raises(ValueError, match="prompts=33"):
        text_prompts(build_tokenizer(), 33)


def test_solved_examples_lengthen_a_prompt_and_the_question_stays_last():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | length }}\n{% endfor %}"
    plain, with_shots = (text_prompts(tokenizer, 3, shots=shots) for shots in (0, 2))
    for (_, short), (_, long) in zip(plain, with_shots, strict=True):
        assert long[-len(short) :] == short and tokenizer.decode(long).count("\n") == 5


@pytest.mark.parametrize(("precision", "bits"), [("bf16", 32), ("kv8", 8.25), ("kv4", 4.5), ("kv4rl", 4.5)])
def test_bits_are_counted_from_bytes(tiny_decoder, precision, bits):
    """At head_dim 64 the FP16 scale and offset add half a bit; the FP32 model stores FP32 where it says bf16."""
    assert bits_per_element(KVConfig(precision), tiny_decoder) == bits


@pytest.mark.parametrize("way", ["engine", "batched"])
def test_the_command_prints_a_table_and_makes_rows(tiny_decoder, tmp_path, capsys, monkeypatch, way):
    """Its control is real: a second process loads the model again and must agree to the bit."""
    save_decoder(tiny_decoder, tmp_path, build_tokenizer())
    monkeypatch.setattr("kv4rl.fidelity.__main__.eos_token_ids", lambda model: ())  # a random model would end at once
    words = ["--precisions", "kv8", "kv4", "--preset", "loop", "--way", way, "--no-rows"]
    rows = main(["--model", str(tmp_path), *words])
    by_key = {(row["arm"], row["metric"]): row for row in rows}
    assert by_key["bf16", "control_kl"]["value"] == 0.0
    assert by_key["kv4", "sampler_kl"]["shape"] == "loop" and by_key["kv4", "sampler_kl"]["n"] == 64
    reduction = by_key["kv8", "kl_reduction_vs_kv4"]
    ratio = by_key["kv4", "sampler_kl"]["value"] / by_key["kv8", "sampler_kl"]["value"]
    assert np.isclose(reduction["value"], ratio) and reduction["low"] <= ratio <= reduction["high"]
    printed = capsys.readouterr().out
    assert "gives bit-identical" in printed and "kl_reduction_vs_kv4" in printed


@pytest.mark.parametrize(("words", "field"), [(["int3"], "precision='int3'"), (["bf16"], "precisions")])
def test_the_command_refuses_unknown_precisions(tmp_path, capsys, words, field):
    with pytest.raises(SystemExit, match="2"):
        main(["--model", str(tmp_path), "--precisions", *words, "--no-rows"])
    assert field in capsys.readouterr().err


def test_the_shipped_prompts_are_thirty_two_solved_questions():
    lines = [json.loads(line) for line in PROMPTS_FILE.read_text().splitlines()]
    assert len(lines) == len({line["prompt_id"] for line in lines}) == len({line["question"] for line in lines}) == 32
    assert all(last_box(line["solution"]) for line in lines)
