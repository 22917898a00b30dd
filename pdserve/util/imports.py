"""Importing what is large: vLLM's 5,000 modules take 7 to 10 seconds of CPU in each process that uses them."""

import gc
from importlib import import_module
from types import ModuleType


def import_without_gc(name: str) -> ModuleType:
    """Import without garbage collection: an import makes no garbage, but so many objects that full collections, each
    longer than the one before, take a quarter of the time."""
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.enable()
