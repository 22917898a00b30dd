"""KV transfer between engines, on vLLM's NIXL connector: a decode engine reads a prompt's KV blocks over UCX.

1. The prefill engine computes the prompt, and keeps its KV blocks for a time (`read_ahead/scheduler.py`, `leases.py`).
2. The engine's last output names the blocks in a `KvHandle` (`engine/vllm/translation.py`). The prefill worker sends
   this to the decode worker, which checks that its own engine can use such KV (`handles.py`).
3. The decode engine takes the handle with the request and allocates blocks for the prompt. Before its first read from
   a prefill engine, it asks the prefill engine's side channel how to reach the memory there (`side_channel.py`).
4. The decode engine's connector reads the blocks (`connector.py`). A read that takes too long is reported
   (`stalled_reads.py`), and the prompt is computed locally (`engine/vllm/engine.py`).
5. With the end of the read, NIXL notifies the prefill engine, which frees the blocks.
6. Then the connector asks that engine whether it held the blocks until they were read. With a yes the request runs;
   otherwise its prompt is computed locally.

Long prompts are read in pieces while the rest is computed (`read_ahead/`). Blocks that leave an engine's cache stay in
host memory or on disk (`tiers/`). `connector.py`, `prefill_chunk.py`, `read_ahead/` and `tiers/` run in vLLM's
processes. The constants are keys of the connector's statistics, unless they say otherwise; this module imports nothing
heavy."""

STALLED = "pdserve_stalled_requests"
"""Ids, in the engine, of requests whose read is overdue."""
FAILED = "pdserve_failed_requests"
"""Ids, in the engine, of requests whose KV could not be read."""
READS = "pdserve_reads"
"""Each successful read: id of the request or piece, id of the source engine, seconds, bytes of this rank."""
RELEASED = "pdserve_released_requests"
"""Ids of prefills whose blocks were freed."""
UNREACHABLE = "pdserve_unreachable_engines"
"""Ids of engines with which a handshake failed."""
COMPLETE = "pdserve_complete_blocks"
"""Handles of running prefills, for the blocks that are complete."""
AFTER = "pdserve_tokens_after"
"""In a request's transfer parameters: number of its tokens after those whose KV is read."""
PREEMPTED = "pdserve_preempted"
"""In a handle: how often the prefill lost its blocks and began again."""
AHEAD = "pdserve_ahead"
"""In the transfer parameters of a request that only reads KV ahead: number of leading blocks that are not read, because
the prefix cache has them; -1: free the blocks that were read ahead."""
CHUNK = "pdserve_chunk"
"""In the transfer parameters of a request that only sets how many prompt tokens a step computes."""

CREDENTIALS = "pdserve_credentials"
"""In the connector's extra configuration: folder of the graph's credentials on this host, or None."""
DISK, FOLDER = "pdserve_disk", "pdserve_folder"
"""In the offloading connector's extra configuration: bytes of disk for KV (`tiers/disk.py`), and the folder."""


def nixl_connector(role: str, lease: int, credentials: str | None) -> dict[str, object]:
    """The NIXL connector as vLLM's `kv-transfer-config`. `lease`: seconds; `credentials`: see `CREDENTIALS`."""
    return {
        "kv_connector": "PdserveConnector",
        "kv_connector_module_path": "pdserve.kv.connector",
        "kv_role": role,
        "kv_connector_extra_config": {"kv_lease_duration": lease, CREDENTIALS: credentials},
    }


def connectors(
    nixl: dict[str, object] | None, offload: int, disk: int = 0, folder: str = ""
) -> dict[str, object]:
    """An engine's connectors as vLLM's `kv-transfer-config`. `offload`: bytes of host memory for KV
    (`tiers/host_memory.py`), 0 for none; `disk`: bytes in `folder` for KV that leaves host memory, 0 for none."""
    if nixl and not offload:
        return nixl
    tiers: dict[str, object] = {"spec_name": "HostSpec", "spec_module_path": "pdserve.kv.tiers.host_memory"}
    if disk:
        tiers = {"spec_name": "DiskSpec", "spec_module_path": "pdserve.kv.tiers.disk"}
        tiers |= {DISK: disk, FOLDER: folder}
    tiers["cpu_bytes_to_use"] = offload
    tiers["offload_prompt_only"] = False  # the next prompt of a conversation contains the answer
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": tiers,
    }
    return {
        "kv_connector": "PdserveConnectors",
        "kv_connector_module_path": "pdserve.kv.tiers.host_memory",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [*([nixl] if nixl else []), offloading]},
    }
