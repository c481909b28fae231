"""Programs for child processes, made of the agent's own modules.

A bad set of extensions can take the agent's files away while it runs, and the child is needed just then, to put the old
set back. So the modules are read and compiled once, at start, and handed to the interpreter, which belongs to the base
and is the one that compiled them.
"""

from __future__ import annotations

import base64
import marshal
import sys
import zlib
from pathlib import Path
from types import ModuleType

_LOADER = """\
import base64, marshal, sys, types, zlib

def made(name):
    parent, _, leaf = name.rpartition(".")
    module = sys.modules[name] = types.ModuleType(name)
    if parent:
        setattr(sys.modules.get(parent) or made(parent), leaf, module)
    return module

for name, code in marshal.loads(zlib.decompress(base64.b64decode("{packed}"))):
    module = made(name)
    exec(code, module.__dict__)
sys.exit(module.main(sys.argv))
"""


def command(*modules: ModuleType) -> list[str]:
    """The argument list that runs the last module's `main`; the others are what it imports, in that order."""
    compiled = [(module.__name__, _compiled(module)) for module in modules]
    # Compressed: the kernel takes at most 128 KiB in one argument.
    packed = base64.b64encode(zlib.compress(marshal.dumps(compiled))).decode()
    # -I: nothing of the environment, of this folder or of a user's packages gets in.
    return [sys.executable, "-I", "-c", _LOADER.replace("{packed}", packed)]


def _compiled(module: ModuleType) -> object:
    path = Path(module.__file__ or "")
    return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
