"""Every setting, once: frozen dataclasses whose fields carry their row of Table A1.

A wrong value raises `InputError`, a `ValueError`, when the object is made, naming the field, the value and what would
be right.
"""

import math
from dataclasses import dataclass, field

PRECISIONS = ("bf16", "kv8", "kv4", "kv4rl")
PAGE_TOKENS = 16
HEAD_DIMS = (64, 128, 256)
MAX_PROTECTED = 1 << 16  # sink or recent positions: beyond this the side buffer is no small addition any more
MAX_GROUP = 16  # query heads per KV head
LARGEST = 1e6  # of rates and coefficients: finite, and far above anything that trains
MAX_OVERSUBSCRIPTION = 1000.0  # beta: a pool of a thousand updates' prompts is a slip of the keyboard


class InputError(ValueError):
    """What was given (a setting, a file, a prompt) cannot be used; the message says what could be.

    Command lines end with its message alone (`kv4rl.cli`); any other exception is a bug and shows where it happened.
    """


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise `InputError` in the one form all boundaries use: field, value, what would be right."""
    if not condition:
        raise InputError(f"{name}={value!r}: expected {expected}")


def require_number(value: object, name: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Raise `InputError` unless `value` is a number in [low, high], or in (low, high] with `open_low`; NaN never is."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    above = number and (value > low if open_low else value >= low)
    bounds = f"a number {'>' if open_low else '>='} {low:g}" + (f" and <= {high:g}" if high < math.inf else "")
    require(above and value <= high, name, value, bounds)


def require_integer(value: object, name: str, least: int) -> None:
    """Raise `InputError` unless `value` is an int of at least `least` (a bool is none)."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(ok, name, value, f"an integer >= {least}")


@dataclass(frozen=True)
class KVConfig:
    """How keys and values are stored and read (§5, §A.3)."""

    precision: str = "kv4rl"  # bf16 (the model's own dtype, unquantised), kv8, kv4 or kv4rl
    sink_tokens: int = 16  # s: first positions kept in INT8 as well ("KV4-RL protection", Table A1)
    recent_tokens: int = 128  # w: most recent positions kept in INT8 as well (Table A1)
    probability_operand: str = "fp16"  # P of P·V on the main path: "fp16", or the paper's "u8" (§A.3)

    def __post_init__(self):
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        for name in ("sink_tokens", "recent_tokens"):
            require_integer(getattr(self, name), name, 0)
            require(getattr(self, name) <= MAX_PROTECTED, name, getattr(self, name), f"at most {MAX_PROTECTED}")
        require(
            self.probability_operand in ("fp16", "u8"), "probability_operand", self.probability_operand, "fp16 or u8"
        )

    @property
    def protected_tokens(self) -> int:
        """Side-buffer entries per request slot: s + w for `kv4rl`, else 0."""
        return self.sink_tokens + self.recent_tokens if self.precision == "kv4rl" else 0


def require_protected_fits(kv: KVConfig, max_positions: int) -> None:
    """Raise `InputError`, naming both numbers, if more positions are protected than a model has."""
    both = f"sink_tokens + recent_tokens = {kv.sink_tokens} + {kv.recent_tokens}"
    expected = f"at most the model's {max_positions} positions"
    require(kv.protected_tokens <= max_positions, both, kv.protected_tokens, expected)


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are collected (§3 "Quota-based partial rollout", §A.1)."""

    collector: str = "partial"  # "partial" (quota-based, carries prefixes) or "sync" (waves)
    groups_per_update: int = 128  # T ("Prompt groups", Table A1)
    responses_per_group: int = 8  # G ("responses per group", Table A1)
    oversubscription: float = 1.0  # beta ("Request-pool oversubscription", Table A1)
    age_limit: int = 12  # eta, in policy updates ("age limit", Table A1)
    max_prompt_tokens: int = 1024  # "Prompt / response token limits", Table A1
    max_response_tokens: int = 16384  # counted over all collection intervals, once
    max_active_requests: int = 1024  # request slots per replica (Table A1)
    step_tokens: int = 8192  # token budget of one engine step, decode first, prefill chunks in what is left
    workspace_tokens: int = 32768  # unquantised K/V kept for requests whose prefill is under way
    cache_pages: int = 4096  # pages of 16 tokens per replica; training on GPUs: 0 is what the memory leaves (§A.2)
    temperature: float = 1.0  # "Sampling temperature / top-p", Table A1; training asserts 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int = 43  # run seed of the sampling noise (§D.5)

    def __post_init__(self):
        require(self.collector in ("partial", "sync"), "collector", self.collector, "partial or sync")
        for name in ("groups_per_update", "responses_per_group", "age_limit", "max_prompt_tokens"):
            require_integer(getattr(self, name), name, 1)
        for name in ("max_response_tokens", "max_active_requests", "step_tokens", "workspace_tokens"):
            require_integer(getattr(self, name), name, 1)
        require_integer(self.cache_pages, "cache_pages", 0)
        negative = isinstance(self.oversubscription, int | float) and self.oversubscription < 0
        holds = f"a number >= 0: the pool, T (1 + oversubscription), must hold the quota, T={self.groups_per_update}"
        require(not negative, "oversubscription", self.oversubscription, holds)
        require_number(self.oversubscription, "oversubscription", 0, MAX_OVERSUBSCRIPTION)
        require_number(self.temperature, "temperature", 0, open_low=True)
        require_number(self.top_p, "top_p", 0, 1, open_low=True)
        require_integer(self.top_k, "top_k", 0)
        require_integer(self.seed, "seed", 0)

    @property
    def pool_groups(self) -> int:
        """Groups held at the start of a collection: T (1 + beta), rounded down (§A.1)."""
        return int(self.groups_per_update * (1 + self.oversubscription) + 1e-9)


@dataclass(frozen=True)
class GRPOConfig:
    """How the learner updates the policy (§3, Table A1)."""

    learning_rate: float = 1e-6  # "Learning rate / warmup"
    warmup_updates: int = 10
    betas: tuple[float, float] = (0.9, 0.999)  # "Optimizer: AdamW"
    weight_decay: float = 0.01  # "Weight decay / gradient-norm limit"
    max_grad_norm: float = 1.0
    clip_low: float = 0.2  # "Policy-ratio clipping": [1 - clip_low, 1 + clip_high] = [0.8, 1.2]
    clip_high: float = 0.2
    dual_clip: float = 3.0  # bound on the negative-advantage loss, in units of |A|
    tis_clip: float = 5.0  # C of Eq. 3.5
    kl_coefficient: float = 0.001  # "Reference-KL coefficient / estimator": k3
    advantage_epsilon: float = 1e-6  # delta of Eq. 3.1
    microbatch_tokens: int = 16384  # packed tokens a microbatch holds at most (one longer sequence still fits)
    compute_dtype: str = "auto"  # "auto": bfloat16 on CUDA, float32 on CPU; masters are always float32

    def __post_init__(self):
        for name in ("learning_rate", "weight_decay", "clip_low", "clip_high", "kl_coefficient", "advantage_epsilon"):
            require_number(getattr(self, name), name, 0, LARGEST, open_low=name == "advantage_epsilon")
        pair = isinstance(self.betas, tuple) and len(self.betas) == 2
        below_one = pair and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in self.betas)
        require(below_one, "betas", self.betas, "two numbers >= 0 and < 1")
        require_number(self.max_grad_norm, "max_grad_norm", 0, open_low=True)
        require_number(self.dual_clip, "dual_clip", 1, open_low=True)
        require_number(self.tis_clip, "tis_clip", 1)
        require_integer(self.warmup_updates, "warmup_updates", 0)
        require_integer(self.microbatch_tokens, "microbatch_tokens", 1)
        require(
            self.compute_dtype in ("auto", "float32", "bfloat16"), "compute_dtype", self.compute_dtype,
            "auto, float32 or bfloat16",
        )  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """One training run: the phase loop of §3 with everything it needs."""

    model: str = "mini-qwen3"  # a local directory, a name under data/models/, or a hub id
    tasks: str = "mini"  # mini or sums, made here; or a .jsonl or .parquet file, or a hub id, with golds (§B.1)
    output_dir: str = "runs/train"  # checkpoints, metrics.jsonl, TensorBoard events
    updates: int = 400
    seed: int = 43
    device: str = "auto"  # "auto", "cpu" or "cuda"
    tensor_parallel: int = 1  # GPUs of one rollout replica ("Two DP replicas with TP2 each", Table A1)
    memory: str = "resident"  # both learner and KV cache stay on the GPU; "phased": they take turns (§A.2)
    reading: str = "verl"  # what counts as an answer: any expression ("verl"), or only the last box ("last_box")
    evaluate_every: int = 0  # updates between evaluations; 0: only at the start and the end
    evaluate_prompts: int = 64
    evaluate_samples: int = 8  # k of avg@k and pass@k
    evaluate_sets: tuple[str, ...] = ()  # sets of Table A2 too, with its k: NAME (from the hub), NAME=FILE, FILE
    evaluate_temperature: float = 0.6  # Table A2
    evaluate_top_p: float = 0.95  # Table A2
    checkpoint_every: int = 1
    keep_checkpoints: int = 2
    kv: KVConfig = field(default_factory=KVConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)

    def __post_init__(self):
        for name in ("model", "tasks", "output_dir"):
            text = isinstance(getattr(self, name), str) and bool(getattr(self, name))
            require(text, name, getattr(self, name), "a string (checkpoints keep it), not empty")
        counts = ("updates", "evaluate_prompts", "evaluate_samples", "checkpoint_every", "keep_checkpoints")
        for name in (*counts, "tensor_parallel"):
            require_integer(getattr(self, name), name, 1)
        sets = isinstance(self.evaluate_sets, tuple) and all(
            isinstance(name, str) and name for name in self.evaluate_sets
        )
        require(sets, "evaluate_sets", self.evaluate_sets, "names of sets, NAME=FILE, or files")
        require(self.memory in ("resident", "phased"), "memory", self.memory, "resident or phased")
        for name in ("evaluate_every", "seed"):
            require_integer(getattr(self, name), name, 0)
        require_number(self.evaluate_temperature, "evaluate_temperature", 0)
        require_number(self.evaluate_top_p, "evaluate_top_p", 0, 1, open_low=True)
        require(self.reading in ("verl", "last_box"), "reading", self.reading, "verl or last_box")
        require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")
        plain = self.rollout.temperature == 1.0 and self.rollout.top_p == 1.0 and self.rollout.top_k == 0
        require(
            plain, "rollout.temperature/top_p/top_k",
            (self.rollout.temperature, self.rollout.top_p, self.rollout.top_k),
            "1.0 / 1.0 / 0: recorded log-probs must be those of the sampling distribution (§3)",
        )  # fmt: skip
