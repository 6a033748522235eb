"""Quota-based partial rollout: responses continue across policy updates (§3, §A.1)."""

from kv4rl.rollout.collector import Collector


class PartialCollector(Collector):
    """Collect until a quota of T groups is complete; carry the rest, tokens and log-probabilities kept.

    - At its start a collection tops the pool up to floor(T (1 + beta)) groups, complete leftovers included.
      Resumed prefixes run first, then older groups before younger ones.
    - It stops when at least T groups are complete and no unfinished group has reached the age limit.
      *Age* is the number of policy updates since the group's first token was sampled:
      `engine.policy_version - first_version`. The limit is inclusive: a group with age >= eta must complete before
      the collection may stop, one with age eta - 1 need not. So a group's tokens come from at most eta + 1 policy
      versions. (verl counts the first step as age 1: its threshold is our eta + 1.)
    - The oldest T complete groups are returned; complete groups beyond them stay for a later collection, and
      unfinished ones give their pages back and are re-prefilled later under the policy of that time.
    - A response's cap counts its tokens over all intervals, once.
    """

    name = "partial"

    @property
    def pool_groups(self) -> int:
        return self.config.pool_groups

    def may_stop(self) -> bool:
        if self._complete < self.config.groups_per_update:
            return False
        version, limit = self.engine.policy_version, self.config.age_limit
        return not any(group.age(version) >= limit for group in self._pool if not group.complete)
