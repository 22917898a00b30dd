"""What runs here, without importing vLLM."""

from functools import cache

import pdserve
from pdserve.config.host import installed_vllm


@cache
def versions() -> dict[str, str]:
    return {"version": pdserve.__version__, "vllm": installed_vllm().version}
