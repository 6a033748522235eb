"""The README's tables are made from rows and notebooks: what is committed is what `python -m kv4rl.readme` writes."""

import re
import subprocess

import pytest

from kv4rl import learning, load_tokenizer, preset, readme
from kv4rl.attention.regions import regions
from kv4rl.bench import error
from kv4rl.bench.kernels import SHARDS
from kv4rl.model.weights import MODELS_DIR
from kv4rl.results import REPOSITORY, read_rows, write_rows
from kv4rl.tasks.datasets import open_stream
from kv4rl.tasks.stream import take

TEXT = readme.README.read_text()


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.parent.name)
def test_tables_are_what_the_committed_rows_say(page, tmp_path):
    """The index's rows, not the working tree's: `make replicate` adds those of this machine."""
    command = ["git", "-C", str(REPOSITORY), "checkout-index", "--all", f"--prefix={tmp_path}/"]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("not a git checkout: nothing says which rows were committed")
    assert readme.rewrite(page.read_text(), tmp_path / "data" / "results") == page.read_text()


def test_a_block_without_its_end_is_refused():
    with pytest.raises(ValueError, match="'results'"):
        readme.rewrite("<!-- results -->\n")


def test_triton_rows_make_a_table_of_their_own_and_change_no_other(tmp_path):
    stored = [row for row in read_rows("kernels.csv") if not row["arm"].endswith(readme.TRITON)]
    write_rows(tmp_path / "kernels.csv", stored)
    before, summary = readme.decode(tmp_path), readme.kernels(tmp_path)
    assert "Triton" not in before
    speedups = [row for row in stored if row["metric"] == "speedup_vs_bf16" and row["shape"] == "640x874"]
    theirs = [row | {"arm": row["arm"] + "_triton", "value": "1.234"} for row in speedups if row["arm"] == "kv4"]
    write_rows(tmp_path / "kernels.csv", [row | {"date": "2999-01-01", "commit": "abc1234"} for row in theirs])
    after = readme.decode(tmp_path)
    assert after.startswith(before) and readme.kernels(tmp_path) == summary
    added = after.removeprefix(before)
    assert added.count("| batch x context | KV8 | KV4 | KV4-RL |") == len(theirs) == 2
    assert added.count("| 640x874 | - | 1.23x | - |") == 2
    assert added.count("2999-01-01, abc1234") == 2


def test_errors_make_a_line_a_format_and_leave_the_speedups_origin_alone(tmp_path):
    write_rows(tmp_path / "kernels.csv", [row for row in read_rows("kernels.csv") if row["shape"] != error.SHAPE])
    before = readme.decode(tmp_path)
    for shard in SHARDS:
        write_rows(tmp_path / "kernels.csv", error.rows_of("kv4_p8", shard, 3e-3, 2e-3))
    after, speedups = readme.decode(tmp_path), before.partition("\n\nThe Triton")[0]
    assert after.startswith(speedups + "\n\nError against float64")
    added = after.removeprefix(speedups)
    assert "| KV4, 8-bit P | 3.00e-03 beside 2.00e-03: 1.50x | 3.00e-03 beside 2.00e-03: 1.50x |" in added


def test_training_leads_with_smollm2_and_says_what_every_setting_shows(tmp_path):
    table, said = readme.training().split("\n\n")
    runs = {model: learning.read_runs(model=model) for model in readme.LEARNERS}
    assert next(iter(runs)) == "smollm2-135m" and len(table.split("\n")) == 2 + 4
    assert all(line["reward_last"] in table for line in learning.summary(runs["smollm2-135m"][""]))
    settings = [(model, *item) for model, found in runs.items() for item in found.items()]
    for line, (model, name, setting) in zip(said.split("\n"), settings, strict=True):
        assert line.startswith(f"- {readme.LEARNERS[model]}, {learning.describe(name, model=model)} (")
        assert learning.verdict(setting) in line
        assert ("KV4 falls behind BF16" in line) == (model == "smollm2-135m"), "the sentence above the table says so"
    assert readme.training(tmp_path) == "*No rows yet.*"


def test_without_smollm2s_rows_the_mini_models_make_the_table(tmp_path):
    write_rows(tmp_path / "train.csv", read_rows("train.csv", model="mini-qwen3"))
    table, said = readme.training(tmp_path).split("\n\n")
    assert all(line["reward_last"] in table for line in learning.summary(learning.read_runs()[""]))
    assert all(line.startswith("- mini model, ") for line in said.split("\n"))


def test_what_kv4rl_reads_from_int4_follows_from_smollm2s_contexts():
    low, high = map(int, re.search(r"short, (\d+) to (\d+) tokens", TEXT).groups())
    config = preset("smollm2").kv
    read = [regions(n, config.sink_tokens, config.recent_tokens).main for n in (low, high)]
    assert "reads 144 from INT8, {} to {} from INT4".format(*(stop - start for start, stop in read)) in TEXT
    runs = learning.read_runs(model="smollm2-135m")[""]["kv4rl"].values()
    assert high == low + round(learning.band(run.ends["response_tokens"] for run in runs).mean)
    if not (MODELS_DIR / "smollm2-135m").is_dir():
        pytest.skip("smollm2-135m is absent: python -m kv4rl.model.fetch smollm2")
    stream = open_stream("sums", load_tokenizer("smollm2-135m"), seed=1, max_prompt_tokens=512)
    assert {len(prompt.tokens) for prompt in take(stream, 20)} == {low}


def test_the_learning_picture_names_its_model_and_draws_every_precision_with_a_band():
    figure = readme.learning()
    assert figure.layout.title.text.startswith("SmolLM2-135M, partial collection, ")
    assert [title.text for title in figure.layout.annotations] == ["mean reward", "sampler mismatch (k3), nats"]
    assert sum(trace.fill == "toself" for trace in figure.data) == 2 * 4 == len(figure.data) / 2


def test_relative_links_and_pictures_exist():
    targets = re.findall(r"\]\(((?!https?:|#)[^)\s]+)\)", TEXT) + re.findall(r'src="((?!http)[^"]+)"', TEXT)
    assert targets and [target for target in targets if not (REPOSITORY / target).exists()] == []


def test_it_stays_within_200_lines():
    assert len(TEXT.splitlines()) <= 200


def test_the_python_example_runs_and_solves_its_task(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "\\boxed{52}" in capsys.readouterr().out
