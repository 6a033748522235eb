"""What no formula of the theory can use is a ValueError that names the field, the value and what would be right."""

import warnings

import pytest

from kv4rl.config import InputError, RolloutConfig
from kv4rl.theory import concentration as c
from kv4rl.theory import roofline
from kv4rl.theory.lengths import LengthDistribution
from kv4rl.theory.planner import kv_budget_bytes, plan
from kv4rl.theory.roofline import QWEN3_4B, ModelShape
from kv4rl.theory.schedules import simulate_pairs, simulate_refill, simulate_waves
from kv4rl.theory.step_cost import StepCost

LAW = LengthDistribution.bimodal(10, 200, 0.1)
COST = StepCost(QWEN3_4B)
NAN, INF = float("nan"), float("inf")

CASES = {
    "infinite pair": (lambda: c.slot_context([1], [INF]), r"lengths=\[inf\]: expected finite integers"),
    "fractional length": (lambda: c.slot_context([1], [1.5]), r"lengths=\[1\.5\]: expected finite integers"),
    "NaN length": (lambda: c.slot_context([1], [NAN]), r"lengths=\[nan\]"),
    "NaN prompt of a pair": (lambda: c.slot_context([NAN], [1]), r"prompts=\[nan\]: expected finite integers"),
    "fractional prompt of a pair": (lambda: c.slot_context([0.5], [1]), r"prompts=\[0\.5\]"),
    "NaN probability": (lambda: c.slot_context([1], [1], [NAN]), "probabilities=nan: expected numbers >= 0"),
    "negative prompt": (lambda: c.refill_context(LAW, -1), "prompt_tokens=-1: expected a finite number >= 0"),
    "NaN prompt": (lambda: c.refill_volume(LAW, 4, NAN), "prompt_tokens=nan: expected a finite number >= 0"),
    "prompt of a wave": (lambda: c.wave_volume(LAW, 4, -2), "prompt_tokens=-2"),
    "prompt of a wave's context": (lambda: c.wave_context(LAW, 4, INF), "prompt_tokens=inf"),
    "prompt beside moments": (lambda: c.refill_context_from_moments(2, 1, NAN), "prompt_tokens=nan"),
    "work of a negative prompt": (lambda: c.logical_work(-1, 5), "prompt_tokens=-1: expected numbers >= 0"),
    "work of a negative length": (lambda: c.logical_work(1, -1), "length_tokens=-1: expected numbers >= 0"),
    "no waves": (lambda: simulate_waves(LAW, 4, 1, waves=0, seed=0), "waves=0: expected an integer >= 2"),
    "refill for half a step": (lambda: simulate_refill(LAW, 4, 1, steps=0.5, seed=0), r"steps=0\.5: expected an int"),
    "refill of one slot": (lambda: simulate_refill(LAW, 1, 1, steps=9, seed=0), "slots=1: expected an integer >= 2"),
    "pairs without lengths": (lambda: simulate_pairs([1], [0], 4, steps=9, seed=0), r"lengths=\[0\.0\]"),
    "pairs in one slot": (lambda: simulate_pairs([1], [2], 1, steps=9, seed=0), "slots=1: expected an integer >= 2"),
    "no cap": (lambda: LengthDistribution.lognormal(10, 1, None), "cap=None: expected a token limit, an integer >= 1"),
    "fractional cap": (lambda: LengthDistribution.lognormal(10, 1, 9.5), r"cap=9\.5"),
    "infinite cap": (lambda: LengthDistribution.geometric(10, cap=INF), "cap=inf: expected a token limit"),
    "no median": (lambda: LengthDistribution.lognormal(None, 1, 9), "median=None: expected a finite number > 0"),
    "NaN sigma": (lambda: LengthDistribution.lognormal(10, NAN, 9), "sigma=nan: expected a finite number > 0"),
    "NaN mean": (lambda: LengthDistribution.geometric(NAN), "mean=nan: expected a finite number >= 1"),
    "a word for a mean": (lambda: LengthDistribution.geometric("10"), "mean='10': expected a finite number"),
    "words for lengths": (lambda: LengthDistribution(["a"], [1.0]), "support="),
    "half a slot to plan": (lambda: plan(COST, LAW, prompt_tokens=1, slots=1.5), r"slots=1\.5: expected an int"),
    "NaN prompt to plan": (lambda: plan(COST, LAW, prompt_tokens=NAN), "prompt_tokens=nan: expected a finite number"),
    "endless budget": (lambda: plan(COST, LAW, prompt_tokens=1, kv_budget=INF), "kv_budget=inf: expected a finite"),
    "NaN memory": (lambda: kv_budget_bytes(QWEN3_4B, tensor_parallel=2, hbm_bytes=NAN), "hbm_bytes=nan: expected"),
    "three GPUs for eight heads": (lambda: StepCost(QWEN3_4B, tensor_parallel=3), "tensor_parallel=3: expected a div"),
    "NaN GPUs": (lambda: roofline.weight_bytes(QWEN3_4B, tensor_parallel=NAN), "tensor_parallel=nan"),
    "no layers": (lambda: ModelShape(None, 8, 8, 1, 1, 8, 8), "layers=None: expected an integer >= 1"),
    "endless batch": (lambda: roofline.demands(QWEN3_4B, INF, 1), "active_requests=inf: expected a finite number > 0"),
    "no bandwidth": (lambda: roofline.demands(QWEN3_4B, 1, 1, bandwidth=0), "bandwidth=0: expected a finite"),
    "quota above the pool": (
        lambda: RolloutConfig(groups_per_update=128, oversubscription=-0.1),
        r"oversubscription=-0\.1: expected a number >= 0: the pool, .*, must hold the quota, T=128",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), CASES.values(), ids=CASES.keys())
def test_what_cannot_be_used_is_named(call, message):
    with warnings.catch_warnings(), pytest.raises(InputError, match=message):
        warnings.simplefilter("error")
        call()


@pytest.mark.parametrize("slots", [0, -1, 1.5, NAN, INF, None, "4", True])
@pytest.mark.parametrize(
    "call",
    [
        lambda slots: c.kv_concentration(LAW, slots),
        lambda slots: c.refill_volume(LAW, slots),
        lambda slots: c.wave_occupancy(LAW, slots),
        lambda slots: c.wave_context(LAW, slots),
        lambda slots: simulate_waves(LAW, slots, 1, waves=2, seed=0),
        lambda slots: simulate_refill(LAW, slots, 1, steps=9, seed=0),
        lambda slots: plan(COST, LAW, prompt_tokens=1, slots=slots),
    ],
    ids=["factor", "refill", "occupancy", "context", "waves", "simulated refill", "plan"],
)
def test_slots_that_are_no_positive_integer_are_named(call, slots):
    with pytest.raises(InputError, match=r"slots=.*: expected an integer >= "):
        call(slots)
