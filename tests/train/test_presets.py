import dataclasses

import pytest

from kv4rl.config import GRPOConfig, KVConfig, RolloutConfig
from kv4rl.presets import PRESETS, override, parse_config, preset


@pytest.mark.parametrize("name", ["qwen3_4b", "qwen3_8b"])
def test_the_papers_presets_hold_table_a1(name):
    config = preset(name)
    r, g = config.rollout, config.grpo
    assert (r.groups_per_update, r.responses_per_group, r.oversubscription, r.age_limit) == (128, 8, 1.0, 12)
    assert (r.max_prompt_tokens, r.max_response_tokens, r.max_active_requests) == (1024, 16384, 1024)
    assert (r.temperature, r.top_p, r.top_k, r.collector) == (1.0, 1.0, 0, "partial")
    assert (g.learning_rate, g.warmup_updates, g.betas, g.weight_decay) == (1e-6, 10, (0.9, 0.999), 0.01)
    assert (g.max_grad_norm, g.clip_low, g.clip_high, g.dual_clip, g.tis_clip) == (1.0, 0.2, 0.2, 3.0, 5.0)
    assert g.kl_coefficient == 0.001
    assert config.kv == KVConfig("kv4rl", sink_tokens=16, recent_tokens=128)
    assert (config.tensor_parallel, config.memory) == (2, "phased")
    assert config.evaluate_sets == ("math500", "aime24", "aime25")  # Table A2, "periodic"


def test_pages_and_length_of_the_papers_runs():
    """§B.6: each configuration keeps the pool that its precision's pages fill."""
    assert preset("qwen3_4b").rollout.cache_pages == preset("qwen3_8b").rollout.cache_pages == 0
    assert (preset("qwen3_4b").updates, preset("qwen3_8b").updates) == (600, 400)


@pytest.mark.parametrize("name", ["smoke", "mini", "smollm2"])
def test_presets_for_a_laptop_change_sizes_not_the_method(name):
    config = preset(name)
    changed = {"learning_rate", "warmup_updates", "microbatch_tokens"}
    for field in dataclasses.fields(GRPOConfig):
        if field.name not in changed:
            assert getattr(config.grpo, field.name) == getattr(GRPOConfig(), field.name), field.name
    assert config.kv == KVConfig()
    assert (config.rollout.collector, config.rollout.oversubscription) == ("partial", 1.0)


def test_every_field_has_a_flag_that_reaches_it():
    config = parse_config(
        "--preset smoke --kv.precision kv8 --updates 7 --grpo.betas 0.8 0.95 --rollout.seed 5 --model x".split()
    )
    expected = preset("smoke")
    assert config == dataclasses.replace(
        expected, updates=7, model="x", kv=KVConfig(precision="kv8"),
        grpo=dataclasses.replace(expected.grpo, betas=(0.8, 0.95)),
        rollout=dataclasses.replace(expected.rollout, seed=5),
    )  # fmt: skip
    assert parse_config([]) == preset("mini")


TOML = """preset = "smoke"
updates = 7
[kv]
precision = "kv8"
[grpo]
betas = [0.8, 0.95]
learning_rate = 1
"""
JSON = '{"preset": "smoke", "updates": 7, "kv.precision": "kv8", "grpo": {"betas": [0.8, 0.95], "learning_rate": 1}}'


@pytest.mark.parametrize(("name", "text"), [("own.toml", TOML), ("own.json", JSON)])
def test_every_field_can_stand_in_a_file_and_flags_win_over_it(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    words = "--preset smoke --updates 7 --kv.precision kv8 --grpo.betas 0.8 0.95 --grpo.learning_rate 1".split()
    assert parse_config(["--config", str(file)]) == parse_config(words)
    other = parse_config(["--config", str(file), "--preset", "mini", "--kv.precision", "bf16"])
    assert other == parse_config([*words, "--preset", "mini", "--kv.precision", "bf16"])


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("own.toml", "[kv]\nprecison = 'kv8'", "own.toml='kv.precison': expected kv.precision?"),
        ("own.json", '{"kv": "kv8"}', "own.json='kv': expected a field that --help lists"),
        ("own.json", '{"updates": "many"}', "updates='many': expected an integer >= 1"),
        ("own.json", '{"preset": "huge"}', "preset='huge': expected one of"),
        ("own.json", '{"preset": [1]}', "preset=[1]: expected one of"),
        ("own.json", "[1]", "expected an object of settings by name"),
        ("own.json", "{", "own.json': expected a JSON file"),
        ("own.toml", "a = ", "own.toml': expected a TOML file"),
        ("own.yaml", "", "expected a name that ends in .json or .toml"),
    ],
)
def test_a_wrong_file_says_what_would_be_right(tmp_path, capsys, name, text, sentence):
    (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match="2"):
        parse_config(["--config", str(tmp_path / name)])
    assert sentence in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        parse_config(["--config", str(tmp_path / "nowhere.json")])
    assert "nowhere.json': expected a JSON file" in capsys.readouterr().err


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_without_flags_is_itself(name):
    assert parse_config(["--preset", name]) == PRESETS[name]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--kv.precison kv8", "did you mean --kv.precision?"),
        ("--nonsense 3", "unrecognized arguments: --nonsense 3 (--help lists them all)"),
        ("--kv.precision kv9", "precision='kv9': expected one of bf16, kv8, kv4, kv4rl"),
        ("--updates many", "argument --updates: invalid int value: 'many'"),
        ("--preset qwen", "argument --preset: invalid choice: 'qwen'"),
        ("--rollout.age_limit 0", "age_limit=0: expected an integer >= 1"),
        ("--rollout.temperature 0.6", "recorded log-probs must be those of the sampling distribution"),
        ("--update 3", "did you mean --updates?"),
    ],
)
def test_a_wrong_flag_or_value_says_what_would_be_right(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ending:
        parse_config(arguments.split())
    assert ending.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_precision_has_a_short_flag_and_the_later_one_wins():
    assert parse_config("--precision kv8".split()) == parse_config("--kv.precision kv8".split())
    assert parse_config("--precision kv8 --kv.precision bf16".split()).kv.precision == "bf16"


def test_sets_to_evaluate_are_any_number_of_words():
    assert parse_config("--preset qwen3_4b --evaluate_sets".split()).evaluate_sets == ()
    assert parse_config("--evaluate_sets math500 aime24=a.jsonl".split()).evaluate_sets == ("math500", "aime24=a.jsonl")


def test_help_shows_each_field_with_its_row_of_table_a1(capsys):
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    text = capsys.readouterr().out
    for cls, prefix in ((KVConfig, "kv."), (RolloutConfig, "rollout."), (GRPOConfig, "grpo.")):
        for field in dataclasses.fields(cls):
            assert f"--{prefix}{field.name}" in text
    assert 'T ("Prompt groups", Table A1)' in text


def test_override_by_name_checks_the_whole():
    with pytest.raises(ValueError, match="sink_tokens=-1"):
        override(preset("mini"), {"kv.sink_tokens": -1})
    with pytest.raises(ValueError, match="preset='huge'"):
        preset("huge")
