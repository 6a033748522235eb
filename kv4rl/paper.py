"""Every published number, once, with its locator. Notebooks, report and README read the paper's side from here only.

`PUBLISHED["table1/8b/kv4rl/math500"]` is a `Published` with value, unit, spread and place. Speedups are over BF16.
"""

from dataclasses import dataclass

TASKS = ("math500", "olympiad", "minerva", "aime24", "aime25", "amc23", "mean")
PRECISION_ROWS = ("bf16", "kv8", "kv4", "kv4rl")

# Mean and sample standard deviation over three evaluation seeds; rows bf16, kv8, kv4, kv4rl; columns TASKS.
TABLE_1 = {
    "8b": """88.2±0.6 56.3±0.2 51.9±0.4 29.5±1.9 20.7±0.4 67.9±1.2 52.4±0.5
             87.6±0.4 56.6±0.4 52.0±0.6 29.4±0.6 21.3±0.5 69.9±1.1 52.8±0.4
             82.9±0.2 50.1±0.2 51.2±0.8 18.5±0.7 15.6±0.3 68.4±1.4 47.8±0.1
             87.7±0.3 56.8±0.4 51.8±1.4 29.7±0.6 22.1±0.7 68.9±1.1 52.8±0.1""",
    "4b": """83.0±0.2 50.1±0.2 48.0±0.7 19.1±0.2 16.5±0.4 65.2±1.0 47.0±0.1
             82.5±0.1 49.2±0.5 46.9±0.5 18.2±0.6 16.8±1.0 66.2±0.3 46.6±0.3
             81.7±0.5 49.1±0.5 48.0±0.7 16.8±0.4 14.1±0.4 67.6±1.3 46.2±0.0
             82.4±0.3 48.8±0.0 49.1±0.7 18.2±0.9 13.6±0.1 67.5±0.7 46.6±0.3""",
}
TABLE_A5 = {
    "8b": """96.5±0.3 73.8±0.5 70.7±2.4 66.7±6.7 52.2±5.1 97.5±0.0 76.2±1.9
             96.5±0.1 73.6±0.3 69.6±1.5 64.4±3.8 55.6±1.9 96.7±1.4 76.1±0.6
             92.3±0.6 66.3±0.7 69.0±0.8 56.7±3.3 37.8±1.9 93.3±3.8 69.2±0.4
             96.2±0.2 74.2±0.7 71.3±2.9 64.4±1.9 57.8±1.9 96.7±1.4 76.8±1.1""",
    "4b": """92.5±0.6 66.8±1.1 63.8±0.2 45.6±3.8 42.2±3.8 95.0±2.5 67.7±1.2
             92.3±0.6 66.9±0.6 65.4±1.0 56.7±8.8 37.8±5.1 95.8±3.8 69.1±1.6
             92.0±0.4 65.8±1.5 64.8±0.2 44.4±3.8 41.1±7.7 93.3±1.4 66.9±1.8
             92.4±0.4 66.6±1.0 65.7±0.8 48.9±6.9 41.1±7.7 95.0±2.5 68.3±2.7""",
}

# Table A3: (batch, context tokens) in generation-phase order, TP2, uniform context.
REPLAY_SHAPES = {
    "4B-100": ((608, 621), (576, 798), (448, 1033), (304, 1384), (168, 1963)),
    "4B-300": ((640, 874), (576, 1170), (464, 1506), (336, 1968), (200, 2627)),
    "4B-500": ((640, 1463), (544, 1895), (400, 2568), (272, 3518), (176, 4767)),
    "8B-100": ((624, 547), (592, 676), (496, 879), (352, 1134), (192, 1529)),
    "8B-250": ((656, 1863), (384, 3271), (320, 3908), (272, 4435), (208, 5305)),
    "8B-400": ((368, 3461), (256, 4712), (224, 5529), (200, 6196), (176, 6972)),
}

# Table A2: task -> (questions, samples k, evaluated periodically, hub data set).
EVALUATION_TASKS = {
    "math500": (500, 8, True, "HuggingFaceH4/MATH-500"),
    "aime24": (30, 32, True, "Maxwell-Jia/AIME_2024"),
    "aime25": (30, 32, True, "yentinglin/aime_2025"),
    "amc23": (40, 32, False, "math-ai/amc23"),
    "olympiad": (674, 8, False, "math-ai/olympiadbench"),
    "minerva": (272, 8, False, "math-ai/minervamath"),
}

# Checkpoints of the workload and quantisation results (§B.1): updates of one BF16-trained lineage a model.
CHECKPOINTS = {"4b": (100, 300, 500), "8b": (100, 250, 400)}
EVALUATION_SEEDS = (42, 43, 44)  # §B.2

# Software of the paper: name -> (version, locator).
SOFTWARE = {"PyTorch": ("2.10.0", "§B.1"), "CUDA": ("12.8", "§B.1"), "vLLM": ("0.18.0", "§B.4")}

# Table A4: what each timer includes.
TIMING_SCOPES = {
    "decode_replay_ms": "captured forward, TP communication and argmax at fixed states",
    "decode_tokens_per_s": "committed tokens per summed GPU decode-service time",
    "collection_s": "collection with prefill, re-prefill and reward scoring",
    "iteration_s": "collection and learning with weight synchronisation and phase switches",
}

# Single numbers of text, captions and appendices: name | value | unit | locator.
NUMBERS = """
trace/4b-300/active_batch_ratio | 8.27 | x | §4.1
trace/4b-300/fewer_decode_calls | 8.35 | x | §4.1
trace/4b-300/resident_kv_ratio | 7.82 | x | §4.1
trace/4b-300/step_latency_ratio | 4.52 | x | §4.1
trace/4b-300/decode_throughput_ratio | 1.83 | x | §4.1
trace/4b-300/first_interval_calls_sync | 16379 | calls | §B.3
trace/4b-300/first_interval_calls_async | 1759 | calls | §B.3
trace/4b-300/displayed_calls | 17000 | calls | §B.3
trace/8b-400/decode_throughput_ratio | 0.98 | x | §D.1
trace/8b-400/active_kv_async | 91.7 | GB | §D.1
trace/8b-400/active_kv_sync | 66.8 | GB | §D.1
trace/8b-400/pool_capacity | 93.9 | GB | §D.1
trace/pool_pages_4b | 83022 | pages | §B.3
trace/pool_pages_8b | 79639 | pages | §B.3
trace/pool_positions_4b | 1328352 | positions | §B.3
trace/pool_positions_8b | 1274224 | positions | §B.3
trace/kv_bytes_per_position | 73728 | bytes | §B.3
trace/max_active_requests | 1024 | requests | §B.3
trace/warmup_rounds | 3 | rounds | §B.3
trace/measured_rounds_4b | 12 | rounds | §B.3
trace/measured_rounds_8b | 6 | rounds | §B.3
trace/sampling_seed | 6101 | seed | §B.3
trace/smoothing_window | 65 | calls | §B.3
trace/smoothing_stride | 8 | calls | §B.3
trace/requests_per_replica | 512 | requests | §C.4
roofline/weight_bytes_4b_tp2 | 4.022272 | GB | §B.4
roofline/gflop_per_token_4b_tp2 | 4.022272 | GFLOP | §B.4
roofline/hbm_bandwidth | 4.8 | TB/s | §B.4
roofline/dense_bf16 | 989.5 | TFLOP/s | §B.4
replay/4B-100/kv4 | 1.53 | x | Fig. 3b
replay/4B-300/kv4 | 1.71 | x | Fig. 3b
replay/4B-500/kv4 | 1.86 | x | Fig. 3b
replay/4b/kv8_lowest | 1.30 | x | Fig. 3b
replay/4b/kv8_highest | 1.41 | x | Fig. 3b
replay/8B-100/kv4 | 1.44 | x | Fig. A2
replay/8B-400/kv4 | 1.97 | x | Fig. A2
replay/8b/kv8_lowest | 1.22 | x | Fig. A2
replay/8b/kv8_highest | 1.52 | x | Fig. A2
replay/8b/fp8_kv_lowest | 0.97 | x | Fig. A2
replay/8b/fp8_kv_highest | 1.09 | x | Fig. A2
replay/8b/w8a8_highest | 1.06 | x | Fig. A2
replay/samples_per_state | 90 | samples | §B.4
replay/blocks | 3 | blocks | §B.4
replay/phases | 5 | phases | §B.4
replay/median_for_mean_4b | 0.006 | x | §B.4
replay/median_for_mean_8b | 0.002 | x | §B.4
replay/sampled_context_8b_400 | 3463 | tokens | Table A3
replay/bf16_repeat_spread | 0.3 | % | §B.4
ragged/4b/kv4rl | 1.90 | x | Fig. 4c
ragged/4b/retention_vs_kv4 | 94 | % | §5.2
ragged/8b/retention_vs_kv4 | 98 | % | §D.3
ragged/4b/states | 24 | states | §B.5
ragged/4b/requests_lowest | 407 | requests | §B.5
ragged/4b/requests_highest | 475 | requests | §B.5
ragged/4b/mean_context_lowest | 1400 | tokens | §B.5
ragged/4b/mean_context_highest | 1700 | tokens | §B.5
ragged/8b/states | 11 | states | §B.5
ragged/8b/requests_lowest | 260 | requests | §B.5
ragged/8b/requests_highest | 374 | requests | §B.5
ragged/8b/mean_context_lowest | 3300 | tokens | §B.5
ragged/8b/mean_context_highest | 4700 | tokens | §B.5
ragged/warmup_calls | 10 | calls | §B.5
ragged/timed_calls | 90 | calls | §B.5
fidelity/4b/kl_reduction_16_128 | 7.0 | x | Fig. 4b
fidelity/8b/kl_reduction_16_128 | 5.7 | x | Fig. A3c
fidelity/4b/checkpoint | 300 | updates | §B.5
fidelity/8b/checkpoint | 200 | updates | §B.5
fidelity/prompts | 32 | prompts | §B.5
fidelity/positions_per_response | 8 | positions | §B.5
fidelity/bootstraps | 10000 | draws | §B.5
fidelity/states | 256 | states | §B.5
fidelity/protected_positions | 144 | positions | Fig. 4b
fidelity/widest_recent | 512 | positions | §D.3
fidelity/narrowest_recent | 16 | positions | §D.3
storage/4b/group128/kl | 8.14e-3 | nats | Fig. A4b
storage/4b/group32/kl | 3.86e-3 | nats | Fig. A4b
storage/4b/group16/kl | 1.94e-3 | nats | Fig. A4b
storage/group128/bits | 4.25 | bits | Fig. A4b
storage/group32/bits | 5.00 | bits | Fig. A4b
storage/group16/bits | 6.00 | bits | Fig. A4b
storage/nvfp4/bits | 4.75 | bits | Fig. A4c
storage/mxfp4/bits | 4.25 | bits | Fig. A4c
storage/nvfp4/scale_group | 16 | elements | §D.4
storage/nvfp4/global_scale_bits | 0.25 | bits | §D.4
storage/mxfp4/scale_group | 32 | elements | §D.4
storage/4b/rotate_kv_over_k | 0.89 | ratio | §D.4
storage/8b/rotate_kv_over_k | 1.29 | ratio | §D.4
learning/8b/math500/bf16 | 88.16 | % | §5.2
learning/8b/math500/kv4rl | 87.68 | % | §5.2
learning/8b/math500/kv4_deficit | 5.24 | points | §1
learning/4b/reward_gap/kv4rl | 1.1 | points | §D.6
learning/4b/reward_gap/kv4 | 4.6 | points | §D.6
learning/accuracy_gap_limit | 0.5 | points | §6.3
learning/8b/mean_deficit_kv4 | 4.6 | points | §6.3
learning/4b/mean_deficit_kv4 | 0.8 | points | §6.3
learning/8b/kv4_falls_behind_after | 200 | updates | §D.5
rollout/8b/cumulative | 1.80 | x | Fig. 6b
rollout/8b/first_100 | 1.45 | x | §6.2
rollout/8b/last_50 | 1.97 | x | §6.2
rollout/4b/cumulative | 1.57 | x | Fig. A6b
rollout/4b/last_50 | 1.72 | x | §D.6
rollout/4b/hours_bf16 | 8.65 | h | §D.6
rollout/4b/hours_kv4rl | 5.50 | h | §D.6
iteration/8b/cumulative | 1.27 | x | Fig. 6b
iteration/4b/cumulative | 1.17 | x | Fig. A6b
iteration/4b/hours_bf16 | 19.80 | h | §D.6
iteration/4b/hours_kv4rl | 16.87 | h | §D.6
iteration/8b/rollout_share_bf16 | 47 | % | §6.2
iteration/8b/rollout_share_bf16_last_50 | 54.1 | % | Fig. A8
iteration/8b/rollout_share_kv4rl_last_50 | 37.4 | % | Fig. A8
iteration/8b/update_share_bf16_last_50 | 29.0 | % | Fig. A8
iteration/8b/update_share_kv4rl_last_50 | 39.6 | % | Fig. A8
iteration/8b/learner_share_kv4rl_last_50 | 60.5 | % | §D.7
length/4b/mean_bf16 | 1450 | tokens | §6.2
length/4b/mean_kv4rl | 1460 | tokens | §6.2
length/4b/late | 2000 | tokens | §6.2
length/8b/late | 5500 | tokens | §6.2
length/8b/kv4rl_within | 1 | % | §6.2
updates/4b | 600 | updates | §6.1
updates/8b | 400 | updates | §6.1
smoothing/iterations | 20 | updates | §B.6
config/gpus | 4 | GPUs | Table A1
config/replicas | 2 | replicas | Table A1
config/tensor_parallel | 2 | GPUs | Table A1
config/groups_per_update | 128 | groups | Table A1
config/responses_per_group | 8 | responses | Table A1
config/max_prompt_tokens | 1024 | tokens | Table A1
config/max_response_tokens | 16384 | tokens | Table A1
config/temperature | 1.0 | 1 | Table A1
config/top_p | 1.0 | 1 | Table A1
config/oversubscription | 1 | 1 | Table A1
config/age_limit | 12 | updates | Table A1
config/adam_beta1 | 0.9 | 1 | Table A1
config/adam_beta2 | 0.999 | 1 | Table A1
config/learning_rate | 1e-6 | 1 | Table A1
config/warmup_updates | 10 | updates | Table A1
config/weight_decay | 0.01 | 1 | Table A1
config/max_grad_norm | 1.0 | 1 | Table A1
config/ppo_epochs | 1 | epochs | Table A1
config/clip_lowest | 0.8 | 1 | Table A1
config/clip_highest | 1.2 | 1 | Table A1
config/dual_clip | 3.0 | 1 | Table A1
config/kl_coefficient | 0.001 | 1 | Table A1
config/tis_clip | 5 | 1 | Table A1
config/page_tokens | 16 | tokens | Table A1
config/max_active_requests | 1024 | requests | Table A1
config/sink_tokens | 16 | positions | Table A1
config/recent_tokens | 128 | positions | Table A1
config/training_seed | 43 | seed | §D.5
evaluation/temperature | 0.6 | 1 | §B.2
evaluation/top_p | 0.95 | 1 | §B.2
evaluation/max_response_tokens | 16384 | tokens | §B.2
evaluation/max_prompt_tokens | 2048 | tokens | §B.2
evaluation/olympiad_tolerance | 1e-8 | 1 | §B.2
evaluation/minerva_tolerance | 1e-4 | 1 | §B.2
"""

# 95 % intervals published with a number above.
INTERVALS = {"storage/4b/rotate_kv_over_k": (0.55, 1.53), "storage/8b/rotate_kv_over_k": (0.63, 3.04)}


@dataclass(frozen=True)
class Published:
    """One number of the paper: `spread` is a sample standard deviation, `low`/`high` a 95 % interval."""

    name: str
    value: float
    unit: str
    locator: str
    spread: float | None = None
    low: float | None = None
    high: float | None = None


def _table(prefix: str, locator: str, models: dict[str, str]) -> list[Published]:
    found = []
    for model, text in models.items():
        for precision, line in zip(PRECISION_ROWS, text.split("\n"), strict=True):
            for task, cell in zip(TASKS, line.split(), strict=True):
                value, spread = map(float, cell.split("±"))
                found.append(Published(f"{prefix}/{model}/{precision}/{task}", value, "%", locator, spread))
    return found


def _numbers() -> list[Published]:
    found = []
    for line in NUMBERS.strip().split("\n"):
        name, value, unit, locator = (word.strip() for word in line.split("|"))
        low, high = INTERVALS.get(name, (None, None))
        found.append(Published(name, float(value), unit, locator, low=low, high=high))
    return found


PUBLISHED: dict[str, Published] = {
    item.name: item
    for item in [*_table("table1", "Table 1", TABLE_1), *_table("table_a5", "Table A5", TABLE_A5), *_numbers()]
}
