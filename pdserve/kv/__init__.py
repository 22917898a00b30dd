"""What pdserve adds to vLLM's NIXL connector, which runs inside vLLM's processes, and the check of the KV handles that
it is given, which runs in ours. Nothing heavy is imported here."""

STALLED = "pdserve_stalled_requests"
"""key in the connector's statistics: engine-side ids of requests whose read is overdue"""
FAILED = "pdserve_failed_requests"
"""key in the connector's statistics: engine-side ids of requests whose KV could not be read"""
RELEASED = "pdserve_released_requests"
"""key in the connector's statistics: ids of prefills whose blocks are kept no longer"""
UNREACHABLE = "pdserve_unreachable_engines"
"""key in the connector's statistics: ids of engines with which a handshake failed"""
