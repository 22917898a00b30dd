from pdserve.frontend.versions import vllm_version

VERSION = vllm_version()
