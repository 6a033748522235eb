"""`python -m kv4rl.readme`: rewrites the tables of the READMEs and the model card, and the pictures, from data/results.

A block between `<!-- NAME -->` and `<!-- /NAME -->` is made by the function of that name here; a test asserts that the
committed README is what this writes, so no figure in it can drift from its row.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from kv4rl.bench.error import SHAPE as ERROR_SHAPE
from kv4rl.bench.kernels import TRITON
from kv4rl.compare import ABSENT, ORIGIN, compare, ours
from kv4rl.config import PRECISIONS
from kv4rl.learning import Setting, curves, describe, main_setting, read_runs, summary, unstable, verdict
from kv4rl.paper import PUBLISHED, REPLAY_SHAPES
from kv4rl.results import REPOSITORY, RESULTS, latest, read_rows
from kv4rl.viz.fidelity import width_sweeps
from kv4rl.viz.kernels import SMALL_BATCH, is_shape, kernel_speedups, of_table_a3, speedup_table, times, write_times
from kv4rl.viz.replay import ARMS, PAPER_TP, of_model, replay_table
from kv4rl.viz.rollout import today_rows
from kv4rl.viz.stamp import digest, stamp
from kv4rl.viz.style import PRECISION_NAMES, use_template
from kv4rl.viz.training import PANELS, learning_curves

README = REPOSITORY / "README.md"
PAGES = (README, REPOSITORY / "data" / "models" / "mini-qwen3" / "README.md", REPOSITORY / "kernels" / "README.md")
SECONDARY = (  # comparisons that notebook 11 and the page show; here they stand in a table of their own or nowhere
    "bits per element", "sampler KL of stored", "sampler KL, K and V rotated", "resident KV", "decode replay",
    "decode calls per interval", "decode step, partial", "accuracy lost", "reward lost", "share of an iteration",
    "decode throughput, partial over synchronous, 8B-400", "late collection of a full iteration",
)  # fmt: skip


def notebooks(rows: Path = RESULTS) -> str:
    """One row a notebook: title, the question it answers, paper, hardware, minutes, what it shows."""
    lines = ["| notebook | question | paper | hardware | minutes (CPU) | you will have shown |", "|" + "---|" * 6]
    for path in sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        meta = notebook["metadata"]["kv4rl"]
        title = "".join(notebook["cells"][0]["source"]).split("\n")[0].removeprefix("# ")
        cells = (
            f"[{title}](notebooks/{path.name})", meta["question"], ", ".join(meta["paper"]), meta["requires"].upper(),
            f"{meta['minutes_cpu']:g}", meta["shows"],
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def results(rows: Path = RESULTS) -> str:
    """Paper beside measured: what has a row and is not secondary; below it, numbered, their commands."""
    lines = [line for line in compare(rows) if line["ours"] != ABSENT and not line["quantity"].startswith(SECONDARY)]
    runs = list(dict.fromkeys(tuple(line[name] for name in ORIGIN) for line in lines))
    for line in lines:
        line["run"] = str(1 + runs.index(tuple(line[name] for name in ORIGIN)))
    made = [
        f"{number}. `{command}` · {hardware} · {date} · {commit}"
        for number, (hardware, date, commit, command) in enumerate(runs, start=1)
    ]
    table = _table(lines, ("quantity", "place", "paper", "ours", "scope", "run", "remark"))
    return "\n".join([table, "", "Runs, by the table's numbers:", "", *made])


LEARNERS = {"smollm2-135m": "SmolLM2-135M", "mini-qwen3": "mini model"}  # of the first one: table and picture
LEARNT = ("reward_first", "reward_last", "accuracy", "response_tokens", "reference_kl", "sampler_mismatch")


def training(rows: Path = RESULTS) -> str:
    """Mean [95 % interval] over seeds of the first learner's main setting; what every learner's every setting shows."""
    runs = {model: read_runs(model=model, directory=rows) for model in LEARNERS}
    shown = [
        f"- {LEARNERS[model]}, {describe(name, model=model)} ({_machine(setting)}): "
        + "; ".join([verdict(setting), *unstable(setting, model=model, directory=rows)])
        for model, settings in runs.items()
        for name, setting in settings.items()
    ]
    first = next(filter(None, runs.values()), None)
    if first is None:
        return _table([], ())
    table = _table(summary(first[main_setting(first)]), ("precision", "seeds", *LEARNT))
    return "\n\n".join([table, "\n".join(f"{line}." for line in shown)])


def _machine(setting: Setting) -> str:
    """Hardware of a setting's runs: `read_runs` keeps those of one machine."""
    return next(run.row["hardware"] for runs in setting.values() for run in runs.values())


HEADS = {"tp2_16q4kv": "TP2 shard (16 query, 4 KV heads)", "tp1_32q8kv": "one GPU (32 query, 8 KV heads)"}


def kernels(rows: Path = RESULTS) -> str:
    """One layer's decode attention, a line a kind of heads: ranges of the speedups over each kind of shapes."""
    found, lines = read_rows(rows / "kernels.csv", experiment="kernels", metric="speedup_vs_bf16"), []
    for model, heads in HEADS.items():
        mine = [row for row in found if row["model"] == model and not row["arm"].endswith(TRITON)]
        small = [row for row in mine if is_shape(row) and int(row["shape"].split("x")[0]) <= SMALL_BATCH]
        kinds = {"Table A3's": of_table_a3(mine), "mixed": [row for row in mine if row["shape"].startswith("ragged")]}
        kinds[f"1 to {SMALL_BATCH} requests of 1k to 32k"] = small
        parts = [_ranges(title, of_kind) for title, of_kind in kinds.items() if of_kind]
        if parts:
            lines.append(f"- {heads}: {'; '.join(parts)} ({_origin(mine)}).")
    return "\n".join(lines)


def _origin(rows: list[dict[str, str]]) -> str:
    """Hardware and date of the latest row, and every commit whose rows these are."""
    run, commits = latest(rows), dict.fromkeys(row["commit"] for row in rows)
    return f"{run['hardware']}, {run['date']}, {', '.join(commits)}"


def _ranges(title: str, rows: list[dict[str, str]]) -> str:
    """`30 shapes (title): KV8 a to b, ...`."""
    return f"{len({row['shape'] for row in rows})} shapes ({title}): {_spans(rows)}"


def decode(rows: Path = RESULTS) -> str:
    """One layer's decode shape by shape: FlashInfer's time, each format's speedup, `write_kv`; errors, Triton's."""
    stored = read_rows(rows / "kernels.csv", experiment="kernels")
    found, parts = [row for row in stored if row["shape"] != ERROR_SHAPE], []
    for model, heads in HEADS.items():
        mine = [row for row in found if row["model"] == model and not row["arm"].endswith(TRITON)]
        lines = speedup_table(mine)
        written = [row for row in mine if row["metric"] == "write_kv_us"]
        decoded = [row for row in mine if row["metric"] == "speedup_vs_bf16"]
        said = (
            f"{heads}, {_origin(decoded)}; `write_kv` of q, k, v, {_origin(written)}: {'; '.join(write_times(mine))}:"
        )
        parts += [said[0].upper() + said[1:], _table(lines, tuple(lines[0]))]
    parts += _errors([row for row in stored if row["shape"] == ERROR_SHAPE])
    return "\n\n".join(parts + _triton(found))


def _triton(found: list[dict[str, str]]) -> list[str]:
    """The Triton kernels' speedups, a table a kind of heads with rows of theirs; nothing where there are none."""
    parts, names = [], {arm + TRITON: PRECISION_NAMES[arm] for arm in PRECISIONS[1:]}
    for model, heads in HEADS.items():
        mine = [row for row in found if row["model"] == model and row["metric"] == "speedup_vs_bf16"]
        mine = [row for row in mine if row["arm"] in names]
        if not mine:
            continue
        value = {(row["shape"], row["arm"]): float(row["value"]) for row in mine}
        lines = [
            {"batch x context": shape} | {name: times(value.get((shape, arm))) for arm, name in names.items()}
            for shape in dict.fromkeys(row["shape"] for row in mine)
        ]
        said = f"The Triton kernels, x of BF16 FlashInfer in their own run, {heads}, {_origin(mine)}"
        parts += [f"{said}:", _table(lines, tuple(lines[0]))]
    return parts


def _errors(found: list[dict[str, str]]) -> list[str]:
    """A line a format: its error beside FlashInfer's on the same values, a pair of columns a kind of heads."""
    if not found:
        return []
    value = {(row["model"], row["arm"], row["metric"]): float(row["value"]) for row in found}
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in found):
        line = {"cache": PRECISION_NAMES[arm.removesuffix("_p8")] + ", 8-bit P" * arm.endswith("_p8")}
        for model, heads in HEADS.items():
            if (model, arm, "error_vs_float64") in value:
                ours, theirs = (value[model, arm, m] for m in ("error_vs_float64", "flashinfer_error_vs_float64"))
                line[heads] = f"{ours:.2e} beside {theirs:.2e}: {times(value[model, arm, 'error_vs_flashinfer'])}"
        lines.append(line)
    said = f"Error against float64 beside FlashInfer BF16's on the same dequantised values, {_origin(found)}"
    return [f"{said} (`bench error`):", _table(lines, tuple(lines[0]))]


def replay(rows: Path = RESULTS) -> str:
    """Whole decode steps: each checkpoint's speedups beside the paper's, and what protection keeps of KV4's."""
    found = _stored(rows / "replay.csv")
    shares = [row for row in found if (row["arm"], row["metric"]) == ("kv4rl", "retention_vs_kv4")]
    kept = [
        f"{float(row['value']):.1%} ({row['shape']}, TP{of_model(row)[1]}, {row['commit']})"
        for row in shares
        if row["shape"].startswith("ragged")
    ]
    speedups = [row for row in found if row["metric"] == "speedup_vs_bf16" and row["shape"] in REPLAY_SHAPES]
    as_there, else_where = ([r for r in speedups if (of_model(r)[1] == PAPER_TP) == same] for same in (True, False))
    table, key = replay_table(as_there), "ragged/{}/retention_vs_kv4"
    paper = ", ".join(f"{PUBLISHED[key.format(size.lower())].value:g}% at {size}" for size in ("4B", "8B"))
    said = [f"Table: {_origin(as_there)}."] if as_there else []
    if kept:
        said.append(
            f"KV4-RL at 16/128 keeps of KV4's throughput {', '.join(kept)} (paper at TP2: {paper}). "
            "Since 9e1c4d3 a card is heated before each arm (`--heat`)."
        )
    if else_where:
        said.append(f"On one GPU, where they fit ({_origin(else_where)}): {_spans(else_where)}.")
    parts = (_table(table, tuple(table[0]) if table else ()), " ".join(said))
    return "\n\n".join(part for part in parts if part)


def _spans(rows: list[dict[str, str]]) -> str:
    """`KV8 a to b, ...`: each replayed arm's lowest and highest speedup."""
    values = {arm: [float(row["value"]) for row in rows if row["arm"] == arm] for arm in ARMS}
    return ", ".join(f"{ARMS[arm][0]} {min(v):.2f} to {max(v):.2f}x" for arm, v in values.items() if v)


def today(rows: Path = RESULTS) -> str:
    """Tokens a second of transformers' two ways and of this engine, in one line a shape that this engine ran too."""
    lines: dict[str, list[str]] = {}
    answered = set()
    for row in today_rows(_stored(rows / "today.csv")):
        shape = f"{row['model']}, {row['prompts x tokens + new']} new tokens"
        if row["engine"] in PRECISIONS:
            answered.add(shape)
        overs = ("over generate", "over generate_batch")
        ratios = [f"{over} {row[over]}" for over in overs if row[over] != "-"]
        said = "" if row["engine"].startswith("transformers") or not ratios else f" ({', '.join(ratios)})"
        lines.setdefault(shape, []).append(f"{row['engine']} {row['tokens/s']}{said}")
    told = [f"- {shape}: {', '.join(cells)}" for shape, cells in lines.items() if shape in answered]
    return "\n".join(told) or _table([], ())


def _stored(path: Path) -> list[dict[str, str]]:
    return read_rows(path.resolve()) if path.exists() else []


MEASURED = {  # of the mini model's card: label -> (metrics of mini_model.csv, digits)
    "Reward": (("reward",), 3),
    "Response tokens: mean / median / p90 / p99": (("tokens_mean", "tokens_p50", "tokens_p90", "tokens_p99"), 0),
    "p99 over median": (("p99_over_median",), 2),
    "First error: arithmetic of a step": (("first_error_arithmetic",), 3),
    "First error: value looked back at": (("first_error_look_back",), 3),
    "First error: look-back / sum of the answer": (("first_error_answer_look_back", "first_error_answer_sum"), 3),
    "Cut off at 1,024 tokens": (("truncated",), 3),
}


def mini_model(rows: Path = RESULTS) -> str:
    """What the mini model does on held-out problems, sampled and greedy, and the run behind it."""
    found = read_rows(rows / "mini_model.csv", experiment="mini_model", model="mini-qwen3")
    measured = {row["arm"] for row in found}
    arms = {name: arm for name, arm in (("temperature 1", "temperature_1"), ("greedy", "greedy")) if arm in measured}
    value = {(row["arm"], row["metric"]): float(row["value"]) for row in found}
    lines = [
        {"held-out problems": label}
        | {name: " / ".join(f"{value.get((arm, m), 0.0):.{digits}f}" for m in metrics) for name, arm in arms.items()}
        for label, (metrics, digits) in MEASURED.items()
    ]
    run = found[0]
    origin = f"{run['n']} problems · `{run['command']}` · {run['hardware']} · {run['date']} · {run['commit']}"
    return "\n".join([_table(lines, tuple(lines[0])), "", origin])


def _table(rows: list[dict], columns: tuple[str, ...]) -> str:
    if not rows:
        return "*No rows yet.*"
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row[name] for name in columns) + " |" for row in rows])


BLOCKS = {
    "notebooks": notebooks, "results": results, "training": training, "kernels": kernels, "replay": replay,
    "today": today, "mini_model": mini_model, "decode": decode,
}  # fmt: skip


def rewrite(text: str, rows: Path = RESULTS) -> str:
    """`text` with every block made anew from the result files in `rows`.

    Raises ValueError for a block without its end or without a function.
    """
    for name in re.findall(r"<!-- (\w+) -->", text):
        if name not in BLOCKS or f"<!-- /{name} -->" not in text:
            raise ValueError(f"block {name!r}: expected one of {', '.join(BLOCKS)}, closed by <!-- /{name} -->")
        block = f"<!-- {name} -->\n{BLOCKS[name](rows)}\n<!-- /{name} -->"
        text = re.sub(f"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def protection_sweeps() -> go.Figure:
    """Fig. 4c from SmolLM2's rows, titled with Fig. 4b's ratio at 16/128: ours with its interval, and the paper's."""
    rows = read_rows("fidelity.csv", metric="sampler_kl", shape="4c", model="smollm2-135m")
    published = PUBLISHED["fidelity/4b/kl_reduction_16_128"]
    where = {"metric": "kl_reduction_vs_kv4", "shape": "4b", "model": "smollm2-135m", "arm": "kv4rl"}
    ratio = latest(read_rows("fidelity.csv", **where))
    title = f"KL of KV4 over KV4-RL at 16/128: {ours(ratio, published.unit)} on SmolLM2-135M"
    title += f", {published.value:g} {published.unit} on Qwen3-4B in the paper"
    figure = width_sweeps(rows, published=published, title=title)
    return figure.update_layout(width=900, title_font_size=15)


def learning() -> go.Figure:
    """Reward and sampler mismatch of the first learner's main setting: two panels, legible at the README's width."""
    model, title = next(iter(LEARNERS.items()))
    settings = read_runs(model=model)
    main = main_setting(settings)
    panels = [panel for panel in PANELS if panel[0] in ("critic/score/mean", "rollout_corr/k3_kl")]
    figure = learning_curves(curves(settings[main]), panels=panels)
    return figure.update_layout(title=f"{title}, {describe(main, model=model)}", title_font_size=15)


def speedups_of_table_a3() -> go.Figure:
    """The kernels' bars of notebook 06."""
    return kernel_speedups(of_table_a3(read_rows("kernels.csv", metric="speedup_vs_bf16", model="tp2_16q4kv")))


PICTURES = {
    "kernel_speedups": speedups_of_table_a3,
    "learning_curves": learning,
    "width_sweeps": protection_sweeps,
}


def draw(directory: Path = REPOSITORY / "data" / "figures") -> list[Path]:
    """The README's pictures, as PNG (needs Chromium or Chrome). Returns their paths."""
    use_template()
    figures = {name: make() for name, make in PICTURES.items()}
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.write_image(path, scale=1.5)
        stamp(path, digest(figure))
    return paths


def main(arguments: Sequence[str] = ()) -> None:
    argparse.ArgumentParser(prog="python -m kv4rl.readme", description=__doc__.split("\n")[0]).parse_args(arguments)
    for page in PAGES:
        page.write_text(rewrite(page.read_text()))
    print(*draw(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
