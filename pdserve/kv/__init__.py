"""What pdserve adds to vLLM's NIXL connector, which runs inside vLLM's processes, and the check of KV handles, which
runs in ours. Nothing heavy is imported here.

The constants are keys of the connector's statistics, unless something else is said."""

STALLED = "pdserve_stalled_requests"
"""the engine's ids of requests whose read is overdue"""
FAILED = "pdserve_failed_requests"
"""the engine's ids of requests whose KV could not be read"""
READS = "pdserve_reads"
"""of each successful read: the engine's id of the request or piece, id of the source engine, seconds, bytes of this
rank"""
RELEASED = "pdserve_released_requests"
"""ids of prefills whose blocks are kept no longer"""
AFTER = "pdserve_tokens_after"
"""in a request's transfer parameters: number of its tokens after those whose KV is read"""
UNREACHABLE = "pdserve_unreachable_engines"
"""ids of engines with which a handshake failed"""
COMPLETE = "pdserve_complete_blocks"
"""handles of running prefills, for the blocks that are complete"""
PREEMPTED = "pdserve_preempted"
"""in a handle: how often the prefill lost its blocks and began again"""
AHEAD = "pdserve_ahead"
"""in the transfer parameters of a request that is not to be run but to read KV ahead: number of leading blocks that the
prefix cache has, and that are not read; -1: free what was read ahead"""
CHUNK = "pdserve_chunk"
"""in the transfer parameters of a request that is not to be run: how many tokens of prompts a step computes"""

CREDENTIALS = "pdserve_credentials"
"""in the connector's extra configuration: folder of the graph's credentials on this host, or None"""
DISK, FOLDER = "pdserve_disk", "pdserve_folder"
"""in the offloading connector's extra configuration: bytes of disk for KV (`tiers/disk.py`), and in which folder"""


def nixl_connector(role: str, lease: int, credentials: str | None) -> dict[str, object]:
    """Ours, as vLLM's `kv-transfer-config` says it. `lease`: seconds; `credentials`: see `CREDENTIALS`."""
    return {
        "kv_connector": "PdserveConnector",
        "kv_connector_module_path": "pdserve.kv.connector",
        "kv_role": role,
        "kv_connector_extra_config": {"kv_lease_duration": lease, CREDENTIALS: credentials},
    }


def connectors(
    nixl: dict[str, object] | None, offload: int, disk: int = 0, folder: str = ""
) -> dict[str, object]:
    """All connectors of an engine, at least one. `offload`: bytes of host memory for KV (`tiers/host_memory.py`), 0 for
    none; `disk`: bytes of disk below it, in `folder`."""
    if nixl and not offload:
        return nixl
    host = {
        "cpu_bytes_to_use": offload,
        "spec_name": "HostSpec",
        "spec_module_path": "pdserve.kv.tiers.host_memory",
        "offload_prompt_only": False,  # the next prompt of a conversation has the answer, too
    }
    if disk:
        below = {
            "spec_name": "DiskSpec",
            "spec_module_path": "pdserve.kv.tiers.disk",
            DISK: disk,
            FOLDER: folder,
        }
        host = host | below
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": host,
    }
    return {
        "kv_connector": "PdserveConnectors",
        "kv_connector_module_path": "pdserve.kv.tiers.host_memory",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [*([nixl] if nixl else []), offloading]},
    }
