"""The documented columns of the measurement tables, one schema per table.

A table is recognised by its signature (the columns no other table has together); further
documented columns may be left out of a user's file and then read as blank. A number is checked
when the file is read: finite, and not negative unless the schema says it may be. Of `rlhf` the
first line of words and of numbers are settings that no shipped table prints: assumptions fill
them, and a user's file may give them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSchema:
    """Columns of one measurement table."""

    name: str
    """File name in `rlhfsim/validation/data`, without `.csv`."""
    signature: tuple[str, ...]
    """Columns that must be there and that tell the table from the others."""
    text: frozenset[str]
    """Columns of words."""
    numeric: frozenset[str]
    """Columns of numbers; a cell such as `37-40` is kept and makes only its own row unusable."""
    signed: frozenset[str] = frozenset()
    """Numeric columns that may be negative (a difference of two readings)."""

    @property
    def columns(self) -> frozenset[str]:
        """Every documented column."""
        return self.text | self.numeric


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TABLES: dict[str, TableSchema] = {
    table.name: table
    for table in (
        TableSchema(
            name="oom_cases",
            signature=("case_id", "outcome", "gpus", "framework"),
            text=_words("""
            case_id source date kind framework version algo model gpu_type arch placement
            train_backend shard offload grad_ckpt rollout_engine outcome phase numbers
            answer_or_fix config_completeness phase_basis inferred_fields
            """),
            numeric=_words("""
            params_b gpus gpu_mem_gb nodes host_ram_gb_per_node tp pp cp_sp ep micro_train
            micro_logprob max_tokens_per_gpu rollout_tp rollout_engines gpu_mem_util
            prompt_len response_len n_samples train_batch rollout_batch
            """),
        ),
        TableSchema(
            name="rlhf",
            signature=("actor_model", "gpus", "gpu_type", "step_time_s"),
            text=_words("""
            recompute packing kl old_logprobs actor_offload optimizer_offload partial_rollout weight_path cuda_graphs
            algorithm actor_model model_config_key critic_model reward_model ref_model
            framework architecture staleness gpu_type gen_backend train_backend
            train_dp_or_fsdp precision_train precision_gen ppo_epochs_or_minibatch notes
            source as_published
            """),
            numeric=_words("""
            micro_batch pack_tokens logprob_pack_tokens mini_batches zero_stage gpu_memory_utilization max_num_seqs max_batched_tokens
            actor_params_b gpus gpus_train gpus_gen gen_tp gen_pp train_tp train_cp train_ep
            train_pp prompts_per_step samples_per_prompt sequences_per_step
            train_global_batch max_prompt_len max_response_len mean_prompt_len
            mean_response_len mean_total_seq_len generation_s logprob_s ref_logprob_s
            values_s reward_s update_actor_s update_critic_s weight_sync_s step_time_s
            other_s tokens_per_s_total tokens_per_s_per_gpu samples_per_s_total total_hours
            steps peak_mem_gb_per_gpu
            """),
        ),
        TableSchema(
            name="weight_sync",
            signature=("model", "gpu_type", "mechanism", "seconds"),
            text=_words("""
            model model_config_key weight_dtype train_framework train_parallel gen_engine
            gen_parallel gpu_type interconnect mechanism colocated scope notes source
            as_published
            """),
            numeric=_words("""
            params_b bytes_gb src_gpus dst_gpus seconds seconds_low seconds_high
            bandwidth_gb_s
            """),
        ),
        TableSchema(
            name="memory",
            signature=("kind", "model", "gpu_type", "peak_mem_gib_per_gpu", "kv_cache_tokens"),
            text=_words("""
            kind model model_config_key gpu_type framework fsdp_or_zero precision recompute
            offload lora kv_dtype throughput measured_or_analytic notes source as_published
            """),
            numeric=_words("""
            params_b gpus gpu_total_mem_gib tp pp cp ep dp seq_len micro_batch
            global_batch_seqs peak_mem_gib_per_gpu peak_mem_gb_as_published
            weights_gib_per_gpu params_optimizer_gib_per_gpu activations_gib_per_gpu
            activation_pct_of_tp_baseline non_torch_gib_per_gpu cudagraph_gib_per_gpu
            kv_cache_gib_per_gpu kv_cache_tokens gpu_memory_utilization max_model_len
            cpu_mem_gb
            """),
            signed=_words("cudagraph_gib_per_gpu kv_cache_gib_per_gpu"),
        ),
        TableSchema(
            name="inference",
            signature=("model", "gpu_type", "gpus", "input_len", "output_len"),
            text=_words("""
            model model_config_key gpu_type engine precision scenario notes source
            as_published
            """),
            numeric=_words("""
            params_b gpus tp pp ep_or_dep input_len output_len batch_or_concurrency
            num_requests output_tok_s_total output_tok_s_per_gpu prefill_tok_s ttft_ms
            tpot_ms total_duration_s achieved_hbm_gb_s
            """),
        ),
        TableSchema(
            name="training",
            signature=("model", "gpus", "gpu_type", "seq_len", "framework"),
            text=_words("""
            model model_config_key gpu_type framework workload fsdp_or_zero
            sequence_parallel precision recompute offload notes source as_published
            """),
            numeric=_words("""
            params_b params_active_b layers hidden heads kv_heads seq_len gpus tp pp vp cp
            ep dp micro_batch global_batch_seqs grad_accum tokens_per_s_per_gpu
            model_tflops_per_gpu step_time_s seqs_per_s_total mfu_pct hfu_pct
            peak_mem_gib_per_gpu
            """),
        ),
        TableSchema(
            name="comm_compute",
            signature=("kind", "op", "gpu_type", "latency_ms"),
            text=_words("""
            kind op gpu_type interconnect dtype derived_columns software notes source
            as_published
            """),
            numeric=_words("""
            gpus nodes message_mib m n k latency_ms algbw_gb_s busbw_gb_s achieved_tflops
            peak_tflops_used efficiency_pct achieved_gb_s peak_gb_s
            """),
        ),
        TableSchema(
            name="hardware_specs",
            signature=("gpu", "vendor", "bf16_dense_tflops"),
            text=_words("""
            gpu vendor form_factor hbm_type scaleup_link pcie_gen typical_node_gpus
            cloud_price_usd_per_gpu_h price_note provenance source as_published
            """),
            numeric=_words("""
            bf16_dense_tflops fp16_dense_tflops fp8_dense_tflops fp4_dense_tflops
            hbm_gb_datasheet hbm_gb_s scaleup_unidir_gb_s scaleup_bidir_gb_s
            pcie_unidir_gb_s tdp_w typical_nic_gbps_per_gpu mamf_bf16_tflops mamf_fp8_tflops
            """),
        ),
        TableSchema(
            name="model_configs",
            signature=("model", "family", "layers", "hidden"),
            text=_words("""
            model family tied_embeddings mlp_type attention_type sliding_window provenance
            notes source as_published
            """),
            numeric=_words("""
            params_total_b params_active_b params_total_b_computed params_active_b_computed
            layers hidden ffn heads kv_heads head_dim vocab experts top_k shared_experts
            moe_ffn dense_first_layers q_lora_rank kv_lora_rank qk_nope_head_dim
            qk_rope_head_dim v_head_dim max_position kv_bytes_per_token_bf16
            """),
        ),
    )
}
"""In the order in which they are tried."""
