//! Real models and vocabularies, if they have been fetched.
//!
//! A test that needs one returns when it is absent, so that the suite runs without a network;
//! `MATKV_REQUIRE_MODELS=1` turns that into a failure, so that CI cannot skip unnoticed.

use std::path::PathBuf;

/// `$MATKV_CACHE_DIR`, else `$XDG_CACHE_HOME/matkv`, else `$HOME/.cache/matkv`.
fn cache_dir() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("MATKV_CACHE_DIR")
        .or_else(|| set("XDG_CACHE_HOME").map(|dir| dir.join("matkv")))
        .or_else(|| set("HOME").map(|dir| dir.join(".cache/matkv")))
        .unwrap_or_default()
}

/// The file of a model known to `matkv model pull`, or `None` after saying that it is skipped.
///
/// # Panics
/// If it is absent and `MATKV_REQUIRE_MODELS` is 1.
pub fn cached_model(name: &str) -> Option<PathBuf> {
    let path = matkv_model::model_path(&cache_dir(), name).ok();
    path.or_else(|| skipped(&format!("matkv model pull {name}")))
}

/// The directory `fetch_vocabs.py` fills, or `None` after saying that it is skipped.
///
/// # Panics
/// If it is absent and `MATKV_REQUIRE_MODELS` is 1.
pub fn cached_vocabs() -> Option<PathBuf> {
    let dir = cache_dir().join("vocabs");
    // The script moves its files in name order, so this one is the last to appear.
    if dir.join("ggml-vocab-qwen2.gguf.out").exists() {
        return Some(dir);
    }
    skipped(&format!("python3 tests/fixtures/scripts/fetch_vocabs.py {}", dir.display()))
}

fn skipped(command: &str) -> Option<PathBuf> {
    let required = std::env::var_os("MATKV_REQUIRE_MODELS").is_some_and(|v| v == "1");
    assert!(!required, "MATKV_REQUIRE_MODELS is 1 and a file is missing: run `{command}`");
    println!("skipped: run `{command}`");
    None
}
