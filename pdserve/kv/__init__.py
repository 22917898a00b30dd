"""What pdserve adds to vLLM's NIXL connector, which runs inside vLLM's processes, and the check of the KV handles that
it is given, which runs in ours. Nothing heavy is imported here."""

STALLED = "pdserve_stalled_requests"
"""key in the connector's statistics: engine-side ids of requests whose read is overdue"""
FAILED = "pdserve_failed_requests"
"""key in the connector's statistics: engine-side ids of requests whose KV could not be read"""
READS = "pdserve_reads"
"""key in the connector's statistics: of each read that ended well, engine-side id of the request or piece, id of the
engine that it came from, seconds, and bytes of this rank"""
RELEASED = "pdserve_released_requests"
"""key in the connector's statistics: ids of prefills whose blocks are kept no longer"""
AFTER = "pdserve_tokens_after"
"""key in a request's transfer parameters: how many tokens it has after those whose KV is read"""
UNREACHABLE = "pdserve_unreachable_engines"
"""key in the connector's statistics: ids of engines with which a handshake failed"""
COMPLETE = "pdserve_complete_blocks"
"""key in the connector's statistics: handles of prompts that are being computed, as far as they are"""
PREEMPTED = "pdserve_preempted"
"""key in a handle: how often the prefill lost its blocks and began again"""
AHEAD = "pdserve_ahead"
"""key in a request's transfer parameters: not to be run, but says what can be read ahead. How many blocks not to read,
since the prefix cache has them; -1 where nothing more of what was read is wanted"""

CREDENTIALS = "pdserve_credentials"
"""key in the connector's extra configuration: the graph's folder of credentials on this host, or None"""
