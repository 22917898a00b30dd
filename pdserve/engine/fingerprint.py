"""The fingerprint of a model: a digest of its files and of the engine arguments that change the content of a KV block.
Workers with the same served name and different fingerprints must not share KV or tokens.

It is equal on all hosts with the same files; paths and times do not count. Small files (configuration, tokenizer, code)
are read completely. Of weights it reads the name, the size, the header and some pages of each tensor, or some pages of
the file if its format has no tensor index. That is some megabytes of a model of 30 GB. A change of only a few numbers
may be missed; training changes nearly all numbers."""

import asyncio
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pdserve.config.engine_args.arguments import arguments, draft_model
from pdserve.config.engine_args.installed import find_folder
from pdserve.config.files.shared_args import length_changes_kv
from pdserve.util.errors import EngineDead

_ARGUMENTS = (
    "block-size",
    "config-format",
    "disable-sliding-window",
    "dtype",
    "hf-overrides",
    "kv-cache-dtype",
    "kv-cache-dtype-skip-layers",
    "load-format",
    "model-class-overrides",
    "model-impl",
    "model-loader-extra-config",
    "quantization",
    "quantization-config",
    "tokenizer-mode",
)
"""Engine arguments that change the KV of a prompt, its tokens, or which files are read."""
_CODE = {".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".vocab"}
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
"""In vLLM's order: it reads only files of the first kind that is present."""
_WHOLE = 4 << 20
"""Bytes; files up to this size are read completely."""
_PAGE = 4096
_PAGES = 64
"""Pages read of a file of unknown format."""
_MANY_TENSORS = 3000
"""In files with more tensors, one page of each is read instead of three."""
_MAX_HEADER = 100 << 20


class Fingerprint:
    """The fingerprint of a model that is being loaded: call `before` and `after` the start of the engine."""

    def __init__(self, model: str, engine_args: Mapping[str, object], version: str) -> None:
        self._model = model
        self._args = engine_args
        self._version = version
        self._before: str | None = None

    async def before(self) -> None:
        """Record the state of the files. For a hub id it is the commit, whose files never change and may not be
        downloaded yet."""
        self._before = await asyncio.to_thread(self._state)

    async def after(self) -> str:
        """The fingerprint. Raises EngineDead if the files changed since `before`: either version may have been read."""
        if self._before is not None and await asyncio.to_thread(self._state) != self._before:
            raise EngineDead(f"the files of {self._model} changed while they were loaded")
        return await asyncio.to_thread(self._digest)

    def _state(self) -> str | None:
        if self._model.startswith("/"):
            return self._digest()
        folder = find_folder(self._model, _revision(self._args))
        return None if folder is None else folder.name

    def _digest(self) -> str:
        return fingerprint(self._model, self._args, self._version)


def fingerprint(model: str, engine_args: Mapping[str, object], version: str) -> str:
    """16 hex digits. For a model without files on this host they depend on its name."""
    known = arguments()
    settings = {name: engine_args.get(name, known[name].default) for name in _ARGUMENTS}
    if length_changes_kv(find_folder(model, _revision(engine_args)), engine_args):
        settings["max-model-len"] = engine_args.get("max-model-len")
    settings["speculative-config"] = draft_model(engine_args)  # both models' KV lies in the same blocks
    if settings.get("load-format") == "dummy":
        settings["seed"] = engine_args.get("seed")
    files = {"model": _source(model, _revision(engine_args))}
    if tokenizer := engine_args.get("tokenizer"):
        revision = str(engine_args.get("tokenizer-revision") or _revision(engine_args))
        files["tokenizer"] = _source(str(tokenizer), revision)
    if config := engine_args.get("hf-config-path"):  # read instead of the model's own config.json
        files["config"] = _source(str(config), _revision(engine_args))
    facts = json.dumps([version, settings, files], sort_keys=True, default=str)
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def _revision(engine_args: Mapping[str, object]) -> str:
    return str(engine_args.get("revision") or "main")


def _source(model: str, revision: str) -> object:
    if Path(model).is_file():  # a single GGUF file
        return _weights_digest(Path(model))
    folder = find_folder(model, revision)
    return f"{model}@{revision}" if folder is None else _digest_folder(folder)


def _digest_folder(folder: Path) -> dict[str, str]:
    """File name -> digest, for the files that count. Subfolders have only other copies of the weights."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    digests = {path.name: whole_digest(path) for path in files if path.suffix in _CODE}
    weights = [path for path in files if not path.name.startswith("consolidated")]
    kind = next((kind for kind in _WEIGHTS if any(path.suffix == kind for path in weights)), "")
    return digests | {path.name: _weights_digest(path) for path in weights if kind and path.suffix == kind}


def whole_digest(path: Path) -> str:
    """SHA-256 of a file, in hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights_digest(path: Path) -> str:
    size = path.stat().st_size
    if size <= _WHOLE:
        return whole_digest(path)
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        for start, length in _places(file.fileno(), path.suffix, size):
            digest.update(os.pread(file.fileno(), length, start))
    return digest.hexdigest()


def _places(file: int, suffix: str, size: int) -> Iterator[tuple[int, int]]:
    """Start and length of each read."""
    header = int.from_bytes(os.pread(file, 8, 0), "little")
    if suffix != ".safetensors" or not 0 < header <= min(_MAX_HEADER, size - 8):
        yield from ((page * (size - _PAGE) // (_PAGES - 1), _PAGE) for page in range(_PAGES))
        return
    yield 0, 8 + header
    tensors = _tensors(os.pread(file, header, 8))
    shares = (0.5,) if len(tensors) > _MANY_TENSORS else (0.0, 0.5, 1.0)
    for start, end in tensors:
        for share in shares:
            length = min(_PAGE, end - start)
            yield 8 + header + start + int(share * (end - start - length)), length


def _tensors(header: bytes) -> list[tuple[int, int]]:
    """Start and end of each tensor, counted from the end of the header."""
    try:
        entries = json.loads(header)
        offsets = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        return sorted((int(start), int(end)) for start, end in offsets)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
