"""Evaluation of policies: avg@k and pass@k over an engine, with the grader (§B.2)."""

from kv4rl.evaluation.evaluate import PAPER_SAMPLING, EvaluationResult, evaluate
from kv4rl.evaluation.metrics import Spread, avg_at_k, pass_at_k, spread, table_row

__all__ = ["PAPER_SAMPLING", "EvaluationResult", "Spread", "avg_at_k", "evaluate", "pass_at_k", "spread", "table_row"]
