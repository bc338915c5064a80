//! What every figure should be: one list, so that the table, the JSON and the report agree.

use crate::figures::Target;

use Target::{AtLeast, Under};

/// For two cores with AVX-512, SmolLM2-135M.
const TARGETS: &[(&str, Target)] = &[
    ("ttft_llama_over_ours_linked32", AtLeast(70.0)),
    ("ttft_llama_over_ours_independent", AtLeast(100.0)),
    ("ttft_vanilla_over_ours_linked32", AtLeast(25.0)),
    ("ttft_hf_matkv_over_ours_linked32", AtLeast(1.0)),
    ("restore_llama_over_ours_linked32", AtLeast(1.1)),
    ("restore_llama_over_ours_independent", AtLeast(1.6)),
    ("ttft_over_floor", Under(1.5)),
    ("ingest_over_llama_prefill", AtLeast(1.5)),
    ("ingest_with_embedding_over_llama_prefill", AtLeast(1.0)),
    ("prefill4096_over_llama", AtLeast(2.2)),
    ("decode64_over_llama", AtLeast(1.3)),
    ("decode2048_over_llama", AtLeast(1.8)),
    ("decode4096_over_llama", AtLeast(2.5)),
    ("batch8_shared_over_llama", AtLeast(4.5)),
    ("decode4096_over_floor", Under(1.6)),
    ("bf16_gemm_over_peak", AtLeast(0.85)),
    ("overlap_on_over_off", Under(0.90)),
    ("overlap_throttled_on_over_off", Under(0.75)),
    ("overlap_over_bound", Under(1.1)),
    ("overlap_throttled_over_bound", Under(1.1)),
    ("pss_extra_mb", Under(300.0)),
    ("miss_cost", Under(0.02)),
];

/// The target of a figure, if it has one.
pub fn of(name: &str) -> Option<Target> {
    TARGETS.iter().find(|t| t.0 == name).map(|t| t.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::GROUPS;

    #[test]
    fn every_figure_has_a_target() {
        let names: Vec<&str> = GROUPS.iter().flat_map(|g| g.1).copied().collect();
        for name in &names {
            assert!(of(name).is_some(), "{name}");
        }
        assert_eq!(names.len(), TARGETS.len());
    }
}
