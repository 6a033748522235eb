import json

import pytest
from transformers import Qwen3Config

from kv4rl.config import GRPOConfig, KVConfig, RolloutConfig, TrainConfig
from kv4rl.model.config import DecoderConfig
from kv4rl.model.decoder import Decoder
from kv4rl.model.weights import save_decoder
from kv4rl.rewards.grader import Verdict
from kv4rl.tasks.tokenizer import build_tokenizer


class ParityGrader:
    """Stands in for the worker pool: a response is correct when it holds an even number of the digit 7."""

    def __init__(self):
        self._done = {}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def submit(self, key, text, gold):
        right = float(text.count("7") % 2 == 0)
        self._done[key] = Verdict(verl=right, last_box=0.0, has_box="\\boxed{" in text)

    def results(self, wait=True):
        done, self._done = self._done, {}
        return done

    def grade_many(self, items):
        for index, (text, gold) in enumerate(items):
            self.submit(index, text, gold)
        return list(self.results().values())


@pytest.fixture
def parity_grader(monkeypatch):
    """`train` grades at no cost."""
    monkeypatch.setattr("kv4rl.train.Grader", ParityGrader)
    return ParityGrader


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Directory of a random 2-layer Qwen3 with the mini task's tokenizer; it ends a response every 30 tokens or so."""
    directory = tmp_path_factory.mktemp("tiny-qwen3")
    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=128, tie_word_embeddings=True,
        initializer_range=0.1, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    save_decoder(Decoder.random(DecoderConfig.from_hf(config), seed=0), directory, tokenizer)
    return str(directory)


@pytest.fixture
def tiny_config(tiny_model, tmp_path):
    """A function of changed fields: a run of a second or two."""

    def make(**changes) -> TrainConfig:
        rollout = RolloutConfig(
            groups_per_update=2, responses_per_group=4, age_limit=2, max_prompt_tokens=32, max_response_tokens=40,
            max_active_requests=12, step_tokens=64, workspace_tokens=256, cache_pages=48,
        )  # fmt: skip
        grpo = GRPOConfig(learning_rate=1e-3, warmup_updates=2, microbatch_tokens=128)
        fields = {
            "model": tiny_model, "output_dir": str(tmp_path / "run"), "updates": 4, "evaluate_prompts": 2,
            "evaluate_samples": 2, "kv": KVConfig(sink_tokens=2, recent_tokens=4), "rollout": rollout, "grpo": grpo,
        }  # fmt: skip
        return TrainConfig(**(fields | changes))

    return make


@pytest.fixture
def tiny_tasks(tmp_path):
    """Path of a .jsonl file of eight prompts."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"n={i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(8)))
    return path
