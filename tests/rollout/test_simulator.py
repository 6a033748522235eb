"""The simulator: the ideal schedules as limits, summaries, and the Fig. 2 run in its time."""

import time
from dataclasses import replace

import numpy as np
import pytest

from kv4rl.config import PAGE_TOKENS, KVConfig, RolloutConfig
from kv4rl.engine.engine import RolloutEngine
from kv4rl.rollout.group import ListStream, Prompt
from kv4rl.rollout.partial import PartialCollector
from kv4rl.rollout.simulator import simulate, summarize
from kv4rl.rollout.trace import Trace
from kv4rl.rollout.workload import Workload
from kv4rl.theory import concentration
from kv4rl.theory.lengths import LengthDistribution

LAW = LengthDistribution.lognormal(60, 0.8, cap=500)
PROMPT = LengthDistribution.deterministic(20)
CONFIG = RolloutConfig(
    groups_per_update=16, responses_per_group=4, oversubscription=1, age_limit=6, max_response_tokens=500,
    max_active_requests=64, cache_pages=4000,
)  # fmt: skip


def run(collections=6, workload=None, **changes):
    config = replace(CONFIG, **changes)
    return simulate(config, workload or Workload(LAW, PROMPT, 0.4, seed=3, siblings=4), collections=collections)


def decode_law(law):
    """Steps a response decodes for: its first token comes from the prefill."""
    keep = law.support > 1
    probabilities = law.probabilities[keep]
    return LengthDistribution(law.support[keep] - 1, probabilities / probabilities.sum())


@pytest.mark.parametrize("seed", range(20))
def test_synchronous_waves_meet_the_exact_wave_within_their_error(seed):
    workload = Workload(LAW, PROMPT, 0.0, seed=seed, siblings=4)
    waves = 16
    summary = summarize(run(waves, workload, collector="sync").trace)
    law = decode_law(LAW)
    # A wave lasts the maximum of 64 lengths; the error of its mean over the waves bounds the band.
    first, second = (concentration.expected_max(law, 64, order) for order in (1, 2))
    error = 4.5 * np.sqrt((second - first**2) / waves)
    assert abs(summary.calls_per_interval - first) <= error
    work = concentration.refill_context(law, 20 + 1)  # contexts include the token being written
    spread = 4.5 * np.sqrt((LAW.moment(4) - LAW.moment(2) ** 2) / (waves * 64)) / LAW.mean
    assert abs(summary.slot_context - work) <= spread


@pytest.mark.parametrize("seed", range(20))
def test_the_quota_collector_keeps_the_slot_context_of_the_proposition(seed):
    """Eq. A10 for a schedule that pauses and resumes (§C.4), prompts of varying length and siblings alike."""
    prompts, warmup, rounds = LengthDistribution.lognormal(20, 0.5, cap=80), 10, 40
    workload = Workload(LAW, prompts, 0.4, seed=seed, siblings=4)
    rows = run(rounds, workload, max_prompt_tokens=80).trace.columns()
    counted = rows["collection"] >= warmup
    found = rows["context_tokens"][counted].sum() / rows["decode_tokens"][counted].sum()
    exact = concentration.refill_context(decode_law(LAW), prompts.mean + 1)  # with the token being written
    # One group is the independent unit: the error of the ratio comes from the spread over groups.
    groups = [workload.group(index) for index in range((rounds - warmup) * CONFIG.groups_per_update)]
    lengths = np.array([own for _, own in groups]) - 1
    work = concentration.logical_work(np.array([[prompt + 1] for prompt, _ in groups]), lengths).sum(axis=1)
    busy = lengths.sum(axis=1)
    error = (work - exact * busy).std(ddof=1) / busy.mean() / len(groups) ** 0.5
    assert abs(found - exact) <= 4.5 * error
    assert rows["active_requests"][counted].std() > 5  # though the batch swells and shrinks


def test_both_schedules_do_the_same_work_for_the_same_responses():
    sync, partial = run(collector="sync"), run(collector="partial")
    trained = np.concatenate(sync.trained_lengths)
    assert len(trained) == 6 * 16 * 4 == len(np.concatenate(partial.trained_lengths))
    volumes = [summarize(s.trace).context_tokens for s in (sync, partial)]
    assert volumes[1] > 1.5 * volumes[0]  # the same work in fewer steps: KV concentration
    assert summarize(sync.trace).carried_share == 0 < summarize(partial.trace).carried_share < 1


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    one, again = run().trace.columns(), run().trace.columns()
    assert all((one[name] == again[name]).all() for name in one)
    other = run(workload=Workload(LAW, PROMPT, 0.4, seed=4, siblings=4)).trace.columns()
    assert len(other["kind"]) != len(one["kind"]) or (other["context_tokens"] != one["context_tokens"]).any()


def test_a_small_pool_caps_the_resident_context_and_preempts():
    roomy, tight = run(), run(cache_pages=120)
    assert summarize(tight.trace).used_pages <= 120 < summarize(roomy.trace).used_pages
    assert sum(s.preemptions for s in tight.stats) > 0 == sum(s.preemptions for s in roomy.stats)
    assert [len(lengths) for lengths in tight.trained_lengths] == [64] * 6


def test_siblings_share_the_variance_they_are_told_to_and_keep_the_law():
    lengths = {share: np.array([draw(share, index) for index in range(3000)]) for share in (0.0, 0.6)}
    for share, table in lengths.items():
        logs = np.log(table)
        correlation = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
        assert abs(correlation - share) <= 4.5 / np.sqrt(3000)
        error = 4.5 * np.sqrt(LAW.variance / table.size * (1 + 3 * share))
        assert abs(table.mean() - LAW.mean) <= error


def draw(share, index):
    return Workload(LAW, PROMPT, share, seed=1, siblings=4).group(index)[1]


def test_a_summary_reads_a_stored_trace_as_well(tmp_path):
    trace = run().trace
    trace.to_csv(tmp_path / "trace.csv")
    assert summarize(Trace.from_csv(tmp_path / "trace.csv")) == summarize(trace)
    some = summarize(trace, range(3, 6))
    rows = trace.pure_decode()
    keep = rows["collection"] >= 3
    assert some.active_requests == pytest.approx(rows["active_requests"][keep].mean())
    assert some.volume_gb(2e9) == pytest.approx(2 * some.context_tokens)
    with pytest.raises(ValueError, match="at least one pure-decode call"):
        summarize(trace, [99])


def test_a_summary_reads_the_trace_of_a_real_engine(decoder):
    config = replace(
        CONFIG, groups_per_update=2, responses_per_group=2, max_prompt_tokens=20, max_response_tokens=30,
        max_active_requests=4, step_tokens=32, cache_pages=60,
    )  # fmt: skip
    engine, trace = RolloutEngine(decoder, KVConfig("bf16"), config, eos_token_ids=(3,), backend="reference"), Trace()
    stream = ListStream([Prompt(f"p{i}", [4 + i % 8] * (3 + i), "") for i in range(12)])
    collector = PartialCollector(engine, stream, config, grade=None, eos_token_ids=(3,), trace=trace)
    for _ in range(2):
        collector.collect()
    rows, summary = trace.pure_decode(), summarize(trace)
    assert summary.calls_per_interval == len(rows["kind"]) / 2 > 0
    assert summary.active_requests == pytest.approx(rows["decode_tokens"].mean()) and summary.active_requests <= 4
    assert summary.slot_context == pytest.approx(rows["context_tokens"].sum() / rows["active_requests"].sum())
    assert summary.step_ms > 0 and 0 < summary.used_pages <= 60
    kappa = engine.bytes_per_page / PAGE_TOKENS
    assert summary.volume_gb(kappa) * 1e9 == pytest.approx(rows["resident_kv_bytes"].mean())


def test_calls_are_counted_per_replica_and_interval():
    workload = Workload(LAW, PROMPT, 0.4, seed=3, siblings=4)
    trace = simulate(replace(CONFIG, collector="sync"), workload, collections=2, replicas=2).trace
    rows = trace.pure_decode()
    assert set(rows["replica"]) == {0, 1}
    assert summarize(trace).calls_per_interval == len(rows["kind"]) / 4


def test_bad_simulations_are_named():
    with pytest.raises(ValueError, match="collections=0"):
        run(0)
    with pytest.raises(ValueError, match="prompt_share=2"):
        Workload(LAW, PROMPT, 2)
    with pytest.raises(ValueError, match="responses_per_group=8: expected at most siblings=4"):
        run(responses_per_group=8)


@pytest.mark.slow
def test_the_fig_2_run_takes_less_than_thirty_seconds_of_one_core():
    law = LengthDistribution.lognormal(1500, 0.75, cap=16384)
    workload = Workload(law, LengthDistribution.deterministic(130), 0.5, seed=0)
    config = RolloutConfig(cache_pages=83022)
    began = time.process_time()
    for collector in ("sync", "partial"):
        simulation = simulate(replace(config, collector=collector), workload, collections=15, replicas=2)
        assert all(len(lengths) == 1024 for lengths in simulation.trained_lengths)
        assert np.concatenate(simulation.trained_lengths).mean() == pytest.approx(law.mean, rel=0.05)
    assert time.process_time() - began < 30
