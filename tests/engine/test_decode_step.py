"""The static decode step: padding changes nothing, and a recorded step replays right for any later batch."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kv4rl.attention.backends import ReferenceBackend
from kv4rl.cache import batch as cache_batch
from kv4rl.config import PRECISIONS, KVConfig
from kv4rl.engine.decode_step import DecodeStep, default_buckets
from kv4rl.engine.draw import ForcedEnd
from kv4rl.engine.request import Request
from kv4rl.engine.sampler import Sampling
from kv4rl.model.pointwise import norm_rotate

BUCKETS = (3, 5, 8)


def rollout(engine, prompts):
    """Add every prompt with its own cap; (tokens, logp) of each request when all have finished."""
    requests = [Request(f"p{i}", 0, prompt, 9 + 3 * i, engine.eos_token_ids, (i,)) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    engine.check_drained()
    return [request.tokens for request in requests], torch.tensor([x for r in requests for x in r.sampler_logp])


@pytest.mark.parametrize("pages", [64, 11])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_padded_buckets_give_the_tokens_of_unpadded_steps(make_engine, prompts, precision, pages):
    """Batches that grow, shrink and lose preempted rows; padding changes sums no more than a request's company does."""
    plain = rollout(make_engine(precision, eos=(), cache_pages=pages), prompts)
    alone = rollout(make_engine(precision, eos=(), cache_pages=pages, max_active_requests=1), prompts)
    engine = make_engine(precision, eos=(), cache_pages=pages, buckets=BUCKETS)
    rows = []
    forward = engine.decoder.forward
    engine.decoder.forward = lambda ids, *rest: rows.append(len(ids)) or forward(ids, *rest)
    padded = rollout(engine, prompts)
    assert padded[0] == plain[0]
    assert (padded[1] - plain[1]).abs().max() <= 2 * (alone[1] - plain[1]).abs().max() + 1e-5
    assert set(BUCKETS[: 3 if pages == 64 else 2]) <= set(rows)


def test_requests_longer_than_the_static_buffers_run_too(make_engine, prompts):
    """`generate` may ask for more tokens than the rollout limit that sizes the page tables."""
    sampling = Sampling(max_response_tokens=70)
    expected = make_engine(max_response_tokens=70, eos=()).generate(prompts[:3], sampling)
    small = make_engine(max_response_tokens=5, max_prompt_tokens=20, eos=())
    assert small._decode.max_pages == 2
    assert [r.tokens for r in small.generate(prompts[:3], sampling)] == [r.tokens for r in expected]


def test_default_buckets_pad_by_an_eighth_at_most_and_end_at_the_limit():
    for most in (1, 5, 8, 64, 100, 1024):
        sizes = default_buckets(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        for rows in range(8, most + 1):
            assert min(size for size in sizes if size >= rows) <= rows + max(7, rows / 8)


def test_buckets_that_do_not_end_at_the_limit_are_refused(make_engine):
    with pytest.raises(ValueError, match=r"buckets=\[2, 4\]: expected row counts >= 1, .*max_active_requests=8"):
        make_engine(buckets=(4, 2))


class RawReference(ReferenceBackend):
    """The reference, taking q and k as projected."""

    steps = 0

    def takes_raw(self, cache):
        return True

    def write_and_decode(self, cache, layer, q, k, v, where, batch, return_lse=False, *, before):
        self.steps += 1
        tables = before.cos, before.sin
        q, k = norm_rotate(q, k, before.q_weight, before.k_weight, before.eps, *tables)
        self.write(cache, layer, k, v, where)
        return self.decode(cache, layer, q, batch, return_lse)


def test_a_backend_that_takes_raw_projections_gets_them_in_decode_steps(make_engine, prompts):
    engine = make_engine(eos=())
    engine.cache.backend = RawReference()
    tokens, logps = rollout(engine, prompts)
    expected = rollout(make_engine(eos=()), prompts)
    assert engine.cache.backend.steps > 0
    assert tokens == expected[0] and torch.equal(logps, expected[1])


class DenseBackend:
    """Attention over every page of the table, by masks alone: as a CUDA kernel, it never looks at a value."""

    name = "dense"

    def __init__(self, spare_page):
        self.spare = spare_page  # takes the writes of padding rows

    def write(self, cache, layer, k, v, where):
        pages = torch.where(where.page_ids >= 0, where.page_ids, self.spare)
        view = cache.main._split(cache.main.storage[layer])
        view.k[pages, :, where.offsets] = k
        view.v[pages, :, where.offsets] = v

    def decode(self, cache, layer, q, batch, return_lse=False):
        rows, width = batch.page_table.shape
        view = cache.main.pages(layer, batch.page_table.clamp(min=0).reshape(-1))
        k, v = (x.unflatten(0, (rows, width)).transpose(1, 2).flatten(2, 3) for x in (view.k, view.v))
        q = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
        unseen = torch.arange(k.shape[2]) >= batch.context_tokens[:, None]
        scores = (q @ k.transpose(-1, -2)).masked_fill(unseen[:, None, None], -torch.inf)
        return torch.nan_to_num(scores.softmax(-1) @ v.masked_fill(unseen[:, None, :, None], 0.0)).flatten(1, 2)


class LaunchOnly(TorchDispatchMode):
    """Refuses every operation whose result the host has to wait for."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._schema.name.removeprefix("aten::") not in self.WAITING, function
        return function(*args, **kwargs or {})


@pytest.fixture
def dense(make_engine, monkeypatch):
    """An engine over `DenseBackend`, whose index tensors are not inspected, as under capture on CUDA."""
    engine = make_engine(eos=(), buckets=BUCKETS, max_prompt_tokens=100, cache_pages=65)
    engine.cache.backend = DenseBackend(engine.cache.allocator.allocate(1)[0])
    engine.check_drained = lambda: None  # the spare page stays allocated
    monkeypatch.setattr(cache_batch, "_may_inspect", lambda tensor: False)
    return engine


def test_a_recorded_step_replays_right_for_every_later_batch(dense, make_engine, prompts):
    """What a CUDA graph does, on a CPU: record the operations of one batch, replay them on the buffers of others."""
    recorded = {}

    def replay(size, sampling):
        if size not in recorded:
            with LaunchOnly():
                recorded[size] = make_fx(lambda: run(size, sampling))()
        return recorded[size]()

    run, dense._decode.run = dense._decode.run, replay
    tokens, logps = rollout(dense, prompts)
    expected = rollout(make_engine(eos=()), prompts)
    assert tokens == expected[0]
    torch.testing.assert_close(logps, expected[1], rtol=0, atol=1e-4)
    assert sorted(size.rows for size in recorded) == list(BUCKETS)


def test_buffers_keep_their_addresses(dense, prompts):
    step = dense._decode
    names = ("_vectors", "_slot_pages", "_page_table", "_results")
    before = {name: getattr(step, name).data_ptr() for name in names}
    rollout(dense, prompts)
    assert {name: getattr(step, name).data_ptr() for name in names} == before


def test_pages_reach_the_device_table_as_they_are_given(make_engine):
    """Slots change hands, tables widen, pages come one by one: the copy follows `PageTable` wherever it is read."""
    engine = make_engine(eos=())
    step, table = engine._decode, engine.scheduler.table
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        slot = int(torch.randint(8, (1,), generator=generator))
        if table.held[slot] == 0:
            table.set(slot, torch.randint(64, (1 + slot,), generator=generator).tolist())
        elif table.held[slot] < 10:
            table.append(torch.tensor([slot]).numpy(), [int(torch.randint(64, (1,), generator=generator))])
        else:
            table.clear(slot)
        if slot % 3 == 0:
            step._load_pages(table)
            for row in range(8):
                held = int(table.held[row])
                assert step._slot_pages[row, :held].tolist() == table.ids[row, :held].tolist()


@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize(("sink", "recent"), [(4, 16), (0, 7), (3, 0), (0, 0)])
def test_tokens_go_where_the_cache_itself_would_put_them(make_engine, monkeypatch, sink, recent, previous):
    """What `load` works out on the host is `TokenSlots.for_decode` of the batch that `run` makes."""
    engine = make_engine(kv=KVConfig("kv4rl", sink_tokens=sink, recent_tokens=recent), buckets=BUCKETS)
    step, table = engine._decode, engine.scheduler.table
    pages = np.random.default_rng(0).permutation(40)
    for slot, context in enumerate((1, 4, 5, 16, 17, 32, 33)):
        table.set(slot, pages[4 * slot : 4 * slot + 4].tolist())
        table.context[slot] = context
    slots = np.array([6, 0, 3, 1, 5, 2, 4])
    keys = np.zeros(8, dtype=np.int64)
    size = step.load(table, slots, keys, keys, np.arange(7) if previous else None)
    seen = []
    monkeypatch.setattr(engine.cache, "write_and_decode", lambda layer, q, k, v, *where: seen.append(where) or q)
    step.run(size, Sampling())
    where, batch, _ = seen[0]
    assert batch.context_tokens.tolist() == [*(table.context[slots] + previous), 0]
    expected = cache_batch.TokenSlots.for_decode(batch, engine.cache.kv)
    assert where.page_each and where.widths == expected.widths
    for name in cache_batch.ROWS:
        assert getattr(where, name)[:7].tolist() == getattr(expected, name)[:7].tolist(), name
    assert where.page_ids[7] == expected.page_ids[7] == -1  # the padding row writes nothing


def test_padding_alone_is_a_step(make_engine):
    """As `StepGraphs.capture_all` warms up: nothing is written, whatever precision."""
    for precision in PRECISIONS:
        engine = make_engine(precision, buckets=BUCKETS)
        before = [tensor.clone() for tensor in engine.cache.tensors]
        drawn = engine._decode.run(engine._decode.load_padding(5), Sampling())
        assert drawn.shape == (2, 5)
        assert all(torch.equal(*pair) for pair in zip(engine.cache.tensors, before, strict=True))


def test_forced_ends_are_part_of_the_step(make_engine, make_decoder):
    engine = make_engine()
    step = DecodeStep(make_decoder(), engine.cache, max_pages=4, forced=ForcedEnd(3, torch.tensor([3])))
    size = step.load_padding(2)
    step._vectors[4, :2] = torch.tensor([1, 1 << 40])  # ends: the first row's next token is its last
    drawn = step.run(size, Sampling())
    assert drawn[0, 0] == 3 and drawn[1, 0] == 0 and drawn[0, 1] != 3
