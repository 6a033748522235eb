"""How long two samplers that draw with the same noise write the same text."""

from collections.abc import Mapping, Sequence

from kv4rl.config import require


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def agreement_table(responses: Mapping[str, Sequence], *, baseline: str) -> list[dict[str, str]]:
    """One dict a precision: texts equal to the baseline's, share of its tokens before the first difference, and the
    mean absolute distance of the recorded log-probs (nats) on those common tokens.

    Args: responses: precision -> responses (`tokens`, `sampler_logp`) to the same prompts in the same order.
    """
    require(baseline in responses, "baseline", baseline, f"one of {', '.join(responses)}")
    rows = []
    for precision, texts in responses.items():
        pairs = list(zip(texts, responses[baseline], strict=True))
        common = [common_tokens(ours.tokens, theirs.tokens) for ours, theirs in pairs]
        distances = [
            abs(x - y)
            for (ours, theirs), n in zip(pairs, common, strict=True)
            for x, y in zip(ours.sampler_logp[:n], theirs.sampler_logp[:n], strict=True)
        ]
        share = sum(common) / max(1, sum(len(theirs.tokens) for _, theirs in pairs))
        equal = sum(ours.tokens == theirs.tokens for ours, theirs in pairs)
        rows.append(
            {
                "precision": precision,
                "equal texts": f"{equal} of {len(pairs)}",
                "tokens before the first difference": f"{share:.0%}",
                "log-prob distance there, nats": f"{sum(distances) / max(1, len(distances)):.1e}",
            }
        )
    return rows
