"""Importing what is large: vLLM's 5,000 modules take 7 to 10 seconds of CPU in each process that uses them."""

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

log = logging.getLogger(__name__)

COMPILER = ("torch._dynamo", "torch._inductor")


def import_large(name: str, compiler: bool = True) -> ModuleType:
    """Import without garbage collection: an import makes no garbage, but so many objects that full collections, each
    longer than the one before, take a quarter of the time. With `compiler=False`, as of `without_compiler`."""
    gc.disable()
    try:
        return import_module(name) if compiler else _import_without_compiler(name)
    finally:
        gc.enable()


def _import_without_compiler(name: str) -> ModuleType:
    try:
        with without_compiler():
            return import_module(name)
    except Exception:  # another build of vLLM may want more of it
        log.warning("%s needs torch's compiler, which is imported now, too", name, exc_info=True)
        return import_module(name)


@contextmanager
def without_compiler() -> Iterator[None]:
    """For a process that computes nothing: do without torch's compiler, another quarter of vLLM's import. Functions to
    be compiled stay as they are. A later import of the compiler works as usual."""
    import torch

    finder, compiler = _NoCompiler(), torch.compile
    sys.meta_path.insert(0, finder)
    torch.compile = _left_as_it_is
    try:
        yield
    finally:
        torch.compile = compiler
        sys.meta_path.remove(finder)
        for name in finder.found:
            del sys.modules[name]
            package, _, last = name.rpartition(".")
            if package == "torch":
                delattr(torch, last)


class _NoCompiler(MetaPathFinder, Loader):
    def __init__(self) -> None:
        self.found: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(COMPILER):
            return None
        self.found.append(fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _NoModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


class _NoModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        """Stand-ins for classes to derive from, and for decorators."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _left_as_it_is


def _left_as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return _left_as_it_is if function is None else function
