//! `matkv bench`: every combination that is asked for is measured and named. How fast is not looked
//! at here.

use std::collections::BTreeMap;

use matkv_tests::{Home, Output, signal, text, until};
use serde_json::Value;

/// Six documents of a chunk or two, and three questions.
struct Corpus {
    _dir: tempfile::TempDir,
    documents: String,
    questions: String,
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
        let path = |name| dir.path().join(name).display().to_string();
        let (documents, questions) = (path("documents"), path("questions"));
        Self { _dir: dir, documents, questions }
    }

    /// After a benchmark's name, what it ingests and asks, and more.
    fn with<'a>(&'a self, name: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
        let own = ["--corpus", &self.documents, "--questions", &self.questions];
        [name, &own, more].concat()
    }
}

/// What a benchmark prints: names and values.
fn figures(output: &Output) -> BTreeMap<String, f64> {
    assert_eq!(output.code, Some(0), "{output:?}");
    printed(output)
}

fn printed(output: &Output) -> BTreeMap<String, f64> {
    let json: Value = serde_json::from_str(&output.out).expect("JSON");
    let list = json["figures"].as_array().expect("a list");
    let figure = |f: &Value| {
        let name = f["name"].as_str().expect("a name").to_owned();
        let value = f["value"].as_f64().unwrap_or_else(|| panic!("{name} is no number"));
        // Only a likelihood is less than that of something else.
        let signed = name.starts_with("loglikelihood");
        assert!(value.is_finite() && (value >= 0.0 || signed), "{name}: {value}");
        (name, value)
    };
    list.iter().map(figure).collect()
}

/// A load is waited for, however slow the disk is.
const SETTINGS: [&str; 2] = ["arena.size=256MiB", "io.patience=0"];

fn bench(home: &Home, arguments: &[&str]) -> Output {
    home.matkv(&SETTINGS, &[&["--format", "json", "bench"], arguments].concat())
}

#[test]
fn e2e_measures_every_tier_and_batch() {
    if Home::models().is_none() {
        return;
    }
    let (home, corpus) = (Home::new(), Corpus::new());
    let modes =
        ["--mode", "linked(32)", "--mode", "exact", "--max-new-tokens", "2", "--top-k", "2"];
    let cases = ["--batch", "1,2", "--tier", "cold,flash,arena"];
    let arguments = corpus.with(&["e2e"], &[&modes[..], &cases].concat());
    let found = figures(&bench(&home, &arguments));
    assert_eq!(found["documents"], 6.0);
    for tier in ["arena", "flash", "cold"] {
        for batch in ["batch 1", "batch 2"] {
            for mode in ["vanilla", "linked(32)", "exact"] {
                let of = format!("[{mode},{tier},top 2,2 tokens,{batch}]");
                assert!(found[&format!("ttft_ms{of}")] > 0.0);
                assert!(found[&format!("ttft_ms_p99{of}")] >= found[&format!("ttft_ms{of}")]);
                assert!(found[&format!("requests_per_s{of}")] > 0.0);
            }
            for mode in ["linked(32)", "exact"] {
                let share =
                    found[&format!("from_tier_share[{mode},{tier},top 2,2 tokens,{batch}]")];
                // Of requests at once, one may find in the arena what another has loaded.
                let all = share == 1.0 || batch == "batch 2" && share > 0.0;
                assert!(all, "{mode}, {tier}, {batch}: {share}");
            }
        }
    }
    for (wrong, why) in [
        (["--batch", "65"], "--batch must be 1 to 64"),
        (["--count", "0"], "--count must be at least 1"),
        (["--top-k", "0"], "--top-k must be at least 1"),
        (["--encoding", "int7"], "int7"),
        (["--stream", "--batch=1,2"], "--batch is one number"),
    ] {
        let output = bench(&home, &corpus.with(&["e2e"], &wrong));
        assert!(output.code != Some(0) && output.err.contains(why), "{output:?}");
    }
}

#[test]
fn e2e_measures_every_encoding_and_overlap() {
    if Home::models().is_none() {
        return;
    }
    let (home, corpus) = (Home::new(), Corpus::new());
    let setups = ["--encoding", "int8,int4+zstd", "--overlap", "on,off"];
    let short = ["--max-new-tokens", "2", "--count", "1"];
    let arguments = corpus.with(&["e2e"], &[setups, short].concat());
    let found = figures(&bench(&home, &arguments));
    for encoding in ["int8", "int4+zstd"] {
        for overlap in ["overlap", "no overlap"] {
            assert_eq!(found[&format!("documents[{encoding},{overlap}]")], 6.0);
            for mode in ["vanilla", "linked(32)", "independent"] {
                assert!(found[&format!("total_ms[{mode},{encoding},{overlap},2 tokens]")] > 0.0);
            }
        }
    }
    let bytes = |encoding| found[&format!("chunk_file_bytes[{encoding},overlap]")];
    assert!(bytes("int4+zstd") < bytes("int8"), "each encoding has a store of its own");
}

/// Starts a benchmark, interrupts it when it has said this, and returns what it prints.
async fn interrupted(arguments: &[&str], said: &str) -> (Home, Output) {
    let home = Home::new();
    let mut running = home.start(&SETTINGS, &[&["--format", "json", "bench"], arguments].concat());
    until(said, async || running.err().contains(said).then_some(())).await;
    signal("INT", &[running.pid()]);
    let output = until("it ends", async || running.ended()).await;
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.out.contains("not all of it: interrupted"), "{output:?}");
    (home, output)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_e2e_says_what_it_has_measured() {
    if Home::models().is_none() {
        return;
    }
    let corpus = Corpus::new();
    let long = ["--max-new-tokens", "200", "--mode", "linked(32)"];
    let (_home, output) = interrupted(&corpus.with(&["e2e"], &long), "question 1/3").await;
    assert!(!output.err.contains("question 3/3"), "it was not interrupted: {output:?}");
    let found = printed(&output);
    let of = |mode: &str| found[&format!("answer_tokens[{mode},200 tokens]")];
    assert!(of("vanilla") > 0.0 && of("linked(32)") > 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_interrupted_benchmark_says_what_it_has_measured() {
    if Home::models().is_none() {
        return;
    }
    let corpus = Corpus::new();
    let document = format!("{}/doc_5.txt", corpus.documents);
    // What it is asked to do takes much longer.
    for (arguments, said, figure) in [
        (
            ["prefill", "--tokens", "40,64", "--rounds", "100000"].to_vec(),
            "round 2/",
            "prefill_tokens_per_s[64]",
        ),
        (
            ["decode", "--context", "32", "--batch", "1", "--rounds", "100000"].to_vec(),
            "round 2/",
            "decode_over_floor[32,batch 1]",
        ),
        (
            corpus.with(&["fidelity"], &["--mode", "linked(32)", "--answer", "200"]),
            "question 2/",
            "kl[linked(32)]",
        ),
        (
            corpus.with(&["throughput"], &["--mode", "independent", "--requests", "200"]),
            "independent: 20/200",
            "failed[independent]",
        ),
        (["start", "--chunks", "100", "--rounds", "2"].to_vec(), "100 chunks", "start_empty_s"),
        (
            ["cold", "--corpus", &document, "--chunks", "1", "--rounds", "100000"].to_vec(),
            "round 2/",
            "cold_ttft_vanilla_over_matkv",
        ),
    ] {
        let (_home, output) = interrupted(&arguments, said).await;
        assert!(printed(&output).contains_key(figure), "{figure} in {output:?}");
    }
}

#[test]
fn energy_is_measured_or_said_to_be_unknown() {
    if Home::models().is_none() {
        return;
    }
    let (home, corpus) = (Home::new(), Corpus::new());
    let few = ["--requests", "2", "--mode", "independent", "--max-new-tokens", "2"];
    let output = bench(&home, &corpus.with(&["energy"], &few));
    let found = figures(&output);
    let joules = found.get("joules_per_1000_requests[independent]");
    assert_eq!(joules.is_none(), output.out.contains("energy: not available here: "), "{output:?}");
    assert_eq!(joules.is_none(), !found.contains_key("requests_per_kwh[independent]"));
}

#[test]
fn the_papers_tables_are_printed_beside_the_published_figures() {
    if Home::models().is_none() {
        return;
    }
    let (home, corpus) = (Home::new(), Corpus::new());
    let few = ["--batch", "1,2", "--count", "2"];
    let arguments = corpus.with(&["bench", "report", "--paper"], &few);
    let output = home.matkv(&SETTINGS, &arguments);
    assert_eq!(output.code, Some(0), "{output:?}");
    let lines = output.out.lines().map(|l| l.split_whitespace().collect::<Vec<_>>());
    // Below the heading, which begins with a number, too.
    let lines: Vec<_> = lines.skip(1).collect();
    let row = |first: &[&str]| lines.iter().find(|l| l.starts_with(first)).map_or(0, Vec::len);
    for (first, cells) in [
        (["end", "to"].as_slice(), 11),
        (&["1"], 9),
        (&["2"], 9),
        (&["8,", "published", "546.0"], 10),
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
    let found = figures(&bench(&home, &prefill));
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    let wanted = ["over_floor[300]", "over_floor[40]", "tokens_per_s[300]", "tokens_per_s[40]"];
    assert_eq!(names, wanted.map(|n| format!("prefill_{n}")));
    let decode =
        ["decode", "--context", "32,2048", "--batch", "1,2", "--steps", "2", "--rounds", "1"];
    let found = figures(&bench(&home, &decode));
    for context in [32, 2048] {
        for batch in [1, 2] {
            let of = format!("[{context},batch {batch}]");
            // Less than what must be read is not read.
            assert!(found[&format!("decode_over_floor{of}")] > 0.1);
            assert!(found[&format!("decode_tokens_per_s{of}")] > 0.0);
        }
    }
    let wrong = bench(&home, &["decode", "--context", "1500"]);
    assert!(wrong.code != Some(0) && wrong.err.contains("whole chunks of 1024"), "{wrong:?}");
}

#[test]
fn turns_of_a_conversation_are_answered_alike() {
    if Home::models().is_none() {
        return;
    }
    let (home, corpus) = (Home::new(), Corpus::new());
    let settings = ["arena.size=256MiB", "chunker.chunk_size=64"];
    let options = ["--corpus", &corpus.documents, "--chunks", "2", "--turns", "3", "--rounds", "1"];
    let more = ["--mode", "linked(8),exact", "--max-new-tokens", "4"];
    let arguments = [&["--format", "json", "bench", "turns"], &options[..], &more].concat();
    let found = figures(&home.matkv(&settings, &arguments));
    for mode in ["linked(8)", "exact"] {
        let of = |name: &str, turn: u32| found[&format!("{name}[{mode},{turn}]")];
        for turn in 2..=3 {
            // All but prefix and stored rows, which do not change.
            let grown = of("earlier_tokens", turn) - of("earlier_tokens", turn - 1);
            assert!(grown > 0.0, "turn {turn} of {mode}");
            assert!(of("earlier_tokens", turn) < of("prompt_tokens", turn - 1));
            assert!(of("ttft_ms", turn) > 0.0 && of("ttft_computed_over_earlier", turn) > 0.0);
        }
    }
}
