//! MiniLM against sentence-transformers (fixture; see `tests/fixtures/scripts/gen_minilm.py`).

use std::path::PathBuf;

use matkv_retrieve::Embedder;
use matkv_testkit::cached_model;
use matkv_types::Precision;

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

#[test]
fn embeddings_match_the_reference() {
    let Some(file) = cached_model("minilm") else { return };
    let dir = file.parent().unwrap().to_owned();
    for precision in Precision::ALL {
        let least = if precision == Precision::Exact { 0.999_999 } else { 0.9999 };
        compare(&Embedder::open(&dir, precision).unwrap(), least);
    }
}

fn compare(embedder: &Embedder, least: f32) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/minilm.json");
    let fixture: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut compared = 0;
    for case in fixture["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let want: Vec<f32> = case["embedding"]
            .as_array()
            .unwrap()
            .iter()
            .map(|x| x.as_f64().unwrap() as f32)
            .collect();
        // The reference cuts at 256 tokens where we take the mean of windows.
        if case["ids"].as_array().unwrap().len() >= 256 || text.is_empty() {
            continue;
        }
        let got = embedder.embed(text).unwrap().unwrap();
        let cosine = dot(&got, &want);
        assert!(cosine >= least, "{}: cosine {cosine}", case["name"]);
        compared += 1;
    }
    assert!(compared >= 6, "only {compared} compared");
    assert!(embedder.embed("").unwrap().is_none());
    let long = "The tide mill grinds at every low water. ".repeat(120);
    let v = embedder.embed(&long).unwrap().unwrap();
    assert!((dot(&v, &v) - 1.0).abs() < 1e-4);
    let short = embedder.embed("When does the tide mill grind?").unwrap().unwrap();
    let other = embedder.embed("Quarterly report of a software company").unwrap().unwrap();
    assert!(dot(&v, &short) > dot(&v, &other) + 0.2);
}
