"""The engine on a small random Qwen3: against transformers, against itself undisturbed, and against bad input."""

import pytest
import torch

from kv4rl.config import PRECISIONS
from kv4rl.engine.engine import NonFiniteLogits
from kv4rl.engine.protocol import Engine
from kv4rl.engine.request import Request, RequestStatus
from kv4rl.engine.sampler import Sampling

GREEDY = Sampling(temperature=0)


def transformers_greedy(hf, prompt, tokens, eos):
    ids = torch.tensor([prompt])
    out = hf.generate(ids, do_sample=False, max_new_tokens=tokens, eos_token_id=list(eos), pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def requests_for(prompts, engine, samples=1, cap=40):
    return [
        Request(f"p{i}", sibling, prompt, cap, engine.eos_token_ids, (i, sibling))
        for i, prompt in enumerate(prompts)
        for sibling in range(samples)
    ]


def record(request):
    return request.tokens, request.sampler_logp, request.finish_reason


@pytest.mark.parametrize("sizes", [{}, {"step_tokens": 8}, {"cache_pages": 11, "max_active_requests": 4}])
def test_greedy_tokens_equal_transformers(hf, make_engine, prompts, sizes):
    """Whole prefills, prefills in chunks of a few tokens, and pages so scarce that requests are preempted."""
    eos = (3, 17)
    engine = make_engine(eos=eos, **sizes)
    assert isinstance(engine, Engine)
    responses = engine.generate(prompts, GREEDY)
    expected = [transformers_greedy(hf, prompt, 40, eos) for prompt in prompts]
    assert [response.tokens for response in responses] == expected
    assert {response.finish_reason for response in responses} == {"eos", "length"}
    assert max(len(set(tokens)) for tokens in expected) > 10, "a text of one token would prove little"
    engine.check_drained()


def test_sampled_tokens_are_the_same_alone_and_in_a_batch(make_engine, prompts):
    sampling = Sampling(max_response_tokens=25)
    together = make_engine().generate(prompts, sampling, samples=2)
    engine = make_engine(max_active_requests=1)
    for i in (0, 3, 7):
        alone = engine.generate(prompts[i : i + 1], sampling, prompt_ids=[str(i)], samples=2)
        assert [r.tokens for r in alone] == [r.tokens for r in together[2 * i : 2 * i + 2]]


def test_siblings_sample_different_responses(make_engine, prompts):
    """Megatron-LM #5983, AReaL #1524: identical siblings make every advantage zero."""
    responses = make_engine(max_response_tokens=20).generate(prompts[:3], Sampling(), samples=4)
    assert [(r.prompt_id, r.sibling) for r in responses] == [(str(i), j) for i in range(3) for j in range(4)]
    assert len({tuple(r.tokens) for r in responses}) == len(responses)


def test_another_run_seed_samples_other_responses(make_engine, prompts):
    engine = make_engine(max_response_tokens=20)
    first, again, other = (engine.generate(prompts[2:], Sampling(seed=seed)) for seed in (1, 1, 2))
    assert [(r.tokens, r.sampler_logp) for r in first] == [(r.tokens, r.sampler_logp) for r in again]
    assert all(a.tokens != b.tokens for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_resuming_after_preemption_does_not_use_a_stale_token_count(make_engine, prompts, run, sampling):
    """nano-vllm #211 and #233, vLLM #16832: the preempted run's responses are the unpreempted run's."""

    def responses(pages):
        engine = make_engine(cache_pages=pages, temperature=sampling.temperature or 1e-4, eos=())
        requests = requests_for(prompts[:6], engine)
        for request in requests:
            engine.add(request)
        run(engine)
        engine.check_drained()
        return requests

    scarce, ample = responses(9), responses(100)
    assert sum(request.preemptions for request in scarce) >= 3
    assert all(request.preemptions == 0 for request in ample)
    assert [r.tokens for r in scarce] == [r.tokens for r in ample]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_prefill_is_unquantised_whatever_the_chunk_size(make_engine, prompts, precision):
    """The first token, and the first after a resume, are sampled from logits that no cache precision reaches."""

    def first_logps(precision, step_tokens, carried):
        engine = make_engine(precision, max_active_requests=4, step_tokens=step_tokens, max_response_tokens=12)
        requests = requests_for(prompts[1::2], engine, cap=12)
        for request in requests:
            for token in range(20, 20 + carried):
                request.append(token, -0.125, 0)
            engine.add(request)
        while any(len(request.tokens) == carried for request in requests):
            engine.step()
        engine.pause()
        assert all(request.sampler_logp[:carried] == [-0.125] * carried for request in requests)
        return torch.tensor([request.sampler_logp[carried] for request in requests])

    for carried in (0, 9):
        exact = first_logps("bf16", 400, carried)
        noise = (first_logps("bf16", 5, carried) - exact).abs().max()
        assert noise < 1e-5
        for step_tokens in (4, 400):
            assert (first_logps(precision, step_tokens, carried) - exact).abs().max() <= 4 * noise + 1e-6


def test_the_prefill_workspace_stays_within_its_bound(make_engine, prompts):
    engine = make_engine(step_tokens=8, workspace_tokens=160)
    for request in requests_for(prompts, engine):
        engine.add(request)
    most = 0
    while engine.has_unfinished:
        engine.step()
        kept = [e.workspace.shape[2] for e in engine.scheduler._entries.values() if e.workspace is not None]
        most = max(most, sum(kept))
        assert sum(kept) <= engine.scheduler.workspace_used <= 160
    assert most >= 100
    engine.check_drained()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_kv_of_an_older_policy_is_never_read(make_engine, make_decoder, prompts, run, precision):
    """NeMo-RL #4018, vLLM #9744, sglang #27140: two collect-update cycles, each equal to an engine born with the new
    weights and handed the same prefixes; recorded log-probabilities stay as they were sampled."""
    engine = make_engine(precision, eos=())
    requests = requests_for(prompts, engine)
    for version in range(3):
        if version:
            engine.update_weights(dict(make_decoder(version).named_parameters()), version)
        fresh = make_engine(precision, decoder=make_decoder(version or None), eos=())
        twins = [Request.from_state(request.to_state()) for request in requests]
        before = [(list(r.tokens), list(r.sampler_logp), list(r.versions)) for r in requests]
        for one, group in ((engine, requests), (fresh, twins)):
            for request in group:
                one.add(request)
            for _ in range(13):
                one.step()
            one.pause()
        assert [record(r) for r in requests] == [record(r) for r in twins]
        for request, (tokens, logps, versions) in zip(requests, before, strict=True):
            old = len(tokens)
            assert (request.tokens[:old], request.sampler_logp[:old]) == (tokens, logps)
            assert request.versions[:old] == versions
            assert set(request.versions[old:]) == {version}
    engine.check_drained()


@pytest.mark.parametrize("status", [RequestStatus.PREFILLING, RequestStatus.DECODING, RequestStatus.PREEMPTED])
@pytest.mark.parametrize("end", ["abort", "pause"])
def test_ending_one_request_in_any_state_disturbs_no_other(make_engine, prompts, run, status, end):
    sizes = {"step_tokens": 8, "cache_pages": 13, "max_active_requests": 4}
    expected = {r.prompt_id: r.tokens for r in make_engine().generate(prompts, GREEDY)}
    engine = make_engine(temperature=1e-4, **sizes)
    requests = requests_for(prompts, engine)
    for request in requests:
        request.prompt_id = request.prompt_id[1:]
        engine.add(request)
    while not any(r.status is status for r in requests):
        engine.step()
    victim = next(r for r in requests if r.status is status)
    kept = list(victim.tokens)
    if end == "abort":
        engine.abort(victim)
        assert victim.tokens == kept == expected[victim.prompt_id][: len(kept)]
        requests.remove(victim)
    else:
        for request in engine.pause():
            engine.add(request)
    run(engine)
    assert {r.prompt_id: r.tokens for r in requests} == {r.prompt_id: expected[r.prompt_id] for r in requests}
    engine.check_drained()


def test_finished_rows_take_no_part_in_later_forwards(make_engine, prompts):
    engine = make_engine(eos=())
    rows = []
    forward = engine.decoder.forward
    engine.decoder.forward = lambda ids, *rest: rows.append(len(ids)) or forward(ids, *rest)
    for i, request in enumerate(requests_for(prompts, engine)):
        request.max_response_tokens = 3 + 4 * i
        engine.add(request)
    while engine.has_unfinished:
        active = sum(r.status is RequestStatus.DECODING for r in engine.scheduler.unfinished)
        engine.step()
        assert rows[-1] == active + engine.last_step.prefill_tokens
    assert rows[-1] == 1


def test_logits_of_nan_name_the_request_and_the_step(make_engine, run):
    undisturbed = make_engine().generate([[5, 6, 7]], Sampling(), prompt_ids=["p1"])[0]
    poison = next(token for token in range(8, 61) if token not in undisturbed.tokens)
    engine = make_engine()
    with torch.no_grad():
        engine.decoder.model.embed_tokens.weight[poison] = float("nan")
    poisoned, healthy = requests_for([[5, 6, poison], [5, 6, 7]], engine)
    engine.add(healthy)
    engine.step()
    engine.add(poisoned)
    message = "request 'p0' sibling 0 are not finite at engine step 2, policy_version 0"
    with pytest.raises(NonFiniteLogits, match=message):
        engine.step()
    assert (poisoned.tokens, len(healthy.tokens)) == ([], 1)
    engine.abort(poisoned)
    run(engine)
    assert healthy.tokens == undisturbed.tokens
    engine.check_drained()
    # The pages that held NaN go to somebody else.
    assert engine.generate([[5, 6, 7]] * 2, Sampling(), prompt_ids=["p1", "p2"])[0].tokens == undisturbed.tokens


def test_generate_leaves_nothing_behind_when_it_raises(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match="max_prompt_tokens=128"):
        engine.generate([[5] * 10, [5] * 200], Sampling())
    assert not engine.has_unfinished
    engine.check_drained()
    assert len(engine.generate([[5] * 10], Sampling(max_response_tokens=2))[0].tokens) == 2


def test_generate_of_nothing_and_of_no_tokens(make_engine):
    engine = make_engine()
    assert engine.generate([], Sampling()) == []
    response = engine.generate([[5]], Sampling(max_response_tokens=0))[0]
    assert (response.tokens, response.sampler_logp, response.finish_reason) == ([], [], "length")


def test_generate_refuses_what_it_cannot_key_or_share(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match="distinct ids"):
        engine.generate([[5], [6]], Sampling(), prompt_ids=["a", "a"])
    with pytest.raises(ValueError, match="one for each of the 2 prompts"):
        engine.generate([[5], [6]], Sampling(), prompt_ids=["a"])
    with pytest.raises(ValueError, match="samples=0"):
        engine.generate([[5]], Sampling(), samples=0)
    engine.add(requests_for([[5]], engine)[0])
    with pytest.raises(RuntimeError, match="needs the engine for itself"):
        engine.generate([[5]], Sampling())


@pytest.mark.parametrize(
    ("prompt", "cap", "numbers"),
    [
        ([5] * 100, 1000, ("69", "64")),
        ([5] * 129, 10, ("129", "128")),
        ([5] * 100, 500, ("600", "512")),
        ([61], 10, ("61", "61")),
        ([-1], 10, ("-1", "61")),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_both_numbers(make_engine, prompt, cap, numbers):
    engine = make_engine()
    engine.decoder.config.__dict__["max_positions"] = 512 if cap == 500 else 10**6
    with pytest.raises(ValueError) as error:
        engine.add(Request("large", 0, prompt, cap, (), ()))
    assert all(number in str(error.value) for number in numbers), error.value
    assert not engine.has_unfinished


def test_an_end_of_sequence_id_of_another_vocabulary_is_refused(make_engine):
    with pytest.raises(ValueError, match="eos_token_ids=61"):
        make_engine(eos=(61,))
