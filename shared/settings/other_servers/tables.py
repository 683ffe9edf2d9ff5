"""Settings of vLLM, SGLang, FastDeploy and llama.cpp's server: our names for them, or the reasons
for their absence.

Sources: vLLM's engine and server arguments (0.8 to 0.32), SGLang's ``server_args.py``, FastDeploy's
``docs/parameters.md``, llama.cpp's ``tools/server/README.md``. Names have underscores, as in a
settings file.
"""

from collections.abc import Mapping, Set
from typing import Any

from shared.settings.names_elsewhere import Known, NamesElsewhere
from shared.settings.other_servers.flags import name_of, our_flags
from shared.settings.other_servers.values import speculation_of, value_of

SAME = {
    "alias": "served_model_name",
    "batch_size": "max_num_batched_tokens",
    "chat_template_file": "chat_template",
    "ctx_size": "max_model_len",
    "parallel": "max_num_seqs",
    "ssl_cert_file": "ssl_certfile",
    "ssl_key_file": "ssl_keyfile",
    "threads": "num_threads",
    "context_length": "max_model_len",
    "cuda_graph_bs": "cudagraph_capture_sizes",
    "cuda_graph_sizes": "cudagraph_capture_sizes",
    "data_parallel_size": "workers",
    "dp": "workers",
    "disaggregation_mode": "worker_role",
    "dp_size": "workers",
    "lora_paths": "lora_modules",
    "max_concurrency": "max_open_requests",
    "max_loaded_loras": "max_cpu_loras",
    "max_loras_per_batch": "max_loras",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "mem_fraction_static": "gpu_memory_utilization",
    "model_path": "model",
    "override_pooler_config": "pooler_config",
    "page_size": "block_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "splitwise_role": "worker_role",
    "tensor_parallel": "tensor_parallel_size",
    "tokenizer_worker_num": "tokenizers",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "uvicorn_log_level": "log_level",
    "api_server_count": "gateways",
}
SWITCHED = {
    "disable_cuda_graph": ("enforce_eager", "true"),
    "disable_log_requests": ("log_requests", "false"),
    "disable_radix_cache": ("enable_prefix_caching", "false"),
    "enable_log_requests": ("log_requests", "true"),
    "embedding": ("runner", "pooling"),
    "embeddings": ("runner", "pooling"),
    "is_embedding": ("runner", "pooling"),
}
SHORT = {
    "-a": "alias",
    "-b": "batch_size",
    "-c": "ctx_size",
    "-cb": "cont_batching",
    "-ctk": "cache_type_k",
    "-ctv": "cache_type_v",
    "-fa": "flash_attn",
    "-m": "model",
    "-md": "model_draft",
    "-n": "n_predict",
    "-ngl": "n_gpu_layers",
    "-np": "parallel",
    "-t": "threads",
    "-tb": "threads_batch",
    "-to": "timeout",
    "-ub": "ubatch_size",
    "-asc": "api_server_count",
    "-cc": "compilation_config",
    "-dcp": "decode_context_parallel_size",
    "-dp": "data_parallel_size",
    "-dpa": "data_parallel_address",
    "-dpb": "data_parallel_backend",
    "-dpl": "data_parallel_size_local",
    "-dpn": "data_parallel_rank",
    "-dpp": "data_parallel_rpc_port",
    "-dpr": "data_parallel_start_rank",
    "-ep": "enable_expert_parallel",
    "-pcp": "prefill_context_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
    "-sc": "speculative_config",
    "-tp": "tensor_parallel_size",
}

ADAPTERS = "not a part of adapters here; see lora-modules"
ALWAYS_CHUNKED = "prompts are always computed in chunks, beside decoding sequences"
ALWAYS_AHEAD = "steps are always planned ahead of results"
CHOICE_OF_KERNELS = "kernels are not a choice: the worker logs the ones it takes"
DATA_PARALLEL = "workers are replicas that find their scheduler by scheduler-address"
GRAMMARS = "grammars are always compiled by llguidance"
HYBRID = "windows and states are always planned from the model"
MEDIA = "images have no such setting; see limit-mm-per-prompt and mm-processor-cache-gb"
OF_THE_FOLDER = "the model's folder decides"
OFFLOADED = "kv-offloading-size alone keeps KV blocks outside the cache"
ONE_POOL = "prompts and outputs have the same KV blocks"
ONE_BALANCE = "whole experts stay on their ranks"
PLUGINS = "no foreign code is loaded"
PORTS = "services of one machine meet in mesh-dir, without ports"
PROMPT_HEADERS = "see allowed-origins"
SERVER = "the HTTP server has no such setting"
SPECULATIVE = "see speculative-config"
SPLIT = "workers send each other KV blocks by themselves; roles are worker-role"
STATISTICS = "/metrics has them"

SWITCHES = {
    ADAPTERS: """
        enable_lora_bias enable_prompt_adapter enable_tower_connector_lora fully_sharded_loras
    """,
    ALWAYS_CHUNKED: """
        cont_batching disable_chunked_mm_input enable_chunked_prefill enable_mixed_chunk
    """,
    ALWAYS_AHEAD: """
        async_scheduling disable_async_output_proc disable_overlap_schedule
        enable_overlap_schedule enable_single_batch_overlap enable_two_batch_overlap
        multi_step_stream_outputs use_v2_block_manager
    """,
    CHOICE_OF_KERNELS: """
        calculate_kv_scales disable_cascade_attn disable_cuda_graph_padding
        disable_custom_all_reduce disable_flashinfer disable_sequence_parallel_moe
        disable_shared_experts_fusion enable_dbo enable_dp_lm_head
        enable_flashinfer_allreduce_fusion enable_flashinfer_autotune enable_layerwise_nvtx_tracing
        enable_mscclpp enable_nccl_nvls enable_p2p_check enable_piecewise_cuda_graph
        enable_profile_cuda_graph enable_symm_mem enable_torch_compile enable_torch_symm_mem
        flashinfer_mla_disable_ragged lm_head_fp32 ray_workers_use_nsight skip_server_warmup
        triton_attention_reduce_in_fp32 use_cudagraph use_warmup
    """,
    DATA_PARALLEL: """
        data_parallel_external_lb data_parallel_hybrid_lb
        disable_nccl_for_dp_synchronization enable_dp_attention headless
    """,
    GRAMMARS: """
        constrained_json_disable_any_whitespace guided_decoding_disable_additional_properties
        guided_decoding_disable_any_whitespace guided_decoding_disable_fallback
    """,
    HYBRID: "disable_hybrid_kv_cache_manager disable_hybrid_swa_memory",
    "states are float32": "enable_mamba_cache_stochastic_rounding",
    MEDIA: """
        disable_fast_image_processor disable_mm_preprocessor_cache enable_mm enable_mm_embeds
        enable_multimodal enable_multimodal_encoder_data_parallel interleave_mm_strings
        keep_mm_feature_on_device mm_enable_dp_encoder mm_encoder_only skip_mm_profiling
    """,
    OFFLOADED: "enable_hierarchical_cache enable_output_caching kv_sharing_fast_prefill",
    ONE_BALANCE: "enable_eplb eplb_log_balancedness",
    SERVER: """
        aggregate_engine_logging delete_ckpt_after_loading disable_fastapi_docs
        disable_frontend_multiprocessing disable_uvicorn_access_log dynamic_load_weight
        enable_early_stop enable_log_deltas enable_log_outputs enable_memory_saver
        enable_offline_docs enable_prompt_embeds enable_server_load_tracking
        enable_sleep_mode enable_ssl_refresh log_error_stack return_tokens_as_token_ids
        props skip_tokenizer_init sleep_on_idle tokens_only use_tqdm_on_load
    """,
    PROMPT_HEADERS: "allow_credentials",
    "weights on a CPU are copied into the layout of its kernels": "mlock mmap",
    "a request's chat is always rendered by the model's template": "jinja",
    STATISTICS: """
        metrics slots cudagraph_metrics disable_log_stats enable_logging_iteration_details
        enable_metrics enable_metrics_for_all_schedulers enable_mfu_metrics
        enable_request_time_stats_logging enable_trace kv_cache_metrics
    """,
    "tools are on for every model whose template has them": "enable_auto_tool_choice",
    "code of a model's folder is never run": "trust_remote_code",
    "usage always has them": "enable_cache_report enable_prompt_tokens_details",
    "stream_options.include_usage of a request decides": "enable_force_include_usage",
    "a template gets the tools unless tool_choice is none": "exclude_tools_when_tool_choice_none",
    "logprobs need no setting; see max-logprobs": "enable_logprob",
    "answers always have X-Request-Id": "enable_request_id_headers",
    "the same seed always gives the same text": "enable_deterministic_inference",
    "windows of a model always hold": "disable_sliding_window",
    "the experts of a token are not returned": "enable_return_routed_experts",
    "priorities need no setting": "enable_priority_scheduling",
}
VALUES = {
    ADAPTERS: """
        default_mm_loras long_lora_scaling_factors lora_backend lora_dtype lora_extra_vocab_size
        lora_target_modules max_prompt_adapters prompt_adapters qlora_adapter_name_or_path
    """,
    ALWAYS_CHUNKED: "max_prefill_tokens prefill_max_requests",
    ALWAYS_AHEAD: """
        decode_log_interval num_continuous_decode_steps num_lookahead_slots
        num_scheduler_steps schedule_conservativeness scheduler_cls scheduler_delay_factor
        scheduler_recv_interval stream_interval
    """,
    ONE_POOL: "kv_cache_ratio static_decode_blocks",
    CHOICE_OF_KERNELS: """
        additional_config all2all_backend attention_backend attention_config bf16_gemm_backend
        compilation_config cuda_graph_max_bs threads_batch dbo_decode_token_threshold
        dbo_prefill_token_threshold
        decode_attention_backend deepep_mode device_ids dist_timeout distributed_executor_backend
        distributed_timeout_seconds flashinfer_mxfp4_moe_precision fp4_gemm_backend fp8_gemm_backend
        graph_optimization_config kernel_config kv_cache_dtype_skip_layers linear_backend
        flash_attn mamba_backend max_cudagraph_capture_size max_parallel_loading_workers
        max_seq_len_to_capture
        moba_attention_config moe_a2a_backend moe_backend moe_runner_backend optimization_level
        override_attention_dtype performance_mode plas_attention_config prefill_attention_backend
        profiler_config sampling_backend torch_compile_max_bs torchao_config ubatch_size worker_cls
        worker_extension_cls
    """,
    DATA_PARALLEL: """
        data_parallel_address data_parallel_backend data_parallel_rank data_parallel_rpc_port
        data_parallel_size_local data_parallel_start_rank dist_init_addr ips load_balance_method
        local_data_parallel_id nccl_port router scheduler_db scheduler_host scheduler_name
        scheduler_password scheduler_port scheduler_topic scheduler_ttl
    """,
    "a split of one sequence's keys over ranks is not supported; see tensor-parallel-size": """
        attn_cp_size cp_kv_cache_interleave_size dcp_kv_cache_interleave_size
        dcp_comm_backend decode_context_parallel_size prefill_context_parallel_size
    """,
    GRAMMARS: """
        constrained_json_whitespace_pattern grammar_backend guided_decoding_backend
        structured_outputs_config
    """,
    HYBRID: """
        linear_attn_backend mamba_block_size mamba_cache_dtype mamba_cache_mode
        mamba_full_memory_ratio mamba_scheduler_strategy mamba_ssm_cache_dtype
        mamba_cache_philox_rounds mamba_ssm_dtype max_mamba_cache_size swa_full_tokens_ratio
    """,
    MEDIA: """
        allowed_local_media_path ec_transfer_config image_max_pixels
        limit_mm_data_per_request max_processor_cache media_io_kwargs
        mm_attention_backend mm_encoder_attn_backend mm_encoder_tp_mode mm_process_config
        mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc video_pruning_rate
    """,
    OF_THE_FOLDER: """
        chat_template_content_format code_revision completion_template config_format convert
        deploy_modality dtype_override hf_config_path hf_overrides json_model_override_args
        load_choices model_config_parser override_neuron_config quantization_param_path rope_scaling
        rope_theta task tokenizer tokenizer_backend tokenizer_mode tokenizer_path
        tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type tokenizer_revision
    """,
    "nothing is downloaded; the Hugging Face cache is HF_HUB_CACHE": "download_dir hf_token",
    "safetensors are read as they are": """
        ignore_patterns model_checksum model_loader_extra_config pt_load_map_location
        safetensors_load_strategy weight_loader_prefetch_num_threads
    """,
    OFFLOADED: """
        cpu_offload_params hicache_io_backend hicache_mem_layout hicache_ratio hicache_size
        hicache_storage_backend hicache_write_policy kv_offloading_backend kvcache_storage_backend
        max_total_tokens preemption_mode radix_eviction_policy swap_space
    """,
    ONE_BALANCE: """
        ep ep_num_redundant_experts ep_size eplb_config eplb_step_interval
        eplb_window_size expert_distribution_recorder_mode expert_parallel_size
        expert_placement_strategy init_expert_location num_redundant_experts
    """,
    PLUGINS: """
        custom_sigquit_handler early_stop_config io_processor_plugin logits_processor_pattern
        logits_processors middleware reasoning_config reasoning_parser_plugin
        tool_call_parser_plugin tool_parser_plugin tool_server
    """,
    PORTS: """
        cache_queue_port cache_transfer_protocol controller_port engine_worker_queue_port
        innode_prefill_ports pd_comm_port rdma_comm_ports
    """,
    PROMPT_HEADERS: "allowed_headers allowed_methods",
    SERVER: """
        bucket_time_to_first_token crash_dump_folder disable_access_log_for_endpoints
        fail_on_environ_validation fastapi_root_path file_storage_path h11_max_header_count
        h11_max_incomplete_event_size log_config_file log_level_http log_requests_level max_log_len
        timeout max_waiting_time preferred_sampling_params response_role root_path shutdown_timeout
        ssl_ciphers warmups watchdog_timeout weight_transfer_config weight_version
    """,
    SPECULATIVE: """
        draft_max draft_min model_draft ngram_prompt_lookup_max ngram_prompt_lookup_min
        num_speculative_tokens
        spec_decoding_acceptance_method speculative_algorithm speculative_attention_mode
        speculative_draft_attention_backend speculative_draft_model_path
        speculative_eagle_topk speculative_max_model_len speculative_model
        speculative_num_draft_tokens speculative_num_steps speculative_token_map
    """,
    SPLIT: """
        disaggregation_bootstrap_port disaggregation_ib_device disaggregation_transfer_backend
        kv_events_config kv_transfer_config
    """,
    STATISTICS: """
        collect_detailed_traces kv_cache_metrics_sample metrics_port otlp_endpoint
        show_hidden_metrics_for_version
    """,
    "see kv-cache-dtype": "cache_type_k cache_type_v",
    "a GPU computes all layers; see device and cpu-offload-gb": "gpu_layers n_gpu_layers",
    "requests and the model's generation_config.json decide": """
        min_p n_predict predict repeat_penalty temp top_k top_p
    """,
    "see reasoning-parser": "reasoning_format",
    "a request's seed decides; without one the text is random": "random_seed seed",
    "priority, then the time of arrival, decides": """
        default_priority_value retraction_policy schedule_policy scheduling_policy
    """,
    "prefixes are always found by BLAKE2b": "prefix_caching_hash_algo",
}
VARIABLES = {
    "ENABLE_V1_KVCACHE_SCHEDULER": "prompts and outputs always share one pool of KV blocks",
    "FD_ATTENTION_BACKEND": CHOICE_OF_KERNELS,
    "FD_SAMPLING_CLASS": "sampling is always exact and without a sort",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "use SHOAL_ALLOW_RUNTIME_LORA_UPDATING",
    "VLLM_ATTENTION_BACKEND": CHOICE_OF_KERNELS,
    "VLLM_USE_V1": "there is one engine",
}
PROTECTING = {
    "ssl_ca_certs": "certificates of clients are not checked; remove it to serve without",
    "ssl_cert_reqs": "certificates of clients are not checked; remove it to serve without",
    "admin_api_key": "use admin-token",
}
"""Settings that protect a server; ignoring them would leave it open."""
PROTECTING_VARIABLES = {"VLLM_API_KEY": "use SHOAL_API_KEY"}


def _tables() -> dict[str, Known]:
    return {
        **{name: Known(takes_value=True, name=ours) for name, ours in SAME.items()},
        **{
            name: Known(takes_value=False, name=ours, value=value)
            for name, (ours, value) in SWITCHED.items()
        },
        **_explained(SWITCHES, takes_value=False),
        **_explained(VALUES, takes_value=True),
    }


def _explained(table: Mapping[str, str], *, takes_value: bool) -> dict[str, Known]:
    return {
        name: Known(takes_value=takes_value, reason=reason)
        for reason, names in table.items()
        for name in names.split()
    }


FOREIGN = _tables()


class OtherServers(NamesElsewhere):
    short = SHORT
    variables = VARIABLES
    protecting = PROTECTING
    protecting_variables = PROTECTING_VARIABLES

    def flags(self, arguments: list[str], known: Set[str]) -> list[str]:
        return our_flags(arguments, known, self)

    def name_of(self, flag: str) -> str:
        return name_of(flag, self)

    def find(self, name: str) -> Known | None:
        found = FOREIGN.get(name)
        if found is None and name.startswith("no_"):
            found = FOREIGN.get(name.removeprefix("no_"))
            return found if found and found.reason and not found.takes_value else None
        return found

    def value(self, setting: str, value: Any) -> Any:
        return value_of(setting, value)

    def speculation(self, given: dict[str, Any]) -> dict[str, Any]:
        return speculation_of(given)
