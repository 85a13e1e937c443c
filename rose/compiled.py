"""The hot modules as machine code, where somebody compiled them and they are still what the sources say.

``python scripts/compile_policies.py`` (``make compiled``) builds them with mypyc into a folder of their own, ``rose/_compiled``, with a
stamp: the digest of every source that the build read.  :func:`install` compares it with the sources as they lie there now, all of them and by
content, before the first of the modules is imported.  One that differs, and none of the build is used: an extension beside its source,
which Python would prefer however old it is, does not exist (``docs/decisions/0010-compiled-policies.md``).

``ROSE_COMPILED=0`` runs the Python sources, which are the reference; ``1`` refuses to run anything else than a build that fits; a path names a build's
folder, which has to fit.  Otherwise the build is used if it fits.  :data:`said` tells what came of it.

Standard library only, and cheap: it runs at the first import of ``rose``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""What the paths in a stamp start from."""
HOME = os.path.join(ROOT, "rose", "_compiled")
STAMP = "stamp.json"
SUFFIX = EXTENSION_SUFFIXES[0]
"""Of extensions for this Python on this machine; part of the stamp."""
FIX = "run `make compiled` again, or unset ROSE_COMPILED"

said = "the policies run as Python"
"""In words: what runs, and why; the scheduler logs it when it starts."""
is_stale = False
"""There is a build, and it was left alone because it is not of these sources."""


Annotations = dict[str, dict[str, dict[str, str]]]
"""Module -> class -> field -> its type, as the source has it."""


class _Loader(ExtensionFileLoader):
    def __init__(self, name: str, path: str, finder: _Finder) -> None:
        super().__init__(name, path)
        self.finder = finder

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.finder.annotate()


class _Finder(MetaPathFinder):
    def __init__(self, files: dict[str, str], annotations: Annotations) -> None:
        self.files, self.annotations = files, annotations

    def annotate(self) -> None:
        """Give classes their annotations back: mypyc leaves ``type`` where it is ``str | None``, and msgspec reads events by them.

        Of every module that is there by now: compiled ones import each other without asking a finder.
        """
        for module_name in [name for name in self.annotations if name in sys.modules]:
            module = sys.modules[module_name]
            classes = {name: getattr(module, name, None) for name in self.annotations[module_name]}
            if None in classes.values():
                continue  # it is being imported
            for name, types in self.annotations.pop(module_name).items():
                cls = classes[name]
                cls.__annotations__ = dict(types)
                for field in getattr(cls, "__dataclass_fields__", {}).values():
                    field.type = types.get(field.name, field.type)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self.files.get(fullname)
        if file is None:
            return None
        loader = _Loader(fullname, file, self)
        return spec_from_file_location(fullname, file, loader=loader)


def digest_of(relative: str) -> str:
    """Of a source, by its path below :data:`ROOT`; "" where there is none."""
    try:
        with open(os.path.join(ROOT, relative), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def read_stamp(folder: str) -> tuple[dict[str, str], Annotations, str]:
    """The build's modules with their files, their annotations, and why it cannot be used ("" if it can)."""
    try:
        with open(os.path.join(folder, STAMP), "rb") as file:
            stamp = json.load(file)
        sources, modules = dict(stamp["sources"]), dict(stamp["modules"])
        suffix, annotations = stamp["suffix"], dict(stamp["annotations"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {}, {}, f"its stamp cannot be read ({error})"
    if suffix != SUFFIX:
        return {}, {}, f"it is for {suffix}, and this Python loads {SUFFIX}"
    for relative, digest in sources.items():
        if digest_of(relative) != digest:
            return {}, {}, f"{relative} is not what was compiled"
    files = {name: os.path.join(folder, file) for name, file in modules.items()}
    for file in files.values():
        if not os.path.exists(file):
            return {}, {}, f"{os.path.basename(file)} is missing"
    return files, annotations, ""


def install() -> None:
    """Let the build be found before the sources, if it fits.

    Raises:
        ImportError: ``ROSE_COMPILED`` asks for a build, and none fits.
    """
    global said, is_stale
    wanted = os.environ.get("ROSE_COMPILED", "")
    if wanted == "0":
        said = "the policies run as Python: ROSE_COMPILED=0"
        return
    folder = HOME if wanted in ("", "1") else wanted
    if not os.path.isdir(folder):
        if wanted:
            raise ImportError(f"ROSE_COMPILED={wanted}: there is no build in {folder}; {FIX}")
        return
    files, annotations, why = read_stamp(folder)
    if why:
        if wanted:
            raise ImportError(f"ROSE_COMPILED={wanted}: {folder}: {why}; {FIX}")
        is_stale = True
        said = f"the policies run as Python: {folder}: {why}; run `make compiled` again"
        return
    finder = _Finder(files, annotations)
    sys.meta_path.insert(0, finder)
    # All code is in the one library that the modules share.  Loaded now, it stays this build's, should another one take its place on the disk.
    (library,) = (name for name in files if "." not in name)
    __import__(library)
    said = f"the policies run compiled: {len(files) - 1} modules from {folder}"
