"""Collections measured on a real engine with forced lengths (Figs. 2, 6a, A6a), from rows of `bench rollout`."""

from collections.abc import Mapping, Sequence
from operator import itemgetter

from kv4rl.config import PRECISIONS
from kv4rl.paper import PUBLISHED
from kv4rl.viz.names import PRECISION_NAMES
from kv4rl.viz.rows import without_empty_columns

Rows = Sequence[Mapping[str, str]]


def _cells(rows: Rows) -> dict[tuple[str, str, str], dict[str, float]]:
    """(fit, model, arm) -> metric -> value, of the rows of experiment `rollout`."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        if row["experiment"] == "rollout":
            found.setdefault((row["shape"], row["model"], row["arm"]), {})[row["metric"]] = float(row["value"])
    return found


def collection_rows(rows: Rows) -> list[dict[str, str]]:
    """One dict a fit, model and precision: seconds of a collection under one budget, and where its speedup is from."""
    lines, order = [], {name: place for place, name in enumerate(PRECISIONS)}
    found = {key: cells for key, cells in _cells(rows).items() if key[2] in order and "cache_pages" in cells}
    for (shape, model, arm), cells in sorted(found.items(), key=lambda item: (item[0][:2], order[item[0][2]])):
        line = {"lengths": shape, "model": model, "cache": arm, "pages": f"{cells['cache_pages']:,.0f}"}
        line |= {"collection, s": f"{cells['collection_s']:.1f}", "tokens/s": f"{cells['decode_tokens_per_s']:,.0f}"}
        names = {
            "over BF16": "speedup_vs_bf16",
            "execution": "speedup_at_bf16_pages",
            "capacity": "speedup_of_capacity",
        }
        lines.append(line | {name: f"{cells[key]:.2f}x" if key in cells else "-" for name, key in names.items()})
    return without_empty_columns(lines)


def unanswered_collections(rows: Rows) -> list[str]:
    """What `collection_rows` lacks, a sentence a fit and model: rows of BF16 alone compare nothing."""
    found: dict[tuple[str, str], set[str]] = {}
    for (shape, model, arm), cells in _cells(rows).items():
        if arm in PRECISIONS and "cache_pages" in cells:
            found.setdefault((shape, model), set()).add(arm)
    return [
        f"{model}, {shape}: "
        + ", ".join(PRECISION_NAMES[name] for name in PRECISIONS if name not in arms)
        + " not measured"
        for (shape, model), arms in found.items()
        if not {"bf16", "kv4rl"} <= arms
    ]


def scheduler_rows(rows: Rows) -> list[dict[str, str]]:
    """One dict a measured fit and ratio of Fig. 2: partial over synchronous on the engine, beside the paper's."""
    lines = []
    for (shape, model, arm), cells in _cells(rows).items():
        if arm != "partial_over_sync":
            continue
        for metric, value in cells.items():
            published = PUBLISHED.get(f"trace/{shape.lower()}/{metric}")
            line = {"lengths": shape, "model": model, "ratio": metric, "measured": f"{value:.2f}"}
            lines.append(line | {"paper": f"{published.value:g}" if published else "drawn only"})
    return lines


def overhead_rows(rows: Rows) -> list[dict[str, str]]:
    """One dict a shape, model and precision of `bench overhead`: the engine's decode step beside the replay's.

    `of the replay`: the share of the replay's tokens a second that the engine reaches at the same states; `unhidden`:
    the same where the host's work does not overlap the running step.
    """
    lines = []
    for (shape, model, arm), cells in _cells(rows).items():
        if "share_of_replay" not in cells:
            continue
        line = {"requests x context": shape, "model": model, "cache": arm}
        named = {"engine step": "engine_step_ms", "its device part": "device_step_ms", "replay": "decode_replay_ms"}
        line |= {f"{name}, ms": f"{cells[key]:.2f}" for name, key in named.items()}
        shares = {"of the replay": "share_of_replay", "unhidden": "serial_share_of_replay"}
        line |= {name: f"{cells[key]:.1%}" for name, key in shares.items()}
        lines.append(line | {"prefill tokens/s": f"{cells['prefill_tokens_per_s']:,.0f}"})
    return lines


def today_rows(rows: Rows) -> list[dict[str, str]]:
    """One dict a model, shape and arm of `today.csv`: tokens a second, and the ratios to transformers' `generate` and
    `generate_batch`, each taken within a run; with its commit where that is not the run of the tokens."""
    engine = itemgetter("model", "shape", "arm")
    found = {(*engine(row), row["metric"]): row for row in rows}
    lines = []
    for row in rows:
        if row["metric"] != "tokens_per_s":
            continue
        line = {"model": row["model"], "prompts x tokens + new": row["shape"], "engine": row["arm"]}
        line["tokens/s"] = f"{float(row['value']):,.0f}"
        for baseline in ("generate", "generate_batch"):
            ratio = found.get((*engine(row), f"speedup_vs_{baseline}"))
            line[f"over {baseline}"] = _ratio(ratio, beside=row) if ratio else "-"
        lines.append(line)
    return lines


def _ratio(row: Mapping[str, str], *, beside: Mapping[str, str]) -> str:
    said, run = f"{float(row['value']):.1f}x", itemgetter("commit", "command")
    return said if run(row) == run(beside) else f"{said} at {row['commit']}"


# new tokens -> states whose replayed step (`bench overhead`) and whose products (`bench floor`) stand for the mean step
LIMIT_STATES = {256: ("256x128", "256x256"), 2048: ("256x1152", "256x1152")}


def today_limit(today: Rows, rollout: Rows, replay: Rows) -> str:
    """What bounds this engine's ratio to `generate`: its prefill and replayed steps alone, then the products alone.

    One sentence a length of `LIMIT_STATES`, from rows of `bench today`, `bench overhead` and `bench floor` (Qwen3-4B,
    256 prompts of 128 tokens, one GPU); one that names them where none has all its rows.
    """
    found = {(r["arm"], r["model"], r["shape"], r["metric"]): float(r["value"]) for r in (*today, *rollout, *replay)}
    said = [_limit(found, tokens, *states) for tokens, states in LIMIT_STATES.items()]
    named = "What bounds the ratios takes rows of `bench today`, `bench overhead` and `bench floor` at these shapes."
    return "\n".join(filter(None, said)) or named


def _limit(found: Mapping[tuple, float], tokens: int, stepped: str, multiplied: str) -> str:
    """One length's sentence; empty where a row is missing."""
    model = "qwen3-4b"
    try:
        generate, ours = (
            found[arm, model, f"256x128+{tokens}", "tokens_per_s"] for arm in ("transformers_generate", "kv4rl")
        )
        rate, step = (found["kv4rl", model, stepped, m] for m in ("prefill_tokens_per_s", "decode_replay_ms"))
        products = found["bf16", f"{model}-tp1", f"{multiplied}/{multiplied}", "products_ms"]
    except KeyError:
        return ""
    prefill, steps = 256 * 128 / rate, tokens - 1
    ratio = lambda step_ms: f"{256 * tokens / (prefill + steps * step_ms / 1e3) / generate:.1f}x"
    return (
        f"{tokens} new tokens: prefill at {rate:,.0f} tokens/s takes {prefill:.2f} s, {steps} replayed steps of "
        f"{step:.2f} ms take {steps * step / 1e3:.2f} s: an engine that adds nothing to them would reach {ratio(step)} "
        f"of `generate`, this one reaches {ours / generate:.1f}x. Steps of nothing but their matrix products "
        f"({products:.2f} ms) would reach {ratio(products)}."
    )
