"""The plan of a run: what each phase holds, and a refusal that names every item."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kv4rl.config import KVConfig
from kv4rl.grpo.host_limit import available_bytes
from kv4rl.grpo.memory import Machine, plan_run, pool_pages
from kv4rl.model.shapes import shape_config
from kv4rl.presets import preset
from kv4rl.ranks import Ranks
from kv4rl.trainer import Trainer

H200, HOST = 141_000_000_000, 2_000_000_000_000
POOLS = {"qwen3_4b": 83022, "qwen3_8b": 79639}  # the paper's BF16 pools (§B.3)


def plan(name: str, ranks: int, elastic=True, **changes):
    rollout = replace(preset(name).rollout, cache_pages=POOLS[name])
    config = replace(preset(name), **({"rollout": rollout} | changes))
    return plan_run(config, shape_config(name.replace("_", "-")), config.rollout, Machine(ranks, ranks, elastic))


def pages(name: str, precision: str, *, elastic=True, total=H200) -> int:
    config = replace(preset(name), kv=KVConfig(precision))
    return pool_pages(config, shape_config(name.replace("_", "-")), config.rollout, Machine(4, 4, elastic), total)


@pytest.mark.parametrize("precision", ["bf16", "kv4rl"])
@pytest.mark.parametrize("name", ["qwen3_4b", "qwen3_8b"])
def test_the_papers_runs_fit_the_papers_machine(name, precision):
    """Table A1: four H200s, FSDP2 over all, the BF16 pool of §B.3 on each."""
    plan(name, 4, kv=KVConfig(precision)).check(H200, HOST)


def test_phases_hold_what_takes_its_turn_and_not_the_other():
    phased = plan("qwen3_4b", 4)
    assert "masters" not in phased.collect and "pages" not in phased.learn
    resident = plan("qwen3_4b", 4, memory="resident")
    assert {"masters", "moments", "reference", "pages"} <= resident.collect.keys() & resident.learn.keys()
    assert "pages" in plan("qwen3_4b", 4, elastic=False).learn
    assert "reference" not in plan("qwen3_4b", 4, grpo=replace(preset("mini").grpo, kl_coefficient=0.0)).learn


def test_masters_and_moments_are_divided_and_a_rank_alone_computes_with_a_copy():
    one, four = (plan("qwen3_4b", ranks, tensor_parallel=1).learn for ranks in (1, 4))
    parameters = 4.02e9
    assert one["masters"] == pytest.approx(4 * parameters, rel=0.01) and four["masters"] == one["masters"] // 4
    assert one["moments"] == 2 * one["masters"]
    assert one["compute weights"] == one["reference"] == one["masters"] // 2 and "compute weights" not in four


def test_what_does_not_fit_is_refused_item_by_item():
    with pytest.raises(ValueError, match=r"needed='\S+ GB': expected at most this GPU's 60 GB for phase 'learn'"):
        plan("qwen3_8b", 2, rollout=replace(preset("qwen3_8b").rollout, cache_pages=999)).check(60_000_000_000, HOST)
    with pytest.raises(ValueError, match=r"phase 'collect': model \S+ GB, workspace .* pages \S+ GB$"):
        plan("qwen3_8b", 4, kv=KVConfig("bf16")).check(80_000_000_000, HOST)
    with pytest.raises(
        ValueError, match=r"at most the 90 GB of CPU memory .*: masters of 4 \S+ GB, moments .* checkpoint"
    ):
        plan("qwen3_4b", 4).check(H200, 90_000_000_000)


def test_a_node_holds_its_ranks_states_and_the_first_one_a_checkpoint():
    """14 bytes a parameter over all ranks (masters, moments, reference), and 12 that are being saved."""
    host, parameters = plan("qwen3_4b", 4).host, 4.02e9
    assert sum(host.values()) == pytest.approx(26 * parameters, rel=0.01)
    assert host["checkpoint"] == pytest.approx(12 * parameters, rel=0.01)
    assert plan("qwen3_4b", 4, memory="resident").host.keys() == {"checkpoint"}


def test_each_precision_gets_the_pages_that_the_memory_leaves():
    """§A.2: floor(M_q / b_q); the BF16 pool comes near the paper's pinned one, and INT4 pages are a quarter of its."""
    for name, pool in POOLS.items():
        bf16, kv8, kv4rl, kv4 = (pages(name, precision) for precision in ("bf16", "kv8", "kv4rl", "kv4"))
        assert 0.85 * pool < bf16 < 1.15 * pool
        assert 1.7 * bf16 < kv8 < 2.1 * bf16 < 3 * bf16 < kv4rl < kv4 < 4.2 * bf16
        assert pages(name, "bf16", elastic=False) < bf16  # what stays while the learner works must fit beside it
    with pytest.raises(ValueError, match=r"budget_bytes=.*: model .*short by"):
        pages("qwen3_8b", "kv4rl", total=20_000_000_000)


def test_a_model_too_large_for_a_machine_without_a_gpu_is_refused_before_it_is_loaded(monkeypatch):
    monkeypatch.setattr("kv4rl.trainer.load_config", lambda name: shape_config("qwen3-4b"))
    monkeypatch.setattr("kv4rl.trainer.available_bytes", lambda: 24_000_000_000)
    small = replace(preset("qwen3_4b"), tensor_parallel=1, rollout=preset("mini").rollout)
    run = SimpleNamespace(config=small, device=torch.device("cpu"), ranks=Ranks(torch.device("cpu")))
    items = r"engine's weights of 1 16\.1 GB, masters of 1 16\.1 GB, moments of 1 32\.2 GB, reference .* checkpoint"
    with pytest.raises(ValueError, match=rf"at most the 24 GB of CPU memory that this node has left: {items}"):
        Trainer._within_memory(run, small.rollout)
    monkeypatch.setattr("kv4rl.trainer.available_bytes", lambda: 200_000_000_000)
    assert Trainer._within_memory(run, small.rollout) == small.rollout


@pytest.mark.parametrize("left", [1.0, 0.5])
def test_the_smallest_gpu_of_a_run_sizes_the_pool_of_all(monkeypatch, left):
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=H200))
    for name, value in {"gives_back": True, "available_bytes": HOST, "load_config": shape_config("qwen3-4b")}.items():
        monkeypatch.setattr(f"kv4rl.trainer.{name}", lambda *given, value=value: value)
    ranks = SimpleNamespace(size=4, gather=lambda size: [size, int(left * size), size, size])
    run = SimpleNamespace(config=preset("qwen3_4b"), device=torch.device("cuda"), ranks=ranks)
    fitted = Trainer._within_memory(run, run.config.rollout)
    assert fitted.cache_pages == pages("qwen3_4b", "kv4rl", total=int(left * H200))
    run.config = replace(run.config, memory="resident")
    with pytest.raises(ValueError, match="cache_pages=0: expected a number of pages >= 1 with --memory resident"):
        Trainer._within_memory(run, run.config.rollout)
    run.device = torch.device("cpu")
    with pytest.raises(ValueError, match="cache_pages=0: expected a number of pages >= 1 without a GPU"):
        Trainer._within_memory(run, run.config.rollout)


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used"),
    [("0::/job/step", "", "memory.max", "memory.current"),
     ("4:memory:/job/step", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")],
)  # fmt: skip
def test_cpu_memory_ends_where_linux_or_a_control_group_above_says(tmp_path, line, folder, limit, used):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    job, step = groups / folder / "job", groups / folder / "job" / "step"
    (proc / "self").mkdir(parents=True), step.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   1000 kB\n")
    (proc / "self" / "cgroup").write_text(f"12:cpu:/elsewhere\n{line}\n")
    assert available_bytes(proc, groups) == 1_024_000
    for group, most in ((job, "900000"), (step, "max" if not folder else "9223372036854771712")):
        (group / limit).write_text(most + "\n")
        (group / used).write_text("500000\n")
        (group / "memory.stat").write_text("anon 1\ninactive_file 20000\n")
    assert available_bytes(proc, groups) == 420_000
    assert available_bytes() > 0
