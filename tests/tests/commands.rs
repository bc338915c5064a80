//! `matkv ingest` and `matkv docs`: what is taken, what is skipped and why, exit statuses.

use std::path::Path;

use matkv_tests::{Output, Server, question};
use serde_json::Value;

fn write(dir: &Path, name: &str, bytes: &[u8]) -> String {
    let path = dir.join(name);
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
    std::fs::write(&path, bytes).expect("a file");
    path.display().to_string()
}

/// The line of standard error that names a skipped document says why.
fn assert_skipped(output: &Output, name: &str, reason: &str) {
    let line = output.err.lines().find(|l| l.starts_with(&format!("skipped {name}: ")));
    let line = line.unwrap_or_else(|| panic!("{name} is not named in {}", output.err));
    assert!(line.contains(reason), "{line:?} does not say {reason:?}");
}

async fn names(server: &Server) -> Vec<String> {
    server.documents().await.into_iter().map(|d| d.document_id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn ingest_takes_what_it_can_and_names_the_rest() {
    let Some(server) = Server::start(&[]).await else { return };
    let dir = tempfile::tempdir().expect("a directory");
    skipped(&server, dir.path()).await;
    patterns(&server, dir.path()).await;
    standard_input(&server).await;
    removed(&server).await;
    server.stop().await;
}

async fn skipped(server: &Server, dir: &Path) {
    let good = write(dir, "good.txt", "The tide bell was cast in 1768.".as_bytes());
    let marked = write(dir, "marked.txt", "\u{feff}The ferry leaves at six.".as_bytes());
    let empty = write(dir, "empty.txt", b"");
    let blank = write(dir, "blank.txt", b" \n\n");
    let binary = write(dir, "binary.txt", b"abc\0def");
    let latin = write(dir, "latin.txt", b"caf\xe9");
    let missing = dir.join("missing.txt").display().to_string();
    // Reading a process's memory at address 0 fails, whoever reads.
    let unreadable = "/proc/self/mem".to_owned();
    let all = [&good, &empty, &missing, &binary, &latin, &unreadable, &blank, &marked];
    let arguments: Vec<&str> =
        std::iter::once("ingest").chain(all.iter().map(|s| s.as_str())).collect();
    let output = server.matkv(&arguments);
    assert_eq!(output.code, Some(2), "{output:?}");
    assert_skipped(&output, &empty, "empty");
    assert_skipped(&output, &blank, "empty");
    assert_skipped(&output, &binary, "binary");
    assert_skipped(&output, &latin, "UTF-8");
    assert_skipped(&output, &missing, "no such file");
    assert_skipped(&output, &unreadable, "Input/output error");
    assert!(!output.err.contains("good.txt"), "{}", output.err);
    assert!(output.out.contains("2 documents (0 unchanged, 6 skipped)"), "{}", output.out);
    assert_eq!(names(server).await, [good.clone(), marked.clone()]);
    let reply = server.ask(question("When was the bell cast?")).await;
    assert_eq!(reply.places()[0], (good.as_str(), 0));

    // The same, for programs; and only what is wrong.
    let output = server.matkv(&["--format", "json", "ingest", &good, &empty, &missing]);
    assert_eq!(output.code, Some(2), "{output:?}");
    let json: Value = serde_json::from_str(&output.out).expect("JSON");
    assert_eq!((&json["documents"], &json["unchanged"]), (&1.into(), &1.into()));
    assert_eq!(json["skipped"].as_array().map(Vec::len), Some(2));
    let output = server.matkv(&["ingest", &missing]);
    assert_eq!(output.code, Some(2), "{output:?}");
    assert_skipped(&output, &missing, "no such file");
}

async fn patterns(server: &Server, dir: &Path) {
    for name in ["glob/one.md", "glob/two.md", "glob/three.rst", "glob/deep/four.md"] {
        write(dir, name, format!("This is {name}.").as_bytes());
    }
    let before = names(server).await.len();
    let pattern = dir.join("glob/*.md").display().to_string();
    let output = server.matkv(&["ingest", &pattern]);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert_eq!(names(server).await.len(), before + 2, "only what matches");
    let output = server.matkv(&["ingest", &dir.join("glob").display().to_string()]);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.out.contains("3 documents (2 unchanged, 0 skipped)"), "{}", output.out);
    let nothing = dir.join("glob/*.doc").display().to_string();
    let output = server.matkv(&["ingest", &nothing]);
    assert_eq!(output.code, Some(2), "{output:?}");
    assert_skipped(&output, &nothing, "matches no file");
}

async fn standard_input(server: &Server) {
    let arguments = ["ingest", "-", "--name", "notes"];
    let output = server.matkv_with_input(&arguments, b"The mill grinds rye.");
    assert_eq!(output.code, Some(0), "{output:?}");
    assert_eq!(server.document("notes").await.bytes, 20);
    let output = server.matkv_with_input(&arguments, b"a\0b");
    assert_eq!(output.code, Some(2), "{output:?}");
    assert_skipped(&output, "notes", "binary");
    assert_eq!(server.document("notes").await.bytes, 20, "the old version stays");
}

async fn removed(server: &Server) {
    let output = server.matkv(&["docs", "rm", "notes", "nowhere"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.out.contains("removed notes") && output.err.contains("nowhere"), "{output:?}");
    let listed = server.matkv(&["docs", "ls"]);
    assert!(!listed.out.contains("notes") && listed.out.contains("good.txt"), "{listed:?}");
    let remaining = names(server).await;
    let arguments: Vec<&str> =
        ["docs", "rm"].into_iter().chain(remaining.iter().map(String::as_str)).collect();
    assert_eq!(server.matkv(&arguments).code, Some(0));
    let listed = server.matkv(&["docs", "ls"]);
    assert!(listed.out.contains("no documents"), "{listed:?}");
    let status = server.status().await;
    assert_eq!((status.documents, status.chunks, status.chunk_bytes), (0, 0, 0));
    assert!(matkv_tests::chunk_files(&server.home().store()).is_empty());
    assert!(server.ask(question("When?")).await.chunks.is_empty());
}
