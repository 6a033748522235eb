"""The command of the panels: rows with intervals under the panel's name, and one sentence for what it cannot use."""

import numpy as np
import pytest

from kv4rl.fidelity import experiments
from kv4rl.fidelity.measure import Probe, make_arm
from kv4rl.fidelity.panels import CORPUS, KV4, PANELS, RANDOM, Panel
from kv4rl.model.weights import save_decoder
from kv4rl.tasks.tokenizer import build_tokenizer


@pytest.fixture
def model(tiny_decoder, tmp_path, monkeypatch):
    save_decoder(tiny_decoder, tmp_path / "tiny", build_tokenizer())
    monkeypatch.setattr(experiments, "eos_token_ids", lambda model: ())  # a random model would end at once
    return str(tmp_path / "tiny")


made = Probe.__init__


def test_a_panel_becomes_rows_with_intervals(model, monkeypatch, capsys):
    """The control's own process is tested with the engine's command; here it stands in for one that agrees."""
    again = []
    monkeypatch.setattr(Probe, "__init__", lambda probe, *args, **how: again.append(probe) or made(probe, *args, **how))
    monkeypatch.setattr(experiments, "repeat_in_new_process", lambda *args, **how: again[0].reference)
    monkeypatch.setitem(PANELS, "two", Panel("two arms", lambda head_dim: (KV4, make_arm("kv8"))))
    rows = experiments.main(["--model", model, "--panels", "two", "--prompts", "2", "--no-rows"])
    by_key = {(row["arm"], row["metric"]): row for row in rows}
    kl = by_key["kv8", "sampler_kl"]
    assert kl["shape"] == "two" and kl["n"] == 16 and 0 < kl["low"] <= kl["value"] <= kl["high"]
    assert kl["command"].endswith("--panels two --prompts 2")
    ratio = by_key["kv4", "sampler_kl"]["value"] / kl["value"]
    assert np.isclose(by_key["kv8", "kl_reduction_vs_kv4"]["value"], ratio)
    assert ("kv4", "kl_reduction_vs_kv4") not in by_key
    assert by_key["kv4", "bits_per_element"]["value"] == 4.5 and by_key["kv4", "bytes_per_position"]["value"] == 4 * 72
    assert by_key["bf16", "control_kl"]["value"] == 0 and "gives bit-identical" in capsys.readouterr().out


def test_rows_are_saved_arm_by_arm(model, monkeypatch):
    saved = []
    monkeypatch.setattr(experiments, "write_rows", lambda file, rows: saved.append([row["arm"] for row in rows]))
    monkeypatch.setitem(PANELS, "two", Panel("two arms", lambda head_dim: (KV4, RANDOM)))
    experiments.main(["--model", model, "--panels", "two", "--prompts", "2", "--no-control"])
    assert [set(arms) for arms in saved[:2]] == [{"kv4"}, {"kv4-random144"}]


def test_one_representation_is_forced_once(tiny_decoder, histories, monkeypatch):
    probe = Probe(tiny_decoder, histories)
    first = probe.kl(make_arm("kv4rl", sink_tokens=0, recent_tokens=0))
    monkeypatch.setattr(probe, "logits", None)
    assert probe.kl(make_arm("kv4")) is first  # nothing protected: the same thing under two names


def test_the_engine_refuses_an_arm_it_has_no_cache_for(tiny_decoder, histories):
    with pytest.raises(ValueError, match="arm='kv4-random144'"):
        Probe(tiny_decoder, histories, way="engine").kl(RANDOM)
    with pytest.raises(ValueError, match="way='guess'"):
        Probe(tiny_decoder, histories, way="guess")


@pytest.mark.parametrize(
    ("words", "message"), [(["--prompts", "0"], "prompts=0"), (["--device", "tpu"], "device='tpu'")]
)
def test_unusable_input_ends_in_one_sentence(model, capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        experiments.main(["--model", model, "--panels", "4b", *words])
    assert message in capsys.readouterr().err


def test_the_corpus_is_that_of_the_protocol():
    assert CORPUS.prompts == 32 and len(set(CORPUS.shots)) == 8
