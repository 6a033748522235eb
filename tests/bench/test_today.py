"""`bench today`: the baselines run over our very weights, and every response has the length that was asked for."""

import json

import pytest
import torch

from kv4rl.bench import today
from kv4rl.bench.__main__ import main
from kv4rl.engine.engine import RolloutEngine
from kv4rl.model.attend import PackedCausal
from kv4rl.model.shapes import random_model
from kv4rl.results import read_rows

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
SMALL = "today --device cpu --model mini-qwen3 --prompts 3 --prompt-tokens 9 --new-tokens 6".split()


def test_every_arm_generates_and_is_set_against_generate(tmp_path, capsys):
    out = tmp_path / "today.csv"
    main([*SMALL, "--out", str(out)])
    rows = {(row["arm"], row["metric"]): row for row in read_rows(out)}
    assert {arm for arm, _ in rows} == {*today.BASELINES, "bf16", "kv8", "kv4", "kv4rl"}
    rate = {arm: float(row["value"]) for (arm, metric), row in rows.items() if metric == "tokens_per_s"}
    for arm in rate:
        for base, metric in zip(today.BASELINES, ("speedup_vs_generate", "speedup_vs_generate_batch"), strict=True):
            assert float(rows[arm, metric]["value"]) == pytest.approx(rate[arm] / rate[base], rel=1e-4)
    assert rows["kv4", "tokens_per_s"]["shape"] == "3x9+6"
    printed = capsys.readouterr().out
    assert "random weights" in printed
    assert json.loads(printed.splitlines()[-1])["tokens_per_s"].keys() == rate.keys()


@pytest.mark.parametrize(("prompt_tokens", "new_tokens"), [(1, 15), (17, 15), (100, 12)])
def test_all_requests_are_active_whatever_share_of_a_page_they_end_in(prompt_tokens, new_tokens, monkeypatch):
    """Of prompts that fill as many pages as their responses end in, half waited for the others."""
    active, step = [0], RolloutEngine.step

    def watched(engine):
        finished = step(engine)
        active.append(engine.last_step.active_requests)
        return finished

    monkeypatch.setattr(RolloutEngine, "step", watched)
    today.ours(random_model("mini-qwen3"), "kv4", [[3] * prompt_tokens] * 12, new_tokens)(new_tokens)
    assert max(active) == 12


def test_the_baselines_compute_what_our_decoder_computes():
    decoder = random_model("mini-qwen3", dtype=torch.float32)
    model = today.transformers_model(decoder)
    assert model.model.embed_tokens.weight.data_ptr() == decoder.model.embed_tokens.weight.data_ptr()
    ids = torch.arange(5, 25)
    ours = decoder.logits(decoder(ids, torch.arange(20), PackedCausal([0, 20])))
    torch.testing.assert_close(model(ids[None]).logits[0], ours)


def test_a_call_that_ends_early_is_not_timed():
    with pytest.raises(RuntimeError, match=r"2 responses of \[3, 4\] tokens: expected 2 of 4"):
        today.seconds(lambda tokens: [[0] * tokens, [0] * 3], 4, 2, torch.device("cpu"))


@pytest.mark.parametrize("make", [today.static_batch, today.continuous_batching])
def test_no_token_ends_a_baselines_response(make):
    decoder = random_model("mini-qwen3")
    decoder.config.hf.eos_token_id = list(range(decoder.config.vocab_size))  # whatever is drawn would end it
    responses = make(today.transformers_model(decoder), [[5, 6, 7], [8, 9, 10]])(6)
    assert [len(response) for response in responses] == [6, 6]


def test_without_generate_nothing_is_set_against_it(tmp_path, capsys):
    main([*SMALL, "--arms", "kv4", "--out", str(tmp_path / "today.csv")])
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "of generate" not in printed


def test_a_run_cut_short_keeps_the_arms_that_it_measured(tmp_path, monkeypatch):
    out, engine = tmp_path / "today.csv", today.ours

    def interrupted(decoder, arm, *given):
        if arm == "kv8":
            raise KeyboardInterrupt
        return engine(decoder, arm, *given)

    monkeypatch.setattr(today, "ours", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main([*SMALL, "--arms", "kv4", "kv8", "--out", str(out)])
    assert {row["arm"] for row in read_rows(out)} == {"kv4"}


@no_cuda
def test_without_a_gpu_the_model_is_one_that_a_cpu_can_run():
    assert today.parse([]).model == "mini-qwen3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--new-tokens", "4096"], "at most the model's 2048 positions"),
        (["--prompts", "0"], "prompts=0: expected an integer >= 1"),
        (["--prompts", "1000000000000"], "prompts=1000000000000: expected at most 16777216"),
        (["--prompts", "10000000"], "prompts x tokens=150000000: expected at most 16777216"),
        (["--out", "/proc/none/today.csv"], "/proc/none"),
        (["--seed", "-1"], "seed=-1: expected an integer >= 0"),
        pytest.param(
            ["--device", "cuda"], "device='cuda': expected cpu: this machine has no CUDA device", marks=no_cuda
        ),
    ],
)
def test_bad_input_ends_with_one_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *words])
    assert message in capsys.readouterr().err and ended.value.code == 2
