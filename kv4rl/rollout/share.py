"""One prompt stream for all replicas: each takes its turn, so no prompt is sampled twice and none is left out."""

from kv4rl.config import require
from kv4rl.rollout.group import Prompt, PromptStream


class SharedStream:
    """Every `replicas`-th prompt of `stream`, from number `replica` on (`PromptStream`). ValueError out of range."""

    def __init__(self, stream: PromptStream, replica: int, replicas: int):
        require(replicas >= 1, "replicas", replicas, "an integer >= 1")
        require(0 <= replica < replicas, "replica", replica, f"0 … {replicas - 1}")
        self._stream, self._replica, self._replicas = stream, replica, replicas
        self._drawn = 0  # prompts taken from the stream, those of the other replicas among them

    def next(self) -> Prompt:
        while self._drawn % self._replicas != self._replica:
            self._draw()
        return self._draw()

    def state(self) -> dict:
        turn = {"replica": self._replica, "replicas": self._replicas, "drawn": self._drawn}
        return turn | {"stream": self._stream.state()}

    def load_state(self, state: dict) -> None:
        """Continue where `state` was taken. Raises ValueError on the state of another replica or number of them."""
        given, own = (state["replica"], state["replicas"]), (self._replica, self._replicas)
        require(given == own, "state of (replica, replicas)", given, f"that of this stream, {own}")
        self._stream.load_state(state["stream"])
        self._drawn = state["drawn"]

    def _draw(self) -> Prompt:
        self._drawn += 1
        return self._stream.next()
