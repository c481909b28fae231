"""Programs for child processes, made of the agent's own source texts.

A bad set of extensions can take the agent's files away while it runs, and the child is needed just then, to put the old
set back. So the texts are read once, at start, and handed to the interpreter, which belongs to the base.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

_LOADER = """\
import sys, types
for name, text in {texts!r}:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
sys.exit(module.main(sys.argv))
"""


def command(*modules: ModuleType) -> list[str]:
    """The argument list that runs the last module's `main`; the others are what it imports, in that order."""
    texts = [(module.__name__, Path(module.__file__ or "").read_text(encoding="utf-8")) for module in modules]
    # -I: nothing of the environment, of this folder or of a user's packages gets in.
    return [sys.executable, "-I", "-c", _LOADER.format(texts=texts)]
