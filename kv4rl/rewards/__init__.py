"""Rewards: boxed-answer grading by Math-Verify in killable worker processes (design decision 10)."""

from kv4rl.rewards.gold import Gold
from kv4rl.rewards.grader import Grader, GraderCounters, Verdict, check_gold

__all__ = ["Gold", "Grader", "GraderCounters", "Verdict", "check_gold"]
