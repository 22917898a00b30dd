from pdserve.config.host import installed_vllm

VERSION = installed_vllm().version
