"""avocado-infer: what it imports, what it teaches, and how it fails."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from inference.cli import VERBS, main


def test_help_imports_no_verb_and_names_them_all(capsys):
    code = (
        "import sys, inference.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if name.startswith('inference')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr.strip() == "['inference', 'inference.cli', 'inference.errors']"
    assert all(f"    {verb} " in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_in_the_table_can_register_and_explains_itself(verb, capsys):
    module = importlib.import_module(VERBS[verb].module)
    assert callable(module.run)
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: avocado-infer {verb} ")


def test_an_unknown_verb_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["dance"])
    assert caught.value.code == 2
    assert "invalid choice: 'dance'" in capsys.readouterr().err


def test_a_failure_is_two_lines_and_exit_status_1(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # away from models that were built here before, of which it would say more
    model = tmp_path / "movenet-lightning.json"
    assert main(["prepare", str(model), "--target", "virtual"]) == 1
    assert capsys.readouterr().err == (
        f"avocado-infer: cannot read model {model}: No such file or directory\n  try: run `avocado-infer fetch` first\n"
    )
