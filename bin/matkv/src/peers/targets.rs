//! What every figure should be: one list, so that the table, the JSON and the report agree.

use crate::figures::Target;

use Target::{AtLeast, Under};

/// A ratio to a peer below 1 is a defeat.
const TARGETS: &[(&str, Target)] = &[
    ("ttft_llama_over_ours_linked32", AtLeast(1.0)),
    ("ttft_llama_over_ours_independent", AtLeast(1.0)),
    ("ttft_vanilla_over_ours_linked32", AtLeast(1.0)),
    ("ttft_hf_matkv_over_ours_linked32", AtLeast(1.0)),
    ("restore_llama_over_ours_linked32", AtLeast(1.0)),
    ("restore_llama_over_ours_independent", AtLeast(1.0)),
    ("ttft_over_floor", Under(2.0)),
    ("ingest_over_llama_prefill", AtLeast(1.0)),
    ("ingest_with_embedding_over_llama_prefill", AtLeast(1.0)),
    ("prefill4096_over_llama", AtLeast(1.0)),
    ("decode64_over_llama", AtLeast(1.0)),
    ("decode2048_over_llama", AtLeast(1.0)),
    ("decode4096_over_llama", AtLeast(1.0)),
    ("batch8_shared_over_llama", AtLeast(1.0)),
    ("decode4096_over_floor", Under(2.0)),
    ("bf16_gemm_over_peak", AtLeast(0.9)),
    ("overlap_on_over_off", AtLeast(1.0)),
    ("overlap_throttled_on_over_off", AtLeast(1.0)),
    ("pss_extra_mb", Under(512.0)),
    ("miss_cost", Under(0.05)),
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
