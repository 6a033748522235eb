"""The page `make replicate` leaves: paper beside measured, the loop's figures, links to the executed notebooks.

It reads data/results and nothing else, so the page can be made again at any time: `python -m kv4rl.report`.
"""

import argparse
import html
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from kv4rl import learning, results
from kv4rl.cli import one_sentence
from kv4rl.compare import compare
from kv4rl.fidelity.orderings import MODELS, ORDERINGS
from kv4rl.paper import PUBLISHED
from kv4rl.viz.fidelity import arm_dots, sampler_kl_bars, width_sweeps
from kv4rl.viz.orderings import not_held
from kv4rl.viz.style import use_template
from kv4rl.viz.training import learning_curves

PANELS = (("A3",), ("A4a", "A4b", "A4c"))  # one figure each; A3 has Fig. 4b's arms and more
STYLE = """
body { font: 16px/1.5 Helvetica, Arial, sans-serif; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 14px } td, th { padding: 4px 10px; border-bottom: 1px solid #ddd;
text-align: left; vertical-align: top } th { border-bottom: 2px solid #555 } .absent { color: #999 }
code { background: #f4f4f4; padding: 1px 4px }
"""

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>kv4rl: replication</title>
<style>{style}</style><script>{script}</script></head><body>
<h1>KV4-RL, replicated</h1>
<p>{made}. Every number is a row of <code>data/results/</code> with the command that makes it.</p>
{body}</body></html>
"""


def build(output: Path, *, notebooks: list[Path] = ()) -> Path:
    """Write the page to `output` (one self-contained HTML file) and return its path."""
    use_template()
    sections = [
        ("Paper beside measured", html_table(compare(), absent="not measured")),
        ("Reward rises under KV4-RL rollout", learning_section()),
        ("What each cache does to the sampler", fidelity_section()),
        ("Kernels on the H200", rows_section("kernels.csv", {"metric": "speedup_vs_bf16"})),
        ("Executed notebooks", links(notebooks, output.parent)),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>\n{content}\n" for title, content in sections if content)
    made = f"{results.today()}, commit {results.commit()}, {results.hardware()}"
    page = PAGE.format(style=STYLE, script=get_plotlyjs(), made=html.escape(made), body=body)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    return output


def learning_section() -> str:
    """Of every setting: curves of the precisions, table of means over seeds, and what the differences show."""
    content = ""
    for name, setting in learning.read_runs().items():
        content += (
            f"<h3>{html.escape(learning.describe(name))}</h3>{figure_html(learning_curves(learning.curves(setting)))}"
        )
        content += html_table(learning.summary(setting)) + html_table(learning.differences(setting))
    return content


def fidelity_section() -> str:
    """Sampler KL: the loop's bars, Fig. 4b and A3, 4c and A4 from rows, and a table of the orderings that fail."""
    path = results.RESULTS / "fidelity.csv"
    rows = results.read_rows(path, experiment="fidelity") if path.exists() else []
    kls = [row for row in rows if row["metric"] == "sampler_kl"]
    figures = [sampler_kl_bars(of_model, title=model) for model, of_model in by_model(kls, "loop").items()]
    figures += [arm_dots([row for row in kls if row["shape"] in shapes]) for shapes in PANELS if by_model(kls, *shapes)]
    published = PUBLISHED["fidelity/4b/kl_reduction_16_128"]
    figures += [
        width_sweeps(of_model, published=published, title=f"4c: {model}, {of_model[-1]['n']} states")
        for model, of_model in by_model(kls, "4c").items()
    ]
    return "".join(map(figure_html, figures)) + exceptions_section(rows)


def by_model(rows: list[dict], *shapes: str) -> dict[str, list[dict]]:
    """The rows of these panels, by model; models without any are left out."""
    chosen = [row for row in rows if row["shape"] in shapes]
    models = sorted({row["model"] for row in chosen})
    return {model: [row for row in chosen if row["model"] == model] for model in models}


def exceptions_section(rows: list[dict]) -> str:
    """What the paper orders or calls equal and these rows do not; empty without the rows of every panel asked."""
    asked = {ordering.shape for ordering in ORDERINGS}
    if any(asked - {row["shape"] for row in rows if row["model"] == model} for model in MODELS):
        return ""
    lines, reasons = not_held(rows)
    listed = "".join(f"<li>{html.escape(reason)}</li>" for reason in reasons)
    return f"<h3>Orderings of the paper that do not hold here</h3>{html_table(lines)}<ol>{listed}</ol>"


def rows_section(file: str, where: dict) -> str:
    """The rows of a results file as a table; empty if the file is absent."""
    path = results.RESULTS / file
    if not path.exists():
        return ""
    columns = ("arm", "model", "shape", "value", "unit", "hardware", "date", "command")
    return html_table([{name: row[name] for name in columns} for row in results.read_rows(path, **where)])


def links(notebooks: list[Path], folder: Path) -> str:
    """A list of links to the executed notebooks, relative to the page."""
    items = "".join(f'<li><a href="{path.relative_to(folder)}">{path.stem}</a></li>' for path in notebooks)
    return f"<ul>{items}</ul>" if items else ""


def html_table(rows: list[dict], *, absent: str = "") -> str:
    """Rows of equal keys as a table; cells that read `absent` are greyed."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    lines = []
    for row in rows:
        cells = ((' class="absent"' if value == absent else "", html.escape(str(value))) for value in row.values())
        lines.append("<tr>" + "".join(f"<td{mark}>{text}</td>" for mark, text in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def figure_html(figure: go.Figure) -> str:
    """A plotly figure as HTML, without plotly's script: the page's head carries it once."""
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kv4rl.report", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=results.REPOSITORY / "runs" / "replicate" / "index.html")
    options = parser.parse_args()
    with one_sentence("kv4rl.report"):
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.touch()
    print(build(options.output))


if __name__ == "__main__":
    main()
