"""The bundled demo model: tiny, and it remembers codes, so that a lost KV block shows as a wrong answer."""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
FILE: Path = Path(__file__).parent / "local.yaml"
"""a graph that serves it"""
