"""Measured decode steps and collections: the right rows land beside the right numbers of the paper."""

import pytest

from kv4rl.config import KVConfig
from kv4rl.theory.roofline import QWEN3_4B
from kv4rl.theory.step_cost import StepCost
from kv4rl.viz.replay import (
    checkpoint_speedups,
    measured_windows,
    of_model,
    order_checks,
    other_speedups,
    over_predicted,
    predicted_and_measured,
    predicted_ms,
    replay_table,
    unmeasured,
    window_figure,
)
from kv4rl.viz.rollout import (
    LIMIT_STATES,
    collection_rows,
    overhead_rows,
    scheduler_rows,
    today_limit,
    today_rows,
    unanswered_collections,
)
from kv4rl.viz.workload import measured_traces


def row(arm, shape, metric, value, *, model="qwen3-4b", experiment="replay", **more):
    about = {"experiment": experiment, "arm": arm, "model": model, "shape": shape, "metric": metric}
    return about | {"value": str(value)} | more


REPLAY = [
    row("kv4", "4B-300", "speedup_vs_bf16", 2.1),
    row("kv4", "4B-300", "speedup_vs_bf16", 2.2, model="qwen3-4b-tp1"),
    row("kv8", "4B-300", "speedup_vs_bf16", 1.5),
    row("kv4", "4B-100", "speedup_vs_bf16", 1.7),
    row("kv4rl", "4B-300/640x874", "decode_replay_ms", 17.0),
    row("kv4", "ragged-4B", "speedup_vs_bf16", 2.0),
    *(row(f"kv4rl_w{w}", "ragged-4B", "speedup_vs_bf16", 2 - w / 1000) for w in (512, 128, 16)),
    row("kv4rl_w128", "ragged-4B", "retention_vs_kv4", 0.936),
]


def test_a_replay_rows_model_says_its_tensor_parallel_size():
    assert [of_model({"model": name}) for name in ("qwen3-4b", "qwen3-8b-tp1")] == [("qwen3-4b", 2), ("qwen3-8b", 1)]


def test_checkpoints_come_in_the_papers_order_beside_its_kv4():
    lines = replay_table(REPLAY)
    assert [(line["checkpoint"], line["ours at"], line["KV4"]) for line in lines] == [
        ("4B-100", "TP2", "1.70x"), ("4B-300", "TP2", "2.10x"), ("4B-300", "TP1", "2.20x"),
    ]  # fmt: skip
    assert lines[0]["paper KV4, TP2"] == "1.53x" and lines[0]["KV8"] == "-" and replay_table([]) == []
    assert "FP8 W8A8" not in lines[0], "a column of which nothing was measured is left out"
    figure = checkpoint_speedups(REPLAY)
    assert {trace.name for trace in figure.data} == {"KV8", "KV4", "KV4, paper (TP2)"}


def test_widths_are_in_order_and_only_the_papers_has_its_share():
    lines = other_speedups(REPLAY)
    assert [line["recent positions"] for line in lines] == ["16", "128", "512", ""]
    assert [line["paper's share"] for line in lines] == ["", "94%", "", ""]
    assert lines[3]["cache or weights"] == "KV4"
    assert lines[1]["share of KV4's throughput"] == "93.6%"
    assert list(window_figure(REPLAY).data[0].x) == [16, 128, 512]
    assert measured_windows(REPLAY) == {("ragged-4B", "qwen3-4b"): [16, 128, 512]}


def test_what_was_replayed_off_the_papers_checkpoints_is_listed_and_does_not_count_as_measured_at_them():
    """W8A8 at one shape of one GPU had "not measured: nothing" printed above a table without it."""
    aside = [row("w8a8", "320x1463", "speedup_vs_bf16", 0.9), row("kv4rl_bf16", "ragged-4B", "speedup_vs_bf16", 2.1)]
    assert unmeasured([*REPLAY, *aside]) == ["KV4-RL", "FlashInfer FP8 KV", "FP8 W8A8", "W4A16"]
    listed = {(line["states"], line["cache or weights"]): line for line in other_speedups([*REPLAY, *aside])}
    assert listed["320x1463", "FP8 W8A8"]["speedup over BF16"] == "0.90x"
    assert listed["ragged-4B", "KV4, protected positions in BF16"]["speedup over BF16"] == "2.10x"


def test_kv4_is_a_line_also_where_one_width_was_measured():
    one = [row("kv4", "ragged-8B", "speedup_vs_bf16", 2.6), row("kv4rl", "ragged-8B", "speedup_vs_bf16", 2.5)]
    _, level, _ = window_figure(one).data
    assert level.name == "KV4, 8B, TP2" and level.x[0] < 16 and level.x[1] > 512 and list(level.y) == [2.6, 2.6]


def test_kv8_is_a_level_and_bf16_protection_a_mark_at_the_default_width():
    arms = {"kv4rl": 2.4, "kv4": 2.5, "kv8": 1.6, "kv4rl_bf16": 2.2}
    given = [row(arm, "ragged-4B", "speedup_vs_bf16", value) for arm, value in arms.items()]
    drawn = {trace.name: (list(trace.x), list(trace.y)) for trace in window_figure(given).data}
    assert drawn["KV8, 4B, TP2"][1] == [1.6, 1.6] and drawn["protected in BF16, 4B, TP2"] == ([128], [2.2])


def test_an_order_is_asked_only_where_both_of_a_pair_were_measured():
    assert [check[2:] for check in order_checks(REPLAY)] == [("kv8", "kv4", True)]
    with_fp8 = [*REPLAY, row("fp8_kv", "4B-300", "speedup_vs_bf16", 1.6)]
    assert [check[2:] for check in order_checks(with_fp8)] == [("fp8_kv", "kv8", False), ("kv8", "kv4", True)]


def test_a_prediction_is_of_the_rows_own_state_format_and_gpus():
    (timed,) = (r for r in REPLAY if r["metric"] == "decode_replay_ms")
    assert predicted_ms(timed) == pytest.approx(StepCost(QWEN3_4B, KVConfig("kv4rl"))(640, 640 * 874))
    whole = predicted_ms(timed | {"model": "qwen3-4b-tp1"})
    assert whole == pytest.approx(StepCost(QWEN3_4B, KVConfig("kv4rl"), tensor_parallel=1)(640, 640 * 874))
    assert predicted_and_measured(REPLAY).data[0].y == (17.0,)
    assert over_predicted(REPLAY) == [
        {"model": "qwen3-4b", "ours at": "TP2", "KV4-RL": f"{17 / predicted_ms(timed):.2f}"}
    ]


def test_collections_show_what_execution_and_capacity_gain():
    cells = {"collection_s": 50, "decode_tokens_per_s": 9000, "cache_pages": 1e5}
    gains = {"speedup_vs_bf16": 2.0, "speedup_at_bf16_pages": 1.6, "speedup_of_capacity": 1.25}
    given = {"experiment": "rollout", "model": "qwen3-8b"}
    rows = [row("kv4rl", "8B-400", m, v, **given) for m, v in (cells | gains).items()]
    rows += [row("bf16", "8B-400", m, v, **given) for m, v in cells.items()]
    rows += [row("sync", "8B-400", "collection_s", 1, **given)]
    first, second = collection_rows(rows)
    assert first["cache"] == "bf16" and first["over BF16"] == "-"
    assert (second["over BF16"], second["execution"], second["capacity"]) == ("2.00x", "1.60x", "1.25x")


def test_a_collection_through_bf16_alone_is_named_and_has_no_column_of_gains():
    cells = {"collection_s": 50, "decode_tokens_per_s": 9000, "cache_pages": 1e5}
    given = {"experiment": "rollout", "model": "qwen3-8b"}
    rows = [row("bf16", "8B-400", metric, value, **given) for metric, value in cells.items()]
    assert "over BF16" not in collection_rows(rows)[0]
    assert unanswered_collections(rows) == ["qwen3-8b, 8B-400: KV8, KV4, KV4-RL not measured"]


def test_schedulers_ratios_stand_beside_the_papers_where_it_prints_them():
    given = {"experiment": "rollout", "model": "qwen3-4b"}
    rows = [row("partial_over_sync", shape, "active_batch_ratio", 8.0, **given) for shape in ("4B-300", "4B-100")]
    assert [line["paper"] for line in scheduler_rows(rows)] == ["8.27", "drawn only"]


def test_todays_engines_are_listed_with_their_ratios_and_the_commits_of_other_runs():
    given = {"commit": "a1", "command": "today"}
    rows = [
        row("kv4", "256x128+256", "tokens_per_s", 30000.0, **given),
        row("kv4", "256x128+256", "speedup_vs_generate", 15.2, **given),
        row("kv4", "256x128+256", "speedup_vs_generate_batch", 20.04, **given | {"commit": "b2"}),
        row("bf16", "256x128+256", "tokens_per_s", 20000.0, **given),
        row("kv4", "256x128+256", "tokens_per_s", 9000.0, model="qwen3-8b", **given),
    ]
    kv4, bf16, larger = today_rows(rows)
    assert larger["model"] == "qwen3-8b" and larger["over generate"] == "-", "another model's ratio is not its own"
    assert (kv4["tokens/s"], kv4["over generate"], kv4["over generate_batch"]) == ("30,000", "15.2x", "20.0x at b2")
    assert bf16["over generate"] == bf16["over generate_batch"] == "-"


def test_the_limit_of_todays_ratio_is_prefill_and_replayed_steps_and_then_products():
    given = {"model": "qwen3-4b"}
    rates = {"transformers_generate": 2000.0, "kv4rl": 30000.0}
    today = [row(arm, "256x128+256", "tokens_per_s", rate, **given) for arm, rate in rates.items()]
    cells = {"prefill_tokens_per_s": 65536.0, "decode_replay_ms": 6.0}
    rollout = [row("kv4rl", "256x128", metric, value, **given) for metric, value in cells.items()]
    replay = [row("bf16", "256x256/256x256", "products_ms", 2.0, **given | {"model": "qwen3-4b-tp1"})]
    said = today_limit(today, rollout, replay)
    assert "prefill at 65,536 tokens/s takes 0.50 s, 255 replayed steps of 6.00 ms take 1.53 s" in said
    assert "16.1x of `generate`, this one reaches 15.0x" in said and said.endswith("(2.00 ms) would reach 32.4x.")
    assert "takes rows of `bench today`" in today_limit(today, rollout, [])


def test_each_length_has_its_limit_from_the_states_of_its_own_mean_step():
    given, today, rollout, replay = {"model": "qwen3-4b"}, [], [], []
    for tokens, (stepped, multiplied) in LIMIT_STATES.items():
        today += [
            row(arm, f"256x128+{tokens}", "tokens_per_s", tokens, **given) for arm in ("transformers_generate", "kv4rl")
        ]
        rollout += [
            row("kv4rl", stepped, metric, tokens, **given) for metric in ("prefill_tokens_per_s", "decode_replay_ms")
        ]
        of_one_gpu = {"model": "qwen3-4b-tp1"}
        replay.append(row("bf16", f"{multiplied}/{multiplied}", "products_ms", tokens, **of_one_gpu))
    short, long = today_limit(today, rollout, replay).split("\n")
    assert short.startswith("256 new tokens") and "(256.00 ms)" in short
    assert long.startswith("2048 new tokens") and "2047 replayed steps of 2048.00 ms" in long
    assert today_limit(today[:2], rollout, replay) == short


def test_overhead_shows_the_engines_share_of_its_replay_and_leaves_collections_out():
    about = {"experiment": "rollout", "model": "qwen3-4b", "arm": "kv4rl"}
    cells = {"engine_step_ms": 6.4, "device_step_ms": 6.3, "decode_replay_ms": 6.2, "share_of_replay": 0.969}
    cells |= {"serial_share_of_replay": 0.85, "prefill_tokens_per_s": 43264.9}
    rows = [about | {"shape": "256x128", "metric": metric, "value": str(value)} for metric, value in cells.items()]
    other = about | {"shape": "4B-300", "metric": "collection_s", "value": "10"}
    (line,) = overhead_rows([*rows, other])
    assert line["requests x context"] == "256x128" and line["of the replay"] == "96.9%" and line["unhidden"] == "85.0%"
    assert line["engine step, ms"] == "6.40" and line["prefill tokens/s"] == "43,265"


def test_measured_traces_follow_the_calls_of_each_scheduler():
    bins = [("sync", 0, 30, 8), ("sync", 1, 20, 3), ("partial", 0, 10, 16), ("partial", 1, 9, 9)]
    rows = [
        row(arm, f"4B-300/2/{place:02d}", metric, value * scale, n=str(calls), experiment="rollout_trace")
        for arm, place, calls, value in reversed(bins)
        for metric, scale in (("active_requests", 1), ("resident_kv_bytes", 1e9))
    ]
    figure = measured_traces(rows)
    drawn = {(line.name, line.xaxis): (list(line.x), list(line.y)) for line in figure.data if len(line.x)}
    assert drawn["synchronous", "x"] == ([30, 50], [8, 3]) and drawn["partial", "x"] == ([10, 19], [16, 9])
    assert drawn["partial", "x3"] == ([10, 19], [16, 9]), "bytes are drawn as GB"
    assert [line.name for line in figure.data if line.showlegend] == ["synchronous", "partial"]
    with pytest.raises(ValueError, match="one model, fit and interval"):
        measured_traces([*rows, row("sync", "4B-300/3/00", "active_requests", 1, n="1")])
