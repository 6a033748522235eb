"""`bench replay`: its states, Eq. A2, and every part of it that a CPU can run."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from kv4rl.bench.__main__ import main
from kv4rl.bench.replay import CPU_ARMS, RAGGED_ARMS, TABLE_ARMS, aggregates, fitting, parse, rows, states_of
from kv4rl.bench.replay_arm import ARMS, GREEDY, Replay, argmax
from kv4rl.bench.replay_states import (
    HETEROGENEOUS,
    aggregate,
    heterogeneous,
    occupied_contexts,
    ragged_aggregate,
    table_a3,
    uniform,
)
from kv4rl.bench.weight_arms import PRODUCTS, quantised_weights, scaled_product
from kv4rl.cache.batch import DecodeBatch
from kv4rl.engine.memory import PlanTooLarge
from kv4rl.engine.sampler import NoiseKeys, Sampling, sample
from kv4rl.model.decoder import Decoder
from kv4rl.model.shapes import random_model, shape_config
from kv4rl.results import read_rows
from kv4rl.theory.lengths import LengthDistribution

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
SMALL = "replay --device cpu --model mini-qwen3 --shapes 3x20 2x40 --samples 4 --blocks 2 --warmups 1".split()
GIVEN = "3x20+2x40"  # the group of its shapes


def test_replay_times_every_state_and_aggregates_by_eq_a2(tmp_path, capsys):
    out = tmp_path / "replay.csv"
    main([*SMALL, "--arms", "bf16", "kv4", "kv4rl", "--out", str(out)])
    found = {(row["arm"], row["shape"], row["metric"]): float(row["value"]) for row in read_rows(out)}
    ms = {
        arm: [found[arm, f"{GIVEN}/{name}", "decode_replay_ms"] for name in ("3x20", "2x40")]
        for arm in ("bf16", "kv4", "kv4rl")
    }
    by_hand = 1 / (0.5 * ms["kv4"][0] / ms["bf16"][0] + 0.5 * ms["kv4"][1] / ms["bf16"][1])
    assert found["kv4", GIVEN, "speedup_vs_bf16"] == pytest.approx(by_hand, rel=1e-4)
    assert found["bf16", GIVEN, "speedup_vs_bf16"] == 1
    share = 2 / (ms["kv4rl"][0] / ms["kv4"][0] + ms["kv4rl"][1] / ms["kv4"][1])
    assert found["kv4rl", GIVEN, "retention_vs_kv4"] == pytest.approx(share, rel=1e-4)
    assert {row["n"] for row in read_rows(out) if row["metric"] == "decode_replay_ms"} == {"4"}
    printed = capsys.readouterr().out
    assert "random weights" in printed
    assert json.loads(printed.splitlines()[-1])["speedup_vs_bf16"][f"kv4 {GIVEN}"] == pytest.approx(by_hand, rel=1e-3)


def test_aggregates_are_harmonic_for_table_states_and_summed_for_ragged_ones():
    assert aggregate([2.0, 4.0], [1.0, 4.0]) == pytest.approx(2 / (0.5 + 1))
    assert ragged_aggregate([2.0, 4.0], [1.0, 4.0]) == pytest.approx(6 / 5)
    one, two, mixed = uniform("4B-100", 2, 3), uniform("4B-100", 3, 3), uniform("ragged-4B", 1, 9)
    times = {"bf16": {one: [2.0, 4.0], two: [4.0], mixed: [1.0, 1.0, 10.0]}, "kv4": {one: [1.0], mixed: [0.5]}}
    found = aggregates(times)
    assert found["kv4", "4B-100"] == 3.0 and found["kv4", "ragged-4B"] == 2.0 and found["bf16", "4B-100"] == 1.0
    made = {(r["arm"], r["shape"], r["metric"]) for r in rows(times, {"ragged-4B"}, "qwen3-4b")}
    assert ("kv4", "ragged-4B", "speedup_vs_bf16") in made
    assert ("kv4", "4B-100", "speedup_vs_bf16") not in made, "a group with a state left out has no aggregate"


def test_share_of_kv4_needs_no_bf16_which_one_gpu_may_not_hold():
    mixed = uniform("ragged-8B", 1, 9)
    made = rows({"kv4": {mixed: [1.0]}, "kv4rl": {mixed: [1.25]}}, {"ragged-8B"}, "qwen3-8b-tp1")
    found = {(r["arm"], r["metric"]): float(r["value"]) for r in made}
    assert found["kv4rl", "retention_vs_kv4"] == 0.8 and ("kv4", "retention_vs_kv4") not in found
    assert not any(metric == "speedup_vs_bf16" for _, metric in found)


def test_each_arm_is_heated_once_before_its_first_block(monkeypatch, tmp_path):
    asked, time = [], Replay.time
    noting = lambda self, state, samples, *rest: asked.append((self.arm, samples)) or time(self, state, samples, *rest)
    monkeypatch.setattr(Replay, "time", noting)
    main([*SMALL, "--arms", "bf16", "kv4", "--heat", "3", "--out", str(tmp_path / "replay.csv")])
    for arm in ("bf16", "kv4"):
        assert [samples for name, samples in asked if name == arm] == [3, 2, 2, 2, 2]


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_states_are_the_published_ones(size):
    table, mixed = table_a3(size), heterogeneous(size)
    assert len(table) == 15 and len({state.group for state in table}) == 3
    assert any(state.name == {"4b": "640x1463", "8b": "368x3461"}[size] for state in table)
    count, _, rows_range, means = HETEROGENEOUS[size]
    assert len(mixed) == count and mixed == heterogeneous(size)
    for state in mixed:
        assert rows_range[0] <= len(state.contexts) <= rows_range[1]
        assert means[0] * 0.99 <= np.mean(state.contexts) <= means[1] * 1.01
        assert np.std(state.contexts) > 0.4 * np.mean(state.contexts)


def test_occupied_contexts_have_the_mean_of_a4():
    law, prompts = LengthDistribution.lognormal(100, 0.7, cap=1000), LengthDistribution.deterministic(50)
    drawn = occupied_contexts(law, prompts, 20000, np.random.default_rng(1))
    expected = 50 + 1 + (law.moment(2) - law.mean) / (2 * law.mean)  # with the token being written
    assert abs(drawn.mean() - expected) < 5 * drawn.std() / len(drawn) ** 0.5


@pytest.mark.parametrize("arm", ["bf16", "kv8", "kv4", "kv4_p8", "kv4rl_w16"])
def test_a_replayed_step_is_a_decode_step_of_that_state(arm):
    decoder, state = random_model("mini-qwen3", dtype=torch.float32), uniform("given", 5, 37)
    replay = Replay(arm, decoder, [state, uniform("given", 2, 90)])
    assert replay.cache.main.storage[2].any() and len(replay.time(state, 2, 1)) == 2
    table, slots = replay.page_table(state), np.arange(5)
    assert len(set(table.rows(slots).ravel())) == 15, "every request has pages of its own"
    none = np.zeros(5, dtype=np.int64)
    with torch.inference_mode():
        drawn = replay.step.run(replay.step.load(table, slots, none, none), GREEDY)
        batch = DecodeBatch(*(torch.from_numpy(x) for x in (table.rows(slots), table.context[slots], slots)))
        read = lambda layer, q, k, v: replay.cache.decode(layer, q, batch)  # the step has written already
        hidden = decoder(torch.from_numpy(table.last_token[slots]), batch.context_tokens - 1, read)
        assert drawn[0].tolist() == decoder.logits(hidden).argmax(-1).tolist()


def test_argmax_is_greedy_sampling_without_its_probabilities():
    logits = torch.randn(50, 32, generator=torch.Generator().manual_seed(0))
    keys = NoiseKeys(torch.zeros(50, dtype=torch.int64), torch.zeros(50, dtype=torch.int64))
    tokens, _ = argmax(random_model("mini-qwen3"))(logits, keys, GREEDY)
    assert torch.equal(tokens, sample(logits, keys, Sampling(temperature=0.0))[0])


def test_states_that_do_not_fit_one_gpu_are_left_out():
    with torch.device("meta"):
        decoder = Decoder(shape_config("qwen3-8b")).to(torch.bfloat16)
    states = table_a3("8b")
    bf16, kv4 = (fitting(decoder, arm, states, 138e9) for arm in ("bf16", "kv4"))
    assert 0 < len(bf16) < len(states) == len(kv4)
    assert uniform("8B-400", 368, 3461) not in bf16


def test_w8a8_products_are_within_e4m3_rounding():
    generator = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(n, 64, generator=generator).bfloat16() for n in (48, 32))
    try:
        out = scaled_product(weight)(x)
    except RuntimeError as reason:
        pytest.skip(f"no row-wise torch._scaled_mm on this CPU: {str(reason)[:80]}")
    exact = x.double() @ weight.double().t()
    # Two operands rounded to four significant bits: each errs by 2^-4 of its size at most.
    assert (out.double() - exact).norm() <= 2 * 2**-4 * exact.norm()


def test_quantised_weights_are_undone_and_used_in_every_layer(monkeypatch):
    used = []

    def make(weight):
        return lambda x: used.append(tuple(weight.shape)) or nn.functional.linear(x, weight)

    monkeypatch.setitem(PRODUCTS, "w8a8", make)
    decoder, state = random_model("mini-qwen3", dtype=torch.float32), uniform("given", 3, 20)
    before = dict(decoder.named_parameters())
    replay = Replay("bf16", decoder, [state])
    none, slots = np.zeros(3, dtype=np.int64), np.arange(3)
    size = replay.step.load(replay.page_table(state), slots, none, none)
    with torch.inference_mode():
        plain = replay.step.run(size, GREEDY).clone()
        with quantised_weights(decoder, "w8a8"):
            assert torch.equal(replay.step.run(size, GREEDY), plain)
        assert len(used) == 4 * decoder.config.num_layers
        assert torch.equal(replay.step.run(size, GREEDY), plain) and len(used) == 4 * decoder.config.num_layers
    assert {name: p is before[name] for name, p in decoder.named_parameters()} == dict.fromkeys(before, True)


def test_an_arm_that_a_cpu_cannot_run_is_not_measured_through_something_else():
    with pytest.raises(ValueError, match="arm='fp8_kv': expected another on cpu"):
        Replay("fp8_kv", random_model("mini-qwen3"), [uniform("given", 1, 5)])


def test_running_out_of_memory_names_what_the_arm_holds(monkeypatch):
    def exhaust(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 90 GiB.")

    decoder, state = random_model("mini-qwen3"), uniform("given", 2, 20)
    replay = Replay("kv4rl", decoder, [state])
    monkeypatch.setattr(decoder, "forward", exhaust)
    with pytest.raises(PlanTooLarge, match=r"the kv4rl replay's plan is model .* GB, 4 pages .*lower --hbm-gb"):
        replay.time(state, 1, 1)
    monkeypatch.setattr("kv4rl.bench.replay_arm.fill", exhaust)
    with pytest.raises(PlanTooLarge, match="the kv4 replay's plan"):
        Replay("kv4", decoder, [state])


@pytest.mark.parametrize("bench", ["replay", "overhead"])
def test_more_processes_than_one_group_are_refused(bench, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as ended:
        main([bench, "--device", "cpu", "--tp", "2"])
    assert "tp=2: expected 4, the number of processes" in capsys.readouterr().err and ended.value.code == 2


def test_one_shape_written_twice_is_one_state():
    (state,) = states_of(parse([*SMALL[1:], "--shapes", "4x40", "04x40"]))
    assert (state.group, state.name) == ("4x40", "4x40")


def test_every_arm_of_the_papers_figures_can_be_run():
    assert {*TABLE_ARMS, *RAGGED_ARMS, *CPU_ARMS} <= set(ARMS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "1"], "samples=1: expected at least one a block (2), as many in each"),
        (["--samples", "4", "--blocks", "3"], "samples=4: expected at least one a block (3), as many in each"),
        (["--arms", "bf16", "fp8_kv", "w4a16"], "arms=['fp8_kv', 'w4a16']: expected some of bf16,"),
        (["--out", "/proc/none/replay.csv"], "/proc/none"),
        (["--out", "/tmp"], "out='/tmp': expected a CSV file, not a folder"),
        (["--warmups", "-1"], "warmups=-1: expected an integer >= 0"),
        (["--hbm-gb", "0"], "hbm-gb=0.0: expected a number > 0"),
        (["--hbm-gb", "6"], "hbm-gb=6.0: expected room for the model (0.00474 GB), 6 GB besides and at least one"),
        (["--shapes", "1000000x2000"], "hbm-gb=138.0: expected room for"),
        (["--shapes", "2x9", "2x5000"], "shapes=['2x9', '2x5000']: expected at most 2048 positions"),
        (["--tp", "0"], "tp=0: expected an integer >= 1"),
        (["--tp", "2"], "tensor_parallel=2: expected 1, or a multiple of 2 processes started with torchrun"),
        pytest.param(
            ["--device", "cuda"], "device='cuda': expected cpu: this machine has no CUDA device", marks=no_cuda
        ),
    ],
)
def test_bad_input_ends_with_one_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *words])
    assert message in capsys.readouterr().err and ended.value.code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "mini-qwen3"], "model='mini-qwen3': expected one of qwen3-4b, qwen3-8b"),
        (["--checkpoints", "4B-1"], "checkpoints=['4B-1']: expected some of 4B-"),
    ],
)
def test_states_that_are_not_in_table_a3_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--device", "cpu", *words])
    assert message in capsys.readouterr().err and ended.value.code == 2


@pytest.mark.parametrize("shape", ["640", "640x", "x874", "0x874", "640x0", "640x874x2", "-1x5", "²x5", "6.5x3", ""])
@pytest.mark.parametrize("bench", ["replay", "overhead", "kernels"])
def test_a_shape_that_is_none_is_refused_by_every_bench(bench, shape, capsys):
    with pytest.raises(SystemExit):
        main([bench, f"--shapes={shape}"])
    assert f"shapes=['{shape}']: expected batch x context" in capsys.readouterr().err
