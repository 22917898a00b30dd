"""The bundled demo model. It is tiny and repeats codes from its prompt, so that a lost KV block gives a wrong token."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
FILE: Path = Path(__file__).parent / "local.yaml"
"""a graph that serves it"""
