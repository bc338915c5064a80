//! `matkv bench`: every combination that is asked for is measured and named. How fast is not looked
//! at here.

use std::collections::BTreeMap;

use matkv_tests::{Home, Output, text};
use serde_json::Value;

/// Six documents of a chunk or two, and three questions.
struct Corpus {
    dir: tempfile::TempDir,
}

impl Corpus {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir.path().join("documents")).expect("a directory");
        for i in 0..6 {
            let path = dir.path().join(format!("documents/doc_{i}.txt"));
            std::fs::write(path, text(i, 60 + 20 * i as usize)).expect("a file");
        }
        let questions = "{\"query\": \"What is said of the sea?\"}\nWho rang the bell?\nWhere?\n";
        std::fs::write(dir.path().join("questions"), questions).expect("a file");
        Self { dir }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }
}

/// What a benchmark prints: names and values.
fn figures(output: &Output) -> BTreeMap<String, f64> {
    assert_eq!(output.code, Some(0), "{output:?}");
    let json: Value = serde_json::from_str(&output.out).expect("JSON");
    let list = json["figures"].as_array().expect("a list");
    let figure = |f: &Value| {
        let name = f["name"].as_str().expect("a name").to_owned();
        let value = f["value"].as_f64().unwrap_or_else(|| panic!("{name} is no number"));
        assert!(value.is_finite() && value >= 0.0, "{name}: {value}");
        (name, value)
    };
    list.iter().map(figure).collect()
}

fn bench(home: &Home, settings: &[&str], arguments: &[&str]) -> Output {
    let mut all = vec!["--format", "json", "bench"];
    all.extend(arguments);
    home.matkv(settings, &all)
}

#[test]
fn e2e_measures_every_combination() {
    if Home::models().is_none() {
        return;
    }
    let (home, corpus) = (Home::new(), Corpus::new());
    let (documents, questions) = (corpus.path("documents"), corpus.path("questions"));
    let mut arguments = vec!["e2e", "--corpus", &documents, "--questions", &questions];
    arguments.extend(["--mode", "linked(32)", "--batch", "1,3", "--tier", "arena,flash,cold"]);
    arguments.extend(["--encoding", "int8,int4+zstd", "--max-new-tokens", "2", "--top-k", "2"]);
    let output = bench(&home, &["arena.size=256MiB"], &arguments);
    let found = figures(&output);
    for encoding in ["int8", "int4+zstd"] {
        assert_eq!(found[&format!("documents[{encoding}]")], 6.0);
        for tier in ["arena", "flash", "cold"] {
            for batch in ["batch 1", "batch 3"] {
                for mode in ["vanilla", "linked(32)"] {
                    let of = format!("[{mode},{encoding},{tier},{batch}]");
                    assert!(found[&format!("ttft_ms{of}")] > 0.0);
                    assert!(found[&format!("ttft_ms_p99{of}")] >= found[&format!("ttft_ms{of}")]);
                    assert!(found[&format!("requests_per_s{of}")] > 0.0);
                }
                let of = format!("[linked(32),{encoding},{tier},{batch}]");
                let share = found[&format!("from_tier_share{of}")];
                // Of requests at once, one may find in the arena what another has loaded.
                assert!(share == 1.0 || batch == "batch 3" && share > 0.0, "{of}: {share}");
            }
        }
    }
    let smaller = found["chunk_file_bytes[int4+zstd]"] < found["chunk_file_bytes[int8]"];
    assert!(smaller, "each encoding has a store of its own");
    let wrong = bench(&home, &[], &["e2e", "--corpus", "x", "--questions", "x", "--batch", "65"]);
    assert!(wrong.code != Some(0) && wrong.err.contains("--batch must be 1 to 64"), "{wrong:?}");
}

#[test]
fn the_papers_tables_are_printed_beside_the_published_figures() {
    if Home::models().is_none() {
        return;
    }
    let (home, corpus) = (Home::new(), Corpus::new());
    let (documents, questions) = (corpus.path("documents"), corpus.path("questions"));
    let mut arguments = vec!["bench", "report", "--paper", "--corpus", &documents];
    arguments.extend(["--questions", &questions, "--batch", "1,2", "--count", "2"]);
    let output = home.matkv(&["arena.size=256MiB"], &arguments);
    assert_eq!(output.code, Some(0), "{output:?}");
    let lines: Vec<Vec<&str>> =
        output.out.lines().map(|l| l.split_whitespace().collect()).collect();
    let row = |first: &[&str]| lines.iter().find(|l| l.starts_with(first)).map_or(0, Vec::len);
    for (first, cells) in [
        (["end", "to"].as_slice(), 11),
        (&["1"], 8),
        (&["2"], 8),
        (&["8,", "published", "546"], 9),
        (&["memory", "(arena)"], 4),
        (&["flash,", "O_DIRECT"], 4),
        (&["cold", "tier"], 4),
    ] {
        assert_eq!(row(first), cells, "{first:?} in {}", output.out);
    }
    assert!(output.out.contains("energy: not available here") || output.out.contains("kWh"));
}

#[test]
fn the_model_alone_is_held_against_the_machine() {
    if Home::models().is_none() {
        return;
    }
    let home = Home::new();
    let prefill = ["prefill", "--tokens", "40,300", "--rounds", "1"];
    let found = figures(&bench(&home, &[], &prefill));
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    let wanted = ["over_floor[300]", "over_floor[40]", "tokens_per_s[300]", "tokens_per_s[40]"];
    assert_eq!(names, wanted.map(|n| format!("prefill_{n}")));
    let decode =
        ["decode", "--context", "32,2048", "--batch", "1,2", "--steps", "2", "--rounds", "1"];
    let found = figures(&bench(&home, &[], &decode));
    for context in [32, 2048] {
        for batch in [1, 2] {
            let of = format!("[{context},batch {batch}]");
            // Less than what must be read is not read.
            assert!(found[&format!("decode_over_floor{of}")] > 0.1);
            assert!(found[&format!("decode_tokens_per_s{of}")] > 0.0);
        }
    }
    let wrong = bench(&home, &[], &["decode", "--context", "1500"]);
    assert!(wrong.code != Some(0) && wrong.err.contains("whole chunks of 1024"), "{wrong:?}");
}
