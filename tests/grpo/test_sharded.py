"""The learner over two processes (FSDP2 on gloo) beside the learner of one: same gradients, metrics and states."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh

from kv4rl.config import GRPOConfig
from kv4rl.engine.request import Request
from kv4rl.grpo.balance import balanced
from kv4rl.grpo.learner import GRPOLearner
from kv4rl.grpo.packing import join, pack
from kv4rl.grpo.sharded import shard

CONFIG = GRPOConfig(learning_rate=1e-3, warmup_updates=0, kl_coefficient=0.05, microbatch_tokens=60)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, tiny_decoder, make_groups):
    """(what both ranks were given, what rank 0 found)."""
    folder = tmp_path_factory.mktemp("ranks")
    lonely = make_groups(9, groups=1, siblings=2)  # one response with tokens: the other rank has only padding
    empty = Request(lonely[0].prompt.prompt_id, 1, lonely[0].prompt.tokens, 5, (1,))
    empty.finish("abort")
    lonely[0].requests[1] = empty
    inputs = {"decoder": tiny_decoder(), "config": CONFIG, "groups": [make_groups(seed) for seed in range(3)]}
    inputs["lonely"] = lonely
    torch.save(inputs, folder / "in.pt")
    worker = str(Path(__file__).with_name("sharded_run.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", worker]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(folder / name) for name in ("in.pt", "out.pt")]
    done = subprocess.run([*command, *paths], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return inputs, torch.load(folder / "out.pt", weights_only=False)


def learner(inputs, dtype=torch.float32, **changes) -> GRPOLearner:
    decoder = copy.deepcopy(inputs["decoder"])
    return GRPOLearner(decoder, replace(CONFIG, **changes), inputs["decoder"])


def gradient(inputs, groups, **changes):
    kept, one = {}, learner(inputs, **changes)
    one._optimizer.step = lambda: kept.update(g=torch.cat([p.grad.flatten() for p in one.weights.parameters()]))
    return one.update(groups), kept["g"]


@pytest.mark.parametrize("case", ["several", "single"])
def test_two_ranks_have_the_gradients_and_metrics_of_one(two_ranks, case):
    """TRL #3021, prime-rl #583: a mean of ranks' means is not the token mean. Yardstick: another microbatch split."""
    inputs, found = two_ranks
    groups = inputs["groups"][0] if case == "several" else inputs["lonely"]
    metrics, one = gradient(inputs, groups)
    _, split = gradient(inputs, groups, microbatch_tokens=1000 if case == "several" else 1)
    rounding = max((one - split).abs().max(), torch.finfo(torch.float32).eps * one.abs().max())
    assert (found[case]["gradient"] - one).abs().max() <= 4 * rounding
    theirs = found[case]["metrics"]
    assert theirs.keys() == metrics.keys()
    for name in metrics.keys() - {"actor/microbatches"}:
        assert theirs[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-7), name


def test_states_do_not_depend_on_the_number_of_ranks(two_ranks):
    """Saved by two ranks, continued by two or by one; what the engine is sent is what the masters hold."""
    inputs, found = two_ranks
    for name, weight in found["last"]["weights"].items():
        assert torch.equal(weight, found["again"]["weights"][name]), name
        assert torch.equal(found["sent"][name], found["state"]["weights"][name]), name
    alone = learner(inputs)
    alone.load_state(found["state"])
    assert alone.updates == 2
    alone.update(inputs["groups"][2])
    step = {name: weight - found["state"]["weights"][name] for name, weight in alone.state()["weights"].items()}
    for name, weight in found["last"]["weights"].items():
        theirs = weight - found["state"]["weights"][name]
        assert (theirs - step[name]).norm() <= 1e-2 * step[name].norm(), name  # AdamW divides by tiny moments


def test_shards_moments_and_the_sharded_reference_may_leave(two_ranks):
    """The third update above was made after they had been away: bit for bit that of a learner which kept them."""
    inputs, found = two_ranks
    parameters = sum(parameter.nbytes for parameter in inputs["decoder"].parameters())
    assert 4 * parameters / 2 <= found["freed"] <= 4.2 * parameters / 2  # masters, two moments, reference; half a rank


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 50), max_size=30), ranks=st.integers(1, 5), max_tokens=st.integers(1, 120))
def test_every_sequence_is_trained_once_in_microbatches_within_the_budget(lengths, ranks, max_tokens):
    shares = balanced(lengths, ranks, max_tokens)
    assert len(shares) == ranks and len({len(parts) for parts in shares}) == 1
    parts = [part for share in shares for part in share]
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in part) for part in parts]
    assert all(load <= max(max_tokens, *lengths) for load in loads)
    if loads:
        assert max(loads) - min(loads) <= max(lengths)


def test_joined_batches_are_one_pack(make_groups):
    whole = pack(make_groups(4), torch.arange(12.0).reshape(3, 4))
    again = join([whole.sequences(i, i + 1) for i in range(12)])
    for name, column in vars(whole).items():
        assert torch.equal(getattr(again, name), column), name
    with pytest.raises(ValueError, match="parts"):
        join([])


def test_bad_shares_and_meshes_are_named(tiny_decoder):
    with pytest.raises(ValueError, match="ranks"):
        balanced([1], 0, 1)
    with pytest.raises(ValueError, match="microbatch_tokens"):
        balanced([1], 1, 0)

    class Plane(DeviceMesh):
        def __init__(self):
            pass

        ndim = 2
        __repr__ = lambda self: "Plane"

    with pytest.raises(ValueError, match="mesh=Plane"):
        shard(tiny_decoder(), torch.float32, Plane())
