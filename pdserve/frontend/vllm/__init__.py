"""The frontend's use of vLLM: only this folder imports it, and `api_server` is the way in."""
