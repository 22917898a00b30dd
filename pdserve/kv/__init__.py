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
