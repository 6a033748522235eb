"""A carry pool without the GPU time that forms it: earlier intervals simulated, then handed to an engine's collector.

The simulator runs the same collector, scheduler, prompts and lengths (§B.3: schedules agree with an engine's step for
step); only the tokens are invented, and they change no kernel's work. What follows is real: carried prefixes are
prefilled again, and the interval is measured.
"""

import numpy as np

from kv4rl.config import RolloutConfig
from kv4rl.ranks import Replica
from kv4rl.rollout.collector import Collector
from kv4rl.rollout.forced import RandomPrompts
from kv4rl.rollout.share import SharedStream
from kv4rl.rollout.skipping import SkippingEngine
from kv4rl.rollout.workload import Workload


def carry_simulated(
    collector: Collector, config: RolloutConfig, workload: Workload, replica: Replica, *, intervals: int,
    vocab_size: int, eos: int,
) -> None:  # fmt: skip
    """Set an engine's collector to where `intervals` collections at policy versions 0 … intervals - 1 leave it."""
    given = {"intervals": intervals, "vocab_size": vocab_size, "eos": eos}
    collector.load_state(simulated_state(type(collector), config, workload, replica, **given))


def simulated_state(
    kind: type[Collector], config: RolloutConfig, workload: Workload, replica: Replica, *, intervals: int,
    vocab_size: int, eos: int,
) -> dict:  # fmt: skip
    """`Collector.state()` after these collections, with invented tokens."""
    engine = SkippingEngine.within(config, workload)
    collector = kind(engine, dealt(workload.stream(), replica), config, grade=None, eos_token_ids=(eos,))
    for _ in range(intervals):
        collector.collect()
        engine.update_weights()
    state, prompts = collector.state(), RandomPrompts(workload, vocab_size)
    for group in state["groups"]:
        index = int(group["prompt"]["prompt_id"])
        group["prompt"]["tokens"] = prompts.prompt(index).tokens
        for request in group["requests"]:
            request["prompt_tokens"] = list(group["prompt"]["tokens"])
            _invent(request, np.random.default_rng([workload.seed, index, 2, request["sibling"]]), vocab_size, eos)
    return state


def dealt(stream, replica: Replica):
    """A replica's turns at a prompt stream; the stream itself where there is one replica."""
    return stream if replica.count == 1 else SharedStream(stream, replica.number, replica.count)


def _invent(request: dict, rng: np.random.Generator, vocab_size: int, eos: int) -> None:
    """Other tokens than the simulator's one, none of them an end; a response that has ended keeps its last."""
    drawn = rng.integers(vocab_size - 1, size=len(request["tokens"]))
    tokens = (drawn + (drawn >= eos)).tolist()
    if request["finish_reason"] == "eos":
        tokens[-1] = eos
    request["tokens"] = tokens
