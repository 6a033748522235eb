"""The doctor says what runs here and how to get the rest."""

from kv4rl import doctor


def test_needed_parts_are_found_where_the_tests_run(capsys):
    assert doctor.main() == 0
    assert "torch" in capsys.readouterr().out


def test_a_missing_part_comes_with_its_fix():
    text = doctor.report([doctor.Check("nvcc", False, "absent", "install the CUDA toolkit")])
    assert "->  install the CUDA toolkit" in text


def test_a_missing_needed_package_fails(monkeypatch):
    broken = doctor.Check("torch", False, "absent", "pip install torch", needed=True)
    monkeypatch.setattr(doctor, "examine", lambda: [broken])
    assert doctor.main() == 1
