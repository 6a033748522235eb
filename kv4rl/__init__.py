"""kv4rl: INT4 KV caches with INT8-protected sink and recent positions, for asynchronous RL rollout.

The names below are imported on first use, so that `import kv4rl` costs nothing and needs no optional package.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "KVConfig": "kv4rl.config",
    "RolloutConfig": "kv4rl.config",
    "GRPOConfig": "kv4rl.config",
    "TrainConfig": "kv4rl.config",
    "KVCache": "kv4rl.cache.kv_cache",
    "RolloutEngine": "kv4rl.engine.engine",
    "Sampling": "kv4rl.engine.sampler",
    "SyncCollector": "kv4rl.rollout.sync",
    "PartialCollector": "kv4rl.rollout.partial",
    "GRPOLearner": "kv4rl.grpo.learner",
    "load_decoder": "kv4rl.model.weights",
    "load_tokenizer": "kv4rl.model.weights",
    "preset": "kv4rl.presets",
}
# `kv4rl.train` is the module with the function of the same name: import that from it.
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'kv4rl' has no attribute {name!r}: it exports {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
