"""Pictures in prompts, as vLLM's app reads them: from where, how many and how large, and what names them."""

import os
from copy import copy
from typing import Any

import vllm.envs
from aiohttp import ClientError
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.renderers.base import BaseRenderer

LIMITS = {"image": 16, "video": 0, "audio": 0}
"""of a prompt, where the file sets no `limit-mm-per-prompt`"""
_DEFAULTS = {"VLLM_MAX_IMAGE_PIXELS": 1 << 25, "VLLM_MEDIA_URL_ALLOW_REDIRECTS": False}
"""where the environment does not say: 20 KB may hold the 179 million pixels of vLLM's own bound, which cost 6 s of CPU;
and an allowed host may lead to one that is not"""

for name, value in _DEFAULTS.items():
    if name not in os.environ:
        setattr(vllm.envs, name, value)
vllm.envs.VLLM_MEDIA_CONNECTOR = "pdserve"


@MEDIA_CONNECTOR_REGISTRY.register("pdserve")
class PictureReader(MediaConnector):  # type: ignore[misc]
    """Fetches nothing where `allowed-media-domains` names no host: vLLM would fetch from any, also from those that only
    this host reaches."""

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        if not self.allowed_media_domains and url[:5].lower() not in ("data:", "file:"):
            raise _refusal("it must be a data: URL; none is fetched, for allowed-media-domains names no host")
        alone = copy(self)
        alone.connection = (
            HTTPConnection()
        )  # vLLM's belongs to one event loop; there are two (`vllm_aside.py`)
        try:
            return await MediaConnector.load_from_url_async(alone, url, media_io, **options)
        except (RuntimeError, OSError, ClientError) as error:
            raise _refusal(f"it cannot be read: {str(error) or type(error).__name__}") from error
        finally:
            if alone.connection._async_client is not None:
                await alone.connection._async_client.close()


def _refusal(text: str) -> VLLMValidationError:
    return VLLMValidationError(text, parameter="image_url")


def name_by_content(renderer: BaseRenderer[Any]) -> None:
    """Name each picture by a hash of it, whatever `uuid` a request gives it. vLLM knows it by that in the engine's
    caches: with the same one for two pictures, the answer is about the first, also to another client."""
    process = renderer._process_mm_uuids

    def processed(data: Any, items: Any, uuids: dict[str, list[Any]], request: str) -> Any:
        return process(data, items, {kind: [None] * len(given) for kind, given in uuids.items()}, request)

    renderer._process_mm_uuids = processed
