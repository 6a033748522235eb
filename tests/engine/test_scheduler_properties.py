"""Random interleavings of add, step, abort and pause, on the model-free engine: what must hold at every moment."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv4rl.cache.main_cache import pages_for
from kv4rl.engine.fake import FakeEngine
from kv4rl.engine.request import Request, RequestStatus

EOS = (7,)
RESIDENT = (RequestStatus.PREFILLING, RequestStatus.DECODING)


class Drive:
    """An engine under random operations, with an independent record of what it should have."""

    def __init__(self, slots: int, pages: int, step_tokens: int, overlap: bool = False):
        self.engine = FakeEngine(
            lambda request: 1 + (31 * request.sibling) % 70,
            slots=slots,
            pages=pages,
            step_tokens=max(step_tokens, slots),
            workspace_tokens=16 * pages,
            max_prompt_tokens=16 * pages,
            overlap=overlap,
        )
        self.pages = pages
        self.live: list[Request] = []
        self.paused: list[Request] = []
        self.finished: list[Request] = []
        self.kept: dict[Request, list] = {}
        self.made = 0

    def add(self, prompt: int, cap: int, priority: int) -> None:
        cap = min(cap, 16 * self.pages - prompt)
        request = Request(f"p{self.made}", self.made, list(range(prompt)), cap, EOS, (priority,))
        self.made += 1
        self.engine.add(request)
        self.live.append(request)

    def step(self) -> None:
        done = self.engine.step()
        assert len(set(done)) == len(done)
        for request in done:
            self.live.remove(request)
            self.finished.append(request)

    def abort(self, index: int) -> None:
        if self.live:
            request = self.live.pop(index % len(self.live))
            before = list(request.tokens), list(request.sampler_logp), list(request.versions)
            self.engine.abort(request)
            assert before == (request.tokens, request.sampler_logp, request.versions)
            assert (request.status, request.finish_reason) == (RequestStatus.ABORTED, "abort")

    def pause(self) -> None:
        evicted = self.engine.pause()
        assert set(evicted) == set(self.live)
        assert all(request.status is RequestStatus.WAITING for request in evicted)
        self.engine.check_drained()
        self.engine.update_weights()
        for request in evicted:
            self.engine.add(request)

    def check(self) -> None:
        scheduler = self.engine.scheduler
        table = scheduler.table
        entries = scheduler._prefilling + scheduler._decoding
        slots = [e.slot for e in entries]
        assert len(set(slots)) == len(slots)
        held = [page for slot in slots for page in table.ids[slot, : table.held[slot]].tolist()]
        assert len(set(held)) == len(held) == scheduler.used_pages
        assert (table.ids >= 0).sum() == len(held), "a page id outlived its owner"
        for entry in entries:
            # Held after a step: what is cached, i.e. all but the token just sampled; all of the prefix in prefill.
            decoding = entry.request.status is RequestStatus.DECODING
            cached = entry.request.context_tokens - 1 if decoding else entry.prefix_tokens
            ahead = decoding and self.engine.overlap  # the page that the step under way, or one dropped, writes to
            assert pages_for(cached) <= table.held[entry.slot] <= pages_for(cached + ahead)
        for request in self.live + self.finished:
            assert len(request.tokens) == len(request.sampler_logp) == len(request.versions)
            assert len(request.tokens) <= request.max_response_tokens
            old = self.kept.get(request, [])
            assert list(zip(request.tokens, request.sampler_logp, request.versions, strict=True))[: len(old)] == old
            self.kept[request] = list(zip(request.tokens, request.sampler_logp, request.versions, strict=True))
        assert {r for r in self.live if r.status in RESIDENT} == {e.request for e in entries}


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(0, 90), st.integers(0, 3)),
        st.tuples(st.just("add"), st.integers(1, 60), st.integers(0, 90), st.integers(0, 3)),
        st.tuples(st.just("step"), st.integers(1, 40)),
        st.tuples(st.just("step"), st.integers(1, 40)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("pause")),
    ),
    min_size=3,
    max_size=25,
)


@settings(deadline=None, max_examples=120)
@given(OPERATIONS, st.integers(1, 6), st.integers(5, 14), st.integers(1, 40))
def test_any_interleaving_keeps_pages_slots_and_tokens_exact(operations, slots, pages, step_tokens):
    for overlap in (False, True):
        finish(Drive(slots, pages, step_tokens, overlap), operations)


def finish(drive: Drive, operations: list[tuple]) -> None:
    """Run the operations, then step until nothing is unfinished; check at every moment."""
    for name, *arguments in operations:
        if name == "step":
            for _ in range(arguments[0]):
                drive.step()
                drive.check()
        else:
            getattr(drive, name)(*arguments)
            drive.check()
    limit = 200 + 400 * drive.made  # every step moves the first request of the order by a token or a chunk
    while drive.engine.has_unfinished:
        drive.step()
        drive.check()
        limit -= 1
        assert limit > 0, "starved"
    assert not drive.live
    drive.engine.check_drained()
    assert drive.engine.scheduler.allocator.num_free == drive.pages
    for request in drive.finished:
        wanted = 1 + (31 * request.sibling) % 70
        assert len(request.tokens) == min(wanted, request.max_response_tokens)
        assert request.finish_reason == ("eos" if wanted <= request.max_response_tokens else "length")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=2, max_size=12), st.integers(7, 12))
def test_the_first_request_of_the_order_is_never_preempted(shapes, pages):
    engine = FakeEngine(lambda request: 10**9, slots=6, pages=pages, workspace_tokens=16 * pages)
    requests = [Request(f"p{i}", 0, [1] * prompt, cap, (), (i,)) for i, (prompt, cap) in enumerate(shapes)]
    for request in reversed(requests):
        engine.add(request)
    while engine.has_unfinished:
        first = next(request for request in requests if not request.finished)
        before = first.preemptions
        engine.step()
        assert first.preemptions == before
        waiting = [r.priority for r in requests if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)]
        started = [r.priority for r in requests if r.status is RequestStatus.PREFILLING]
        assert not waiting or not started or max(started) < min(waiting), "somebody overtook the queue"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=2, max_size=10), st.integers(7, 9))
def test_scarce_pages_change_no_response(shapes, pages):
    def run(num_pages):
        engine = FakeEngine(lambda r: 1 + 13 * len(r.prompt_tokens) % 50, slots=8, pages=num_pages)
        requests = [Request(f"p{i}", 0, [1] * n, cap, EOS, (i,)) for i, (n, cap) in enumerate(shapes)]
        for request in requests:
            engine.add(request)
        while engine.has_unfinished:
            engine.step()
        return [(r.tokens, r.sampler_logp, r.finish_reason) for r in requests]

    assert run(pages) == run(1000)


def test_preemption_happens_and_takes_the_lowest_priority():
    engine = FakeEngine(lambda request: 10**9, slots=3, pages=12)
    requests = [Request(f"p{i}", 0, [1] * 16, 150, (), (i,)) for i in range(3)]
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        engine.step()
    assert [request.preemptions > 0 for request in requests] == [False, True, True]
    engine.check_drained()


@pytest.mark.parametrize("step_tokens", [4, 8192])
def test_decode_rows_come_before_prefill_and_the_budget_holds(step_tokens):
    engine = FakeEngine(lambda request: 30, slots=4, pages=100, step_tokens=step_tokens)
    for i in range(8):
        engine.add(Request(f"p{i}", 0, [1] * 21, 40, EOS))
    kinds = set()
    while engine.has_unfinished:
        ready = sum(r.status is RequestStatus.DECODING for r in engine.scheduler.unfinished)
        engine.step()
        stats = engine.last_step
        kinds.add(stats.kind)
        assert stats.decode_tokens == stats.active_requests == ready
        assert stats.decode_tokens + stats.prefill_tokens <= step_tokens
    assert kinds == {"prefill", "decode"} | ({"mixed"} if step_tokens == 4 else set())
    engine.step()
    assert engine.last_step.kind == "idle"
