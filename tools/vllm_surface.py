"""Fields, parameters and source texts of vLLM that pdserve relies on, besides what it imports and overrides.

`tests/engine/test_vllm_api.py` checks them in the installed vLLM, `tools/vllm_diff.py` in a release that is not
installed."""

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
_PULL = f"{_NIXL}.pull_worker.NixlPullConnectorWorker"
_CLIENT = "vllm.v1.engine.core_client.AsyncMPClient"

MESSAGES = {
    "vllm.v1.engine.EngineCoreRequest": "request_id prompt_token_ids mm_features sampling_params pooling_params "
    "arrival_time lora_request cache_salt data_parallel_rank prompt_embeds prompt_is_token_ids client_index "
    "current_wave priority trace_headers resumable external_req_id reasoning_ended reasoning_parser_kwargs "
    "abort_immediately session_id kv_hints",
    "vllm.v1.engine.EngineCoreOutput": "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors "
    "pooling_output finish_reason stop_reason events kv_transfer_params ec_transfer_params trace_headers "
    "prefill_stats routed_experts num_nans_in_logits mm_cache_miss_hashes new_sampling_mask spec_decode_metrics "
    "prompt_token_id_logprobs",
    "vllm.v1.engine.EngineCoreOutputs": "engine_index outputs scheduler_stats timestamp utility_output "
    "finished_requests wave_complete start_wave weight_version",
    "vllm.multimodal.inputs.MultiModalFeatureSpec": "data modality identifier mm_position mm_hash",
    "vllm.lora.request.LoRARequest": "lora_name lora_int_id lora_path base_model_name load_inplace is_3d_lora_weight",
    "vllm.distributed.kv_events.KVEventBatch": "ts events data_parallel_rank",
    # a new field may need a rule in docs/migration.md
    "vllm.sampling_params.SamplingParams": "n "
    "presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed "
    "stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids "
    "prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens "
    "spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone "
    "output_text_buffer_length _eos_token_id _all_stop_token_ids _watermarking_skipped structured_outputs "
    "logit_bias allowed_token_ids extra_args bad_words _bad_words_token_ids skip_reading_prefix_cache "
    "thinking_token_budget repetition_detection routed_experts_prompt_start trace_decode_token_ids",
}
"""Message -> all its fields, in order."""

FIELDS = {
    "vllm.v1.metrics.stats.SchedulerStats": "num_running_reqs num_waiting_reqs num_skipped_waiting_reqs "
    "kv_cache_usage kv_connector_stats prefix_cache_stats iteration_details",
    "vllm.v1.metrics.stats.SchedulerIterationDetails": "num_ctx_tokens",
    "vllm.config.SchedulerConfig": "long_prefill_token_threshold",
    "vllm.distributed.kv_events.BlockStored": "block_hashes parent_block_hash token_ids lora_name extra_keys medium "
    "group_idx",
    "vllm.distributed.kv_events.BlockRemoved": "block_hashes medium group_idx",
    "vllm.v1.engine.logprobs.LogprobsProcessor": "tokenizer logprobs prompt_logprobs cumulative_logprob num_logprobs "
    "num_prompt_logprobs",
}
"""Class -> the fields that pdserve uses."""

FUNCTIONS = {
    f"{_CLIENT}.add_request_async": "self request",
    f"{_CLIENT}.abort_requests_async": "self request_ids",
    f"{_CLIENT}.get_output_async": "self",
    f"{_CLIENT}.get_supported_tasks_async": "self",
    f"{_CLIENT}.add_lora_async": "self lora_request",
    f"{_CLIENT}.remove_lora_async": "self lora_id",
    f"{_CLIENT}.reset_prefix_cache_async": "self reset_running_requests reset_connector",
    f"{_CLIENT}.shutdown": "self timeout",
    "vllm.v1.metrics.loggers.PrometheusStatLogger.record": "self scheduler_stats iteration_stats mm_cache_stats "
    "engine_idx",
    f"{_NIXL}.connector.NixlBaseConnector.__init__": "self vllm_config role kv_cache_config",
    f"{_NIXL}.pull_scheduler.NixlPullConnectorScheduler.__init__": "self vllm_config engine_id kv_cache_config",
    f"{_PULL}.__init__": "self vllm_config engine_id kv_cache_config",
    f"{_PULL}._pop_done_transfers": "self transfers",
    f"{_PULL}._read_blocks_for_req": "self req_id meta",
    f"{_PULL}.get_transfer_results": "self",
    f"{_PULL}._handle_failed_transfer": "self req_id handle failed_req_ids record_failed_transfer",
    f"{_PULL}._mark_remote_engine_invalid": "self engine_id now",
}
"""Function that pdserve overrides, or calls with all arguments -> all its parameters."""

CALLED = {
    "vllm.v1.engine.async_llm.AsyncLLM.__init__": "self vllm_config executor_class log_stats "
    "log_requests stat_loggers",
    "vllm.v1.engine.async_llm.AsyncLLM.shutdown": "self timeout",
    "vllm.v1.engine.core_client.EngineCoreClient.make_async_mp_client": "vllm_config executor_class renderer",
    "vllm.v1.engine.output_processor.OutputProcessor.abort_requests": "self request_ids internal",
    "vllm.v1.engine.output_processor.OutputProcessor.process_outputs": "self engine_core_outputs "
    "engine_core_timestamp iteration_stats",
    "vllm.v1.engine.output_processor.RequestOutputCollector.put": "self output",
    "vllm.v1.engine.output_processor.RequestState.make_request_output": "self new_token_ids "
    "pooling_output finish_reason stop_reason kv_transfer_params ec_transfer_params error",
    "vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer.get_next_output_text": "self finished delta",
    "vllm.v1.metrics.loggers.StatLoggerManager.record": "self scheduler_stats iteration_stats",
    "vllm.renderers.base.BaseRenderer._tokenize_prompt": "self prompt params",
    "vllm.renderers.base.BaseRenderer._process_mm_uuids": "self mm_data mm_data_items mm_uuid_items mm_req_id",
    "vllm.multimodal.media.MediaConnector.load_from_url_async": "self url media_io",
    "vllm.v1.core.sched.output.strip_covered_mm_data": "mm_features num_computed_tokens uses_mrope",
    "vllm.v1.engine.output_processor.RequestState.__init__": "self request_id parent_req queue",
    "vllm.entrypoints.launchers.app.build_app": "args supported_tasks model_config",
    "vllm.entrypoints.launchers.api_server.app_state.init_app_state": "engine_client state args "
    "supported_tasks",
    "vllm.entrypoints.launchers.cli_args.make_arg_parser": "parser",
    "vllm.entrypoints.launchers.cli_args.validate_parsed_serve_args": "args",
    "vllm.engine.arg_utils.AsyncEngineArgs.from_cli_args": "args",
    "vllm.engine.arg_utils.AsyncEngineArgs.create_model_config": "self",
    "vllm.engine.arg_utils.AsyncEngineArgs.create_logging_config": "self",
    "vllm.engine.arg_utils.AsyncEngineArgs.create_structured_outputs_config": "self",
    "vllm.engine.arg_utils.AsyncEngineArgs._set_default_reasoning_config_args": "self",
    "vllm.v1.executor.Executor.get_class": "vllm_config",
    "vllm.v1.metrics.loggers.PrometheusStatLogger.__init__": "self vllm_config engine_indexes",
    "vllm.exceptions.GracefulHTTPError.__init__": "self message http_status",
    "vllm.v1.serial_utils.MsgpackEncoder.encode": "self obj",
    "vllm.v1.serial_utils.MsgpackDecoder.decode": "self bufs",
    "vllm.tool_parsers.ToolParserManager.import_tool_parser": "plugin_path",
    "vllm.reasoning.ReasoningParserManager.import_reasoning_parser": "plugin_path",
    "vllm.v1.engine.async_llm.AsyncLLM.generate": "self prompt sampling_params request_id",
    "vllm.v1.engine.input_processor.InputProcessor._validate_params": "self params supported_tasks",
    "vllm.v1.engine.logprobs.LogprobsProcessor._update_prompt_logprobs": "self prompt_logprobs_tensors",
    "vllm.logprobs.create_prompt_logprobs": "flat_logprobs",
}
"""Function that pdserve calls or replaces -> the parameters that it uses, in order."""

REPLACED = (
    "vllm.v1.core.block_pool.BlockPool.get_new_blocks",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner._sample",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner._bookkeeping_sync",
    "vllm.v1.sample.rejection_sampler.apply_sampling_constraints",
    "vllm.v1.sample.rejection_sampler.expand_batch_to_tokens",
    "vllm.v1.sample.rejection_sampler._rejection_random_sample",
    "vllm.v1.engine.core_client.EngineCoreClient.make_async_mp_client",
    "vllm.v1.executor.uniproc_executor.get_file_store_init_method",
    "vllm.v1.executor.multiproc_executor.get_file_store_init_method",
    "vllm.v1.executor.multiproc_executor.MultiprocExecutor.start_worker_monitor",
    "vllm.v1.engine.input_processor.InputProcessor._validate_params",
    "vllm.v1.engine.output_processor.RequestState.make_request_output",
    "vllm.renderers.base.BaseRenderer._tokenize_prompt",
    "vllm.renderers.base.BaseRenderer._process_mm_uuids",
    "vllm.v1.core.sched.output.strip_covered_mm_data",
)
"""Members that pdserve wraps or replaces in vLLM's objects."""

SOURCES = {
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler": (
        "self._current_batch_allocated_block_ids = set()",
        "        if num_external_tokens == 0:\n            return\n",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker": ("self.spec = spec",),
    "vllm.v1.kv_offload.cpu.manager": ("self._num_chunks", "self._policy.get(key)"),
    "vllm.v1.kv_offload.cpu.spec": ("self._manager", "self._worker", "self.num_chunks"),
    "vllm.v1.kv_offload.cpu.gpu_worker": ("self._mmap_region = mmap_region",),
    "vllm.v1.kv_offload.cpu.shared_offload_region": ("self._creator", "self.mmap_path"),
    "vllm.v1.kv_offload.tiering.spec": ("self._engine_id",),
    "vllm.v1.kv_offload.tiering.manager": ("self._metrics = ", "self._metrics.take_stats()"),
    "vllm.v1.kv_offload.tiering.metrics": ("self._observe_active_transfer_stats(active_transfer_stats)",),
    f"{_NIXL}.base_worker": (
        "self._recving_metadata",
        "self.block_len_per_layer",
        "self.xfer_stats",
        "local_physical_block_ids",
        "self._recv_failures",
        "finished_sending",
        "if not in_progress:\n                done_req_ids.add(req_id)\n",
        "_reap_expired_send_leases(done_sending)",
    ),
    f"{_NIXL}.pull_worker": ('msg.startswith("HB:")',),
    # the scheduler reads the threshold in each step
    "vllm.v1.core.sched.scheduler": (
        "            self.scheduler_config.long_prefill_token_threshold\n",
        # this call comes before the scheduler frees the blocks of finished_sending
        "self.connector.update_connector_output(kv_connector_output)\n\n        # KV Connector:: update recv",
    ),
    "vllm.renderers.base": ("self._tokenize_prompt_async = make_async(",),
    # a block's keys have an identifier and an offset for each of its images
    "vllm.v1.core.kv_cache_utils": ('key[1:] if key[0] == "mm" else key[1]', "offset - start_token_idx"),
    "vllm.sampling_params": ("    def bad_words_token_ids(self)", "if speculative_config is None:"),
    "vllm.v1.engine.input_processor": ("                self.speculative_config,\n",),
    "vllm.v1.engine.output_processor": ("self.request_states", "self.parent_requests"),
    "vllm.v1.metrics.loggers": ("_gauge_cls", "_counter_cls", "_histogram_cls"),
}
"""Module -> texts that its source must have, for attributes that no signature shows or that need GPU libraries."""
