"""The doctor says what runs here and how to get the rest."""

from kv4rl import doctor
from kv4rl.chromium import find_chromium


def test_needed_parts_are_found_where_the_tests_run(capsys):
    assert doctor.main() == 0
    assert "torch" in capsys.readouterr().out


def test_a_missing_part_comes_with_its_fix():
    text = doctor.report([doctor.Check("nvcc", False, "absent", "install the CUDA toolkit")])
    assert "->  install the CUDA toolkit" in text


def test_doctor_and_notebook_runner_look_for_the_same_browser(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    find = lambda: next(check for check in doctor.examine() if check.name.startswith("browser"))
    assert find_chromium() is None and not find().ok
    (tmp_path / "google-chrome-stable").write_text("#!/bin/sh\n")
    (tmp_path / "google-chrome-stable").chmod(0o755)
    assert find().ok and find().found == find_chromium() == str(tmp_path / "google-chrome-stable")


def test_a_missing_needed_package_fails(monkeypatch):
    broken = doctor.Check("torch", False, "absent", "pip install torch", needed=True)
    monkeypatch.setattr(doctor, "examine", lambda: [broken])
    assert doctor.main() == 1
