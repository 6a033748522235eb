import json
import math
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kv4rl.checkpoint import list_checkpoints, load_checkpoint
from kv4rl.grpo.packing import pack
from kv4rl.metrics import MetricsWriter, read_metrics, without_wall_clock
from kv4rl.model.weights import load_decoder
from kv4rl.presets import preset
from kv4rl.train import Trainer, train


def final_state(config):
    checkpoint = load_checkpoint(list_checkpoints(f"{config.output_dir}/checkpoints")[-1], config)
    return checkpoint, [without_wall_clock(line) for line in read_metrics(config.output_dir)]


def assert_same_run(a, b):
    """Weights, optimizer, pool and metrics of two runs, bit for bit."""
    (first, first_lines), (second, second_lines) = final_state(a), final_state(b)
    assert first.update == second.update and first.run == second.run
    assert first_lines == second_lines
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, second.weights[name]), name
    for index, moments in first.optimizer["state"].items():
        assert all(torch.equal(value, second.optimizer["state"][index][key]) for key, value in moments.items())


def test_a_run_leaves_metrics_checkpoints_and_a_model_that_transformers_loads(parity_grader, tiny_config, tiny_model):
    config = tiny_config()
    result = train(config)
    assert [line["update"] for line in result.metrics] == [0, 1, 2, 3, 4]
    assert "val/avg_at_k" in result.metrics[0] and "val/avg_at_k" in result.metrics[-1]
    assert [path.name for path in list_checkpoints(f"{config.output_dir}/checkpoints")] == [
        "update_000003",
        "update_000004",
    ]
    assert list((result.output_dir / "tensorboard").glob("events.*"))
    trained, before = load_decoder(result.model_dir), load_decoder(tiny_model)
    assert not torch.equal(trained.head_weight, before.head_weight)
    theirs = AutoModelForCausalLM.from_pretrained(result.model_dir)
    assert torch.equal(theirs.get_input_embeddings().weight, trained.head_weight)


def test_metrics_carry_the_names_readers_look_for(parity_grader, tiny_config):
    line = train(tiny_config(updates=3)).metrics[-1]
    names = (
        "critic/score/mean critic/rewards/max response_length/mean response_length/clip_ratio response/aborted_ratio "
        "prompt_length/mean actor/pg_loss actor/pg_clipfrac actor/pg_clipfrac_lower actor/ppo_kl actor/entropy "
        "actor/grad_norm actor/lr actor/kl_loss actor/kl_coef actor/tis_weight actor/skipped_steps "
        "rollout_corr/kl rollout_corr/rollout_is_max rollout_corr/rollout_is_eff_sample_size "
        "training/rollout_probs_diff_mean training/off_policy/trajectory_staleness "
        "timing_s/gen timing_s/reward timing_s/adv timing_s/old_log_prob timing_s/ref timing_s/update_actor "
        "timing_s/update_weights timing_s/step perf/throughput perf/total_num_tokens reward/correct_without_box "
        "reward/correct_truncated reward/timeouts rollout/token_age/mean rollout/page_occupancy_max "
        "frac_reward_zero_std"
    ).split()
    assert not [name for name in names if name not in line]
    assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    assert sum(line["rollout/token_age/histogram"]) == round(line["response_length/mean"] * 8)


def test_log_probs_of_decode_and_of_the_learner_agree(parity_grader, tiny_config):
    """Bug row 27, prime-rl #1525. Yardstick: an unquantised cache leaves FP32 rounding, far below what INT8 does."""
    spread = {}
    for precision in ("bf16", "kv8", "kv4"):
        config = tiny_config()
        trainer = Trainer(replace(config, kv=replace(config.kv, precision=precision)), parity_grader())
        trainer.iterate()
        spread[precision] = float((trainer.learner.tis_weights.log()).abs().max())
    assert spread["bf16"] < spread["kv8"] / 50 and spread["kv8"] < spread["kv4"]


def test_trained_tokens_are_the_sampled_ids(parity_grader, tiny_config, monkeypatch):
    """rllm #816: text decoded and tokenised again no longer matches the recorded log-probs."""
    trainer = Trainer(tiny_config(), parity_grader())
    collected, packed = [], []
    collect, update = trainer.collector.collect, trainer.learner.update
    trainer.collector.collect = lambda: collected.append(collect()) or collected[-1]
    trainer.learner.update = lambda groups, timers: (
        packed.append(pack(groups, torch.zeros(2, 4))), update(groups, timers)
    )[1]  # fmt: skip
    trainer.iterate()
    sampled = [token for group in collected[0].groups for request in group.requests for token in request.tokens]
    assert packed[0].targets.tolist() == sampled


def test_ages_survive_a_resume(parity_grader, tiny_config):
    """Bug row 18, AReaL #1388: staleness counters that restart at 0."""
    config = tiny_config()
    trainer = Trainer(config, parity_grader())
    while not any(group.first_version is not None for group in trainer.collector.pool):
        trainer.iterate()
    trainer.save()
    ages = [group.age(trainer.update) for group in trainer.collector.pool]
    again = Trainer(config, parity_grader())
    assert again.resume() and again.engine.policy_version == trainer.update
    assert [group.age(again.update) for group in again.collector.pool] == ages and max(ages) >= 1


def test_responses_are_carried_over_updates(parity_grader, tiny_config):
    lines = train(tiny_config(updates=4)).metrics[1:]
    assert max(line["rollout/carried_tokens"] for line in lines) > 0
    assert max(line["training/off_policy/trajectory_spans"] for line in lines) > 1


def test_two_runs_of_one_command_are_equal(parity_grader, tiny_config, tmp_path):
    a, b = tiny_config(output_dir=str(tmp_path / "a")), tiny_config(output_dir=str(tmp_path / "b"))
    train(a), train(b)
    assert_same_run(a, b)


def test_a_resumed_run_equals_the_uninterrupted_one(parity_grader, tiny_config, tmp_path):
    whole, parts = tiny_config(updates=5, output_dir=str(tmp_path / "a")), tiny_config(output_dir=str(tmp_path / "b"))
    train(whole)
    ahead = replace(parts, updates=5)
    for updates in (2, 3):
        trainer = Trainer(replace(parts, updates=updates), parity_grader())
        run_until(trainer, updates)
    train(ahead)
    assert_same_run(whole, ahead)


def run_until(trainer, updates):
    """What `train` does up to an update, then nothing: the process is gone."""
    resumed = trainer.resume()
    with MetricsWriter(trainer.config.output_dir, resumed_update=trainer.update if resumed else None) as writer:
        if not resumed:
            writer.write(0, trainer.evaluate())
        while trainer.update < updates:
            writer.write(trainer.update + 1, trainer.iterate())
            trainer.save()
        writer.write(updates + 1, trainer.iterate())  # an update whose checkpoint was never written


def test_a_finished_run_is_not_run_again(parity_grader, tiny_config):
    config = tiny_config(updates=2)
    first = train(config)
    assert train(config).metrics == first.metrics


def test_all_precisions_and_both_collectors_run(parity_grader, tiny_config, tmp_path):
    base = tiny_config(updates=1)
    for precision in ("bf16", "kv8", "kv4"):
        train(replace(base, kv=replace(base.kv, precision=precision), output_dir=str(tmp_path / precision)))
    sync = replace(base, rollout=replace(base.rollout, collector="sync"), output_dir=str(tmp_path / "sync"), updates=2)
    assert train(sync).metrics[-1]["rollout/token_age/max"] == 0


def test_a_jsonl_file_trains_without_evaluation_unless_one_is_held_out(parity_grader, tiny_config, tiny_tasks):
    said = []
    config = tiny_config(tasks=str(tiny_tasks), updates=1)
    assert "val/avg_at_k" not in train(config, said.append).metrics[-1]
    assert "no evaluation" in said[0]
    held_out = tiny_tasks.with_suffix(".evaluation.jsonl")
    held_out.write_text(tiny_tasks.read_text())
    assert "val/avg_at_k" in train(replace(config, updates=2)).metrics[-1]


def test_benchmark_sets_are_evaluated_on_the_way_with_a_name_of_their_own(parity_grader, tiny_config, tiny_tasks):
    problems = [{"prompt": f"n={i}+{i}=", "answer": 2 * i} for i in range(3)]
    own, math = tiny_tasks.with_name("own.jsonl"), tiny_tasks.with_name("m.jsonl")
    for file in (own, math):
        file.write_text("\n".join(map(json.dumps, problems)))
    config = tiny_config(
        tasks=str(tiny_tasks), updates=2, evaluate_every=1, evaluate_sets=(f"math500={math}", str(own))
    )
    lines = train(config).metrics
    for line in lines:
        assert 0 <= line["val/math500/avg_at_k"] <= line["val/math500/pass_at_k"] <= 1
        assert line["val/own/avg_at_k"] >= 0 and "val/avg_at_k" not in line
    tiny_tasks.with_suffix(".evaluation.jsonl").write_text(tiny_tasks.read_text())
    assert "val/avg_at_k" in train(replace(config, updates=3)).metrics[-1]


def test_a_set_that_the_hub_does_not_deliver_is_refused_naming_the_file_that_would_do(
    parity_grader, tiny_config, monkeypatch
):
    monkeypatch.setattr("kv4rl.trainer.load_decoder", None)  # nothing is loaded before
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="or pass --evaluate_sets math500=FILE with a local"):
        train(tiny_config(evaluate_sets=preset("qwen3_4b").evaluate_sets))


def test_tasks_without_a_gradable_answer_are_counted_named_and_left_out(parity_grader, tiny_config, tiny_tasks):
    lines = tiny_tasks.read_text().splitlines()
    bad = [json.dumps({"prompt": "n=1+1=", "answer": answer, "prompt_id": f"bad{answer}"}) for answer in ("?", "x=")]
    tiny_tasks.write_text("\n".join([bad[0], *lines[:4], bad[1]]))
    tiny_tasks.with_suffix(".evaluation.jsonl").write_text("\n".join([*lines, bad[0]]))
    said = []
    config = tiny_config(tasks=str(tiny_tasks), updates=2)
    result = train(config, said.append)
    assert said[1].startswith("3 task lines are left out")
    assert [line.split(":")[1] for line in said[2:5]] == ["1", "6", "9"] and "gold='x='" in said[3]
    assert (result.output_dir / "left_out.txt").read_text().count("\n") == 3
    held = load_checkpoint(list_checkpoints(f"{config.output_dir}/checkpoints")[-1], config).run["collectors"][0][
        "groups"
    ]
    assert held and not [group for group in held if "bad" in group["prompt"]["prompt_id"]]


def test_a_checkpoint_of_another_configuration_is_refused_naming_the_fields(parity_grader, tiny_config):
    config = tiny_config(updates=1)
    train(config)
    other = replace(config, kv=replace(config.kv, precision="kv8"), grpo=replace(config.grpo, tis_clip=2.0))
    with pytest.raises(ValueError) as refusal:
        train(other)
    message = str(refusal.value)
    assert "kv.precision: 'kv4rl' in the checkpoint, 'kv8' now" in message
    assert "grpo.tis_clip: 5.0 in the checkpoint, 2.0 now" in message
    assert "learning_rate" not in message


def test_a_model_that_changed_under_the_run_is_refused(parity_grader, tiny_config, tmp_path):
    model = tmp_path / "model"
    config = tiny_config(updates=1)
    shutil.copytree(config.model, model)
    config = replace(config, model=str(model))
    result = train(config)
    shutil.copy(result.model_dir / "model.safetensors", model / "model.safetensors")
    with pytest.raises(ValueError, match="the reference policy is made of them"):
        train(replace(config, updates=2))


def test_a_rollout_crash_reaches_the_caller(parity_grader, tiny_config, monkeypatch):
    """verl #6387: a rollout crash reported as finished training."""
    monkeypatch.setattr("kv4rl.engine.engine.RolloutEngine.step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(tiny_config(evaluate_prompts=1))


def test_bad_settings_are_named(parity_grader, tiny_config):
    config = tiny_config()
    with pytest.raises(ValueError, match=r"tasks='nowhere\.jsonl'"):
        train(replace(config, tasks="nowhere.jsonl"))
    with pytest.raises(ValueError, match="responses_per_group=1"):
        train(replace(config, rollout=replace(config.rollout, responses_per_group=1)))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device='cuda'"):
            train(replace(config, device="cuda"))
