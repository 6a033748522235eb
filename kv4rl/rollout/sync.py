"""Synchronous waves: the baseline of Fig. 1 and Fig. 2."""

from kv4rl.rollout.collector import Collector


class SyncCollector(Collector):
    """Waves of exactly T groups; a wave ends when all T G responses have finished (§3, Fig. 1)."""

    name = "sync"

    @property
    def pool_groups(self) -> int:
        return self.config.groups_per_update

    def may_stop(self) -> bool:
        return self._complete == len(self._pool)
