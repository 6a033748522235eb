"""`from kv4rl import X` works for every exported name, and importing kv4rl alone stays cheap."""

import subprocess
import sys

import pytest

import kv4rl


@pytest.mark.parametrize("name", kv4rl.__all__)
def test_exported_names_resolve(name):
    assert getattr(kv4rl, name) is not None


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="RolloutEngine"):
        _ = kv4rl.NoSuchThing


def test_importing_the_package_does_not_import_torch():
    code = "import sys, kv4rl; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
