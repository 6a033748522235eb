"""A sweep plans every run once, goes on past a failing one, names it, and does not repeat what is finished."""

import pytest

from kv4rl import learning, sweep
from kv4rl.presets import override, preset
from kv4rl.results import read_rows
from kv4rl.train_rows import record_run, start_row, write_rows

NAMES = ("critic/score/mean", "response_length/mean", "actor/kl_loss", "rollout_corr/k3_kl")
FLAGS = ["--updates", "8", "--grpo.learning_rate", "3e-4"]
REWARD = {"bf16": 0.8, "kv4": 0.6, "kv4rl": 0.79}


def fake_launch(run: sweep.Run, threads: int) -> int:
    """Writes the rows that the process would; seed 2 of kv8 fails."""
    run.folder.mkdir(parents=True, exist_ok=True)
    arm, seed, *_ = run.name.split()
    number = int(seed[4:])
    run.log.write_text("a\nb\nc\nMemoryError: no more\n")
    if (arm, number) == ("kv8", 2):
        return 1
    given = {"updates": 8, "grpo.learning_rate": 3e-4, "seed": number, "rollout.seed": number}
    config = override(preset("mini"), given | ({} if arm == "start" else {"kv.precision": arm}))
    accuracy = {"value": REWARD.get(arm, 0.4) + 0.01 * number, "low": 0, "high": 1, "n": 9}
    if arm == "start":
        write_rows(run.rows.resolve(), [start_row(config, accuracy)])
    else:
        lines = [dict.fromkeys(NAMES, REWARD.get(arm, 0.5) + 0.05 * number)] * 8
        record_run(config, lines, accuracy, file=run.rows.resolve())
    return 0


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "launch", fake_launch)
    return [*FLAGS, "--seeds", "1", "2", "--output_dir", str(tmp_path / "runs"), "--out", str(tmp_path / "train.csv")]


def test_every_precision_and_collector_is_planned_once_a_seed(tmp_path):
    options, flags = sweep.parse([*FLAGS, "--seeds", "1", "2", "--collectors", "partial", "sync"])
    runs = sweep.plan(options, flags)
    assert len(runs) == 2 * (1 + 2 * 4) and len({run.folder for run in runs}) == len(runs)
    assert runs[0].words[0] == "start" and "seed1" in runs[8].name and "seed2" in runs[9].name
    assert "--without-start" in runs[1].words and "--evaluate_prompts" in runs[1].words


def test_runs_of_another_model_or_setting_have_folders_of_their_own():
    def folders(*flags):
        return {run.folder for run in sweep.plan(*sweep.parse(["--seeds", "1", *flags]))}

    of_mini = folders()
    assert not of_mini & (folders("--preset", "smollm2") | folders("--updates", "9") | folders("--reading", "last_box"))


@pytest.mark.parametrize("given", [["--kv.precision", "kv8"], ["--seed=5"], ["--rollout.collector", "sync"]])
def test_what_the_sweep_sets_itself_is_refused_with_the_flag_for_it(given, capsys):
    with pytest.raises(SystemExit, match="2"):
        sweep.parse(given)
    assert "the sweep sets it run by run" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--output_dir", "--out"])
def test_a_place_that_cannot_be_is_refused_before_the_first_run(words, tmp_path, capsys, flag):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        sweep.main([*words, flag, str(tmp_path / "file" / "rows")])
    said = capsys.readouterr()
    assert str(tmp_path / "file") in said.err and said.out == ""


def test_a_failing_run_is_named_the_others_are_kept_and_finished_ones_are_not_repeated(words, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"1 of 10 runs failed\nkv8 seed2 partial failed with status 1: .*MemoryError"):
        sweep.main(words)
    assert len(read_rows(tmp_path / "train.csv", metric="accuracy")) == 9
    capsys.readouterr()
    with pytest.raises(SystemExit):
        sweep.main(words)
    assert "10 runs, 9 of them finished before" in capsys.readouterr().out


def test_a_run_that_ends_well_without_rows_or_a_log_is_named(words, monkeypatch):
    monkeypatch.setattr(sweep, "launch", lambda run, threads: 0)
    with pytest.raises(SystemExit, match=r"2 of 2 runs failed\nstart seed1 .* failed without its rows.*: no log"):
        sweep.main([*words, "--precisions", "bf16", "--seeds", "1"])


def test_the_verdict_is_read_from_paired_differences(words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main(words)
    setting = learning.read_runs(file=tmp_path / "train.csv")["updates=8,grpo.learning_rate=0.0003"]
    behind = learning.paired(setting, "reward_last", "kv4")
    assert behind.mean == pytest.approx(-0.2) and behind.seeds == 2 and learning.shows(behind) == "behind"
    said = learning.verdict(setting)
    assert "KV4 falls behind BF16 (-0.200 [" in said and "2 seeds" in said
    assert learning.describe("updates=8,grpo.learning_rate=0.0003") == (
        "partial collection, learning rate 0.0003, 8 updates"
    )


def test_differences_of_the_main_setting_are_kept_as_rows_of_the_runs_machine(words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main(words)
    learning.main(["--file", str(tmp_path / "train.csv"), "--save"])
    rows = {(row["arm"], row["metric"]): row for row in read_rows(tmp_path / "train.csv", experiment="learning")}
    lost = rows["kv4", "deficit_reward_last"]
    assert float(lost["value"]) == pytest.approx(0.2) and float(lost["low"]) <= 0.2 <= float(lost["high"])
    assert lost["n"] == "2" and ("kv8", "deficit_accuracy") not in rows
    others = [row | {"model": "smollm2-135m"} for row in read_rows(tmp_path / "train.csv", experiment="train")]
    write_rows(tmp_path / "train.csv", others)
    assert {row["model"] for row in learning.deficit_rows(tmp_path / "train.csv")} == {"mini-qwen3", "smollm2-135m"}
    assert list(learning.read_runs(file=tmp_path / "train.csv")) == ["updates=8,grpo.learning_rate=0.0003"]


def test_runs_that_end_below_their_start_are_named_and_the_presets_setting_goes_first(words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main(words)
    file = tmp_path / "train.csv"
    (setting,) = learning.read_runs(file=file).values()
    assert learning.lost_ground(setting, file=file) == {} and learning.unstable(setting, file=file) == []
    (start,) = read_rows(file, arm="start", shape="seed1")
    write_rows(file, [start | {"value": 0.7}])
    assert learning.lost_ground(setting, file=file) == {"kv8": ["seed1"], "kv4": ["seed1"]}
    assert learning.unstable(setting, file=file)[0].startswith("unstable: 2 of 7 runs end below")
    assert learning.main_setting({"updates=30": setting, "": {"kv4": {"seed43": setting["kv4"]["seed1"]}}}) == ""


def test_one_seed_shows_nothing_and_noise_shows_no_difference():
    assert learning.shows(learning.band([-0.1])) == "nothing: one seed"
    assert learning.shows(learning.band([-0.1, 0.1, 0.05])) == "no difference"
    assert learning.shows(learning.band([0.1, 0.11, 0.12])) == "ahead"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--seeds 1 1", "seeds=[1, 1]: expected each once"),
        ("--jobs 0", "jobs=0: expected an integer >= 1"),
        ("--updates 3", "updates=3: expected at least 8"),
        ("--grpo.lr 1", "--grpo.lr"),
    ],
)
def test_wrong_words_end_before_any_run(words, sentence, capsys):
    with pytest.raises(SystemExit) as ending:
        sweep.main(words.split())
    assert ending.value.code == 2 and sentence in capsys.readouterr().err
