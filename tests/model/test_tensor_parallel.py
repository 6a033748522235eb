"""Two ranks over gloo against the whole model in one process; refusals; a rank that dies."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from kv4rl.model.communicator import Communicator, PeerLost
from kv4rl.model.config import DecoderConfig
from kv4rl.model.tensor_parallel import shard_config, split_dimension
from kv4rl.model.weights import load_config

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")
ENDS_WITHIN_S = 60
pytestmark = pytest.mark.slow


def start(mode, out, ranks=2):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(WORKER), mode, str(out)]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    return processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the two ranks found."""
    out = tmp_path_factory.mktemp("ranks")
    processes = start("compare", out)
    errors = [process.communicate(timeout=280)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_logits_differ_from_the_whole_models_by_float32_rounding(ranks):
    for found in ranks:
        whole, shard = (error.double() - found["exact"] for error in found["logits"])
        assert shard.square().mean() <= 1.5 * whole.square().mean()
        assert shard.abs().max() <= 2 * whole.abs().max()
    assert torch.equal(ranks[0]["logits"][1], ranks[1]["logits"][1])


@pytest.mark.parametrize("precision", ["bf16", "kv4rl"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rollouts_give_the_whole_models_tokens_on_every_rank(ranks, precision, temperature):
    key = (precision, temperature)
    tokens, logps = ranks[0]["whole", *key]
    assert len({tuple(response) for response in tokens}) == 4
    for found in ranks:
        assert found["shard", *key][0] == tokens
        for ours, theirs in zip(found["shard", *key][1], logps, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-3)
    assert ranks[0]["shard", *key][1] == ranks[1]["shard", *key][1], "one log-probability on all ranks, to the bit"


def test_forced_lengths_are_the_same_on_all_ranks(ranks):
    for found in ranks:
        whole, shard = found["forced"]
        assert whole == shard and all(response[-1] == 1 for response in shard)


def test_a_weight_sync_writes_each_shard_once_from_whole_tensors(ranks):
    for found in ranks:
        assert found["writes"] == {1}
        whole, shard = found["updated"]
        torch.testing.assert_close(shard, whole, rtol=1e-4, atol=1e-4 * whole.abs().max().item())
        assert "embed_tokens.weight.shape=(1, 256): expected (32, 256)" in found["refused"]


def test_the_sharded_sampler_draws_what_the_whole_one_draws(ranks):
    for a, b in zip(ranks[0]["samples"], ranks[1]["samples"], strict=True):
        (tokens, logp), ours, theirs = a[0], a[1], b[1]
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[0], tokens)
        torch.testing.assert_close(ours[1], logp, rtol=1e-6, atol=1e-6)
        assert 0 < (tokens < 32).sum() < len(tokens)


def test_what_one_rank_lacks_no_rank_uses(ranks):
    """A rank that fell back by itself would leave its peers in a sum that never ends."""
    own = [f"rank {rank} has no such memory" for rank in range(2)]
    other = "another rank of the group could not have it"
    assert [found["failures"] for found in ranks] == [[None, other, own[0]], [None, own[1], own[1]]]


def test_a_rank_that_dies_ends_the_others(tmp_path):
    processes = start("die", tmp_path)
    assert processes[1].wait(timeout=120) == 3
    begin = time.monotonic()
    try:
        error = processes[0].communicate(timeout=ENDS_WITHIN_S)[1]
    finally:
        processes[0].kill()
    assert processes[0].returncode != 0 and time.monotonic() - begin < ENDS_WITHIN_S
    assert "Error" in error


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_hangs_ends_its_own_group_alone(tmp_path, ranks):
    """Within the group's few seconds, although the processes' own group would wait for half an hour."""
    processes = start("hang", tmp_path, ranks)
    try:
        error = processes[0].communicate(timeout=120)[1]
        others = [process.wait(timeout=120) for process in processes[2:]]
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode != 0 and "imed out" in error, error
    assert others == [0] * (ranks - 2)


def test_a_step_that_never_ends_names_the_ranks_that_may_be_gone(monkeypatch):
    monkeypatch.setattr("kv4rl.model.communicator.TIMEOUT_S", 0.05)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    seen = iter([False, False, True])
    Communicator(None).wait(SimpleNamespace(query=lambda: next(seen)))
    assert next(seen, None) is None, "asked until it was done"
    with pytest.raises(PeerLost, match=r"rank 1 .* waited 0\.05 s for its step: one of the ranks \[0\]"):
        Communicator(None).wait(SimpleNamespace(query=lambda: False))


@pytest.mark.parametrize(("size", "message"), [(3, "kv_heads, 2"), (4, "kv_heads, 2")])
def test_a_size_that_does_not_divide_the_heads_is_refused(size, message):
    config: DecoderConfig = load_config("mini-qwen3")
    with pytest.raises(ValueError, match=f"tensor_parallel={size}: expected a divisor of the model's {message}"):
        shard_config(config, size)


def test_every_parameter_of_every_family_is_split_as_its_layer_computes():
    split = {
        "model.embed_tokens.weight": 0, "lm_head.weight": 0, "model.norm.weight": None,
        "model.layers.0.self_attn.k_proj.bias": 0, "model.layers.0.self_attn.q_norm.weight": None,
        "model.layers.0.self_attn.o_proj.weight": 1, "model.layers.0.self_attn.o_proj.bias": None,
        "model.layers.3.mlp.gate_proj.weight": 0, "model.layers.3.mlp.down_proj.weight": 1,
        "model.layers.3.input_layernorm.weight": None,
    }  # fmt: skip
    assert {name: split_dimension(name) for name in split} == split
