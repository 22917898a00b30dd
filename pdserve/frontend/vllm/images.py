"""Images in prompts: where vLLM's app may read them from, how large they may be, and their cache keys.

An image of 10 KB may have 33 million pixels, four bytes each. One thread decodes all images, one at a time. Before it
decodes an image, it counts the pixels against a limit of its request and a limit of all requests together.
"""

import os
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from http import HTTPStatus
from io import BytesIO
from typing import Any
from weakref import finalize

import vllm.envs
from aiohttp import ClientError
from PIL import Image
from vllm.connections import HTTPConnection
from vllm.exceptions import GracefulHTTPError, VLLMError, VLLMValidationError
from vllm.multimodal.image import open_image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector, connector
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers.base import BaseRenderer

from pdserve.frontend.edge.body import Budget
from pdserve.frontend.edge.request_state import RequestState, current_request
from pdserve.util.errors import Overloaded, error_text

LIMITS = {"image": 16, "video": 0, "audio": 0}
"""Items of each kind in a prompt, unless the file sets `limit-mm-per-prompt`."""
_DEFAULTS = {
    "VLLM_MAX_IMAGE_PIXELS": 1 << 25,
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": False,
    "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": 32,
}
"""Defaults of environment variables, stricter than vLLM's. With vLLM's, an image of 20 KB may have 179 million pixels,
which cost 6 s of CPU; an allowed host may redirect to a forbidden one; and 16 URLs may fetch 4 GiB."""

for name, value in _DEFAULTS.items():
    if name not in os.environ:
        setattr(vllm.envs, name, value)
vllm.envs.VLLM_MEDIA_CONNECTOR = "pdserve"
connector.global_thread_pool = ThreadPoolExecutor(1, "images")
MAX_PIXELS = vllm.envs.VLLM_MAX_IMAGE_PIXELS if vllm.envs.VLLM_MAX_IMAGE_PIXELS > 0 else 1 << 40
"""Maximum of pixels in all images of a request together."""
MIN_COUNTED = 1 << 20
"""Pixels that a smaller image counts as, because models enlarge it."""
MAX_REQUESTS = 4
"""This many requests may have images of MAX_PIXELS in memory at the same time."""
Image.MAX_IMAGE_PIXELS = MAX_PIXELS  # Pillow refuses images of twice this, also inside icons
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
pixel_budget = Budget(MAX_REQUESTS * MAX_PIXELS, "images of {} pixels are being worked on")
_freed: deque[tuple[str, int]] = deque()
"""(client, pixels) of freed images. Any thread may free an image; the reading thread returns its pixels to the
budget."""


@MEDIA_CONNECTOR_REGISTRY.register("pdserve")
class ImageReader(MediaConnector):  # type: ignore[misc]
    """Fetches only from hosts in `allowed-media-domains`. Without that list, vLLM would fetch from any host."""

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        if not self.allowed_media_domains and url[:5].lower() not in ("data:", "file:"):
            raise _refusal("it must be a data: URL, because allowed-media-domains names no host")
        alone = copy(self)
        # vLLM's connection belongs to one event loop; there are two (`side_loop.py`)
        alone.connection = HTTPConnection()
        if isinstance(media_io, ImageMediaIO) and (state := current_request.get()) is not None:
            media_io.load_bytes = partial(_read, media_io.load_bytes, state)
        try:
            return await MediaConnector.load_from_url_async(alone, url, media_io, **options)
        except (RuntimeError, OSError, ClientError) as error:
            raise _refusal(f"it cannot be read: {error_text(error)}") from error
        finally:
            if alone.connection._async_client is not None:
                await alone.connection._async_client.close()


def _read(load: Callable[[bytes], Any], state: RequestState, data: bytes) -> Any:
    """Decode an image of the request within the limits; runs in the reading thread. Its pixels count until it is freed.
    The request's end frees it too, because the traceback of an error may still hold it."""
    try:
        pixels = _pixels(data)
        if pixels is None or pixels > MAX_PIXELS:
            return load(data)  # `load` refuses the image with vLLM's message
        counted = _take(state, pixels)
        try:
            read = load(data)
        except BaseException:
            _freed.append(counted)
            raise
        freed = finalize(read.media, _freed.append, counted)
        freed.atexit = False
        state.at_end.append(partial(_free, freed))
        return read
    except (ValueError, VLLMError):
        raise
    except Exception as error:  # Pillow's formats raise errors of any kind
        raise _refusal(f"it cannot be read: {str(error) or type(error).__name__}") from error


def _pixels(data: bytes) -> int | None:
    try:
        with open_image(BytesIO(data)) as head:
            return int(head.width * head.height)
    except OSError:  # not an image
        return None


def _free(freed: "finalize[..., Image.Image]") -> None:
    if found := freed.peek():
        found[0].close()
    freed()


def _take(state: RequestState, pixels: int) -> tuple[str, int]:
    """Count the pixels; return what to give back when the image is freed."""
    while _freed:
        pixel_budget.give_back(*_freed.popleft())
    counted = max(pixels, MIN_COUNTED)
    if state.pixels + counted > MAX_PIXELS:
        least = f"and each image counts as {MIN_COUNTED} at least"
        raise _refusal(f"the images of a request may have {MAX_PIXELS} pixels together, {least}")
    try:
        pixel_budget.take(state.client, counted)
    except Overloaded as error:
        raise GracefulHTTPError(str(error), HTTPStatus.TOO_MANY_REQUESTS) from error
    state.pixels += counted
    return state.client, counted


def _refusal(text: str) -> VLLMValidationError:
    return VLLMValidationError(text, parameter="image_url")


def name_images_by_content(renderer: BaseRenderer[Any]) -> None:
    """Ignore the `uuid` that a request gives an image, so that vLLM names it by its hash. The engine's caches use that
    name: if two images had the same `uuid`, the response would be about the first, perhaps another client's.

    Wraps the private `_process_mm_uuids` of vLLM's renderer."""
    process = renderer._process_mm_uuids

    def processed(data: Any, items: Any, uuids: dict[str, list[Any]], request: str) -> Any:
        return process(data, items, {kind: [None] * len(given) for kind, given in uuids.items()}, request)

    renderer._process_mm_uuids = processed
