//! What to ingest: files, directories, globs, standard input; and what to skip, with the reason.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;
use globset::GlobBuilder;
use walkdir::WalkDir;

/// Extensions taken from directories: plain text and Markdown.
const EXTENSIONS: [&str; 4] = ["txt", "text", "md", "markdown"];

/// Something to ingest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    Stdin,
    File(PathBuf),
}

/// Something named that cannot be ingested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    pub name: String,
    pub reason: String,
}

/// Sources in a stable order, and what was skipped while looking.
pub fn collect(arguments: &[String]) -> anyhow::Result<(Vec<Source>, Vec<Skipped>)> {
    let mut found = BTreeSet::new();
    let mut skipped = Vec::new();
    let mut stdin = false;
    for argument in arguments {
        let path = Path::new(argument);
        if argument == "-" {
            stdin = true;
        } else if path.is_dir() {
            let before = found.len();
            walk(path, usize::MAX, &mut found, &mut skipped, has_text_extension);
            if found.len() == before {
                let reason = "no .txt or .md file in this directory".into();
                skipped.push(Skipped { name: argument.clone(), reason });
            }
        } else if path.exists() {
            found.insert(clean(path));
        } else if argument.contains(['*', '?', '[', '{']) {
            glob(argument, &mut found, &mut skipped)?;
        } else {
            skipped.push(Skipped { name: argument.clone(), reason: "no such file".into() });
        }
    }
    let mut sources: Vec<Source> = found.into_iter().map(Source::File).collect();
    if stdin {
        sources.insert(0, Source::Stdin);
    }
    Ok((sources, skipped))
}

fn has_text_extension(path: &Path) -> bool {
    let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase());
    extension.is_some_and(|e| EXTENSIONS.contains(&e.as_str()))
}

/// Without a leading `./`, so that a document has one name.
fn clean(path: &Path) -> PathBuf {
    path.components().filter(|c| !matches!(c, std::path::Component::CurDir)).collect()
}

fn walk(
    root: &Path,
    depth: usize,
    found: &mut BTreeSet<PathBuf>,
    skipped: &mut Vec<Skipped>,
    take: impl Fn(&Path) -> bool,
) {
    for entry in WalkDir::new(root).max_depth(depth).follow_links(true).sort_by_file_name() {
        match entry {
            Ok(entry) if entry.file_type().is_file() && take(entry.path()) => {
                found.insert(clean(entry.path()));
            }
            Ok(_) => {}
            Err(e) => {
                let name = e
                    .path()
                    .map_or_else(|| root.display().to_string(), |p| p.display().to_string());
                skipped.push(Skipped { name, reason: e.to_string() });
            }
        }
    }
}

fn glob(
    pattern: &str,
    found: &mut BTreeSet<PathBuf>,
    skipped: &mut Vec<Skipped>,
) -> anyhow::Result<()> {
    let matcher = GlobBuilder::new(pattern)
        .literal_separator(true)
        .build()
        .with_context(|| format!("pattern {pattern:?}"))?
        .compile_matcher();
    // The part before the first wildcard is a directory to look in.
    let fixed: PathBuf = Path::new(pattern)
        .components()
        .take_while(|c| !c.as_os_str().to_string_lossy().contains(['*', '?', '[', '{']))
        .collect();
    let fixed_parts = fixed.components().count();
    let root = if fixed.as_os_str().is_empty() { PathBuf::from(".") } else { fixed };
    let before = found.len();
    // Without `**` no file below the pattern's own depth can match.
    let parts = Path::new(pattern).components().count() - fixed_parts;
    let depth = if pattern.contains("**") { usize::MAX } else { parts };
    walk(&root, depth, found, skipped, |p| matcher.is_match(clean(p)) || matcher.is_match(p));
    if found.len() == before {
        let reason = "the pattern matches no file".into();
        skipped.push(Skipped { name: pattern.to_owned(), reason });
    }
    Ok(())
}

impl Source {
    /// The document's name.
    pub fn name(&self, stdin: &str) -> String {
        match self {
            Self::Stdin => stdin.to_owned(),
            Self::File(path) => path.display().to_string(),
        }
    }

    /// The text, or why it is none.
    pub fn read(&self) -> Result<String, String> {
        let mut bytes = Vec::new();
        match self {
            Self::Stdin => std::io::stdin().lock().read_to_end(&mut bytes).map(|_| ()),
            Self::File(path) => std::fs::read(path).map(|b| bytes = b),
        }
        .map_err(|e| e.to_string())?;
        text(bytes)
    }
}

fn text(bytes: Vec<u8>) -> Result<String, String> {
    if bytes.contains(&0) {
        return Err("binary (it contains a zero byte)".into());
    }
    let text = String::from_utf8(bytes)
        .map_err(|e| format!("not UTF-8 (byte {})", e.utf8_error().valid_up_to()))?;
    let text = text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text);
    if text.trim().is_empty() {
        return Err("empty".into());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(arguments: &[&Path]) -> (Vec<String>, Vec<String>) {
        let arguments: Vec<String> = arguments.iter().map(|p| p.display().to_string()).collect();
        let (found, skipped) = collect(&arguments).unwrap();
        let file = |s: &Source| match s {
            Source::File(p) => p.file_name().unwrap().to_string_lossy().into_owned(),
            Source::Stdin => "-".into(),
        };
        (found.iter().map(file).collect(), skipped.into_iter().map(|s| s.reason).collect())
    }

    #[test]
    fn files_directories_and_patterns() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir(root.join("sub")).unwrap();
        for name in ["a.txt", "b.md", "c.pdf", "sub/d.txt", "sub/e.TXT"] {
            std::fs::write(root.join(name), "text").unwrap();
        }
        assert_eq!(names(&[root]).0, ["a.txt", "b.md", "d.txt", "e.TXT"]);
        assert_eq!(names(&[&root.join("c.pdf")]).0, ["c.pdf"], "named outright, it is taken");
        assert_eq!(names(&[&root.join("*.txt")]).0, ["a.txt"]);
        assert_eq!(names(&[&root.join("**/*.txt")]).0, ["a.txt", "d.txt"]);
        assert_eq!(names(&[root, &root.join("a.txt")]).0.len(), 4, "each once");
        assert_eq!(names(&[&root.join("x.txt")]).1, ["no such file"]);
        assert_eq!(names(&[&root.join("*.doc")]).1, ["the pattern matches no file"]);
    }

    #[test]
    fn what_is_no_text_is_named() {
        assert_eq!(text(b"ok".to_vec()), Ok("ok".into()));
        assert_eq!(text("\u{feff}bom".into()), Ok("bom".into()));
        assert!(text(b"a\0b".to_vec()).unwrap_err().contains("binary"));
        assert!(text(vec![b'a', 0xff]).unwrap_err().contains("byte 1"));
        assert_eq!(text(b" \n".to_vec()), Err("empty".into()));
    }
}
