//! Checks of single files: length of files and functions, headers, unsafe, leftovers.

use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use crate::Problem;

const FILE_LINES_WARN: usize = 400;
const FILE_LINES_MAX: usize = 600;
const FUNCTION_LINES_MAX: usize = 70;
const COLUMNS_MAX: usize = 100;
/// Crates that may contain unsafe code.
const UNSAFE_CRATES: [&str; 2] = ["crates/sys", "crates/kernels"];

/// Checks every Rust file of the workspace.
pub fn check(root: &Path, problems: &mut Vec<Problem>) -> anyhow::Result<()> {
    for path in rust_files(root) {
        let text = std::fs::read_to_string(&path)?;
        let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        check_file(&name, &text, problems);
    }
    Ok(())
}

fn rust_files(root: &Path) -> Vec<PathBuf> {
    ["crates", "bin", "tests", "benches", "xtask"]
        .iter()
        .flat_map(|dir| WalkDir::new(root.join(dir)).sort_by_file_name())
        .flatten()
        .map(walkdir::DirEntry::into_path)
        .filter(|p| p.extension().is_some_and(|e| e == "rs"))
        .collect()
}

fn check_file(name: &str, text: &str, problems: &mut Vec<Problem>) {
    let production = production_lines(text);
    if production > FILE_LINES_MAX {
        problems
            .push(Problem::error(name, format!("{production} lines, at most {FILE_LINES_MAX}")));
    } else if production > FILE_LINES_WARN {
        problems.push(Problem::warning(name, format!("{production} lines")));
    }
    if !text.starts_with("//!") {
        problems.push(Problem::error(name, "does not begin with a //! header"));
    }
    let is_root = name.ends_with("src/lib.rs") || name.ends_with("src/main.rs");
    let may_be_unsafe = UNSAFE_CRATES.iter().any(|c| name.starts_with(c));
    if is_root && !may_be_unsafe && !text.contains("#![forbid(unsafe_code)]") {
        problems.push(Problem::error(name, "lacks #![forbid(unsafe_code)]"));
    }
    for (i, line) in text.lines().enumerate() {
        check_line(&format!("{name}:{}", i + 1), line, problems);
    }
    check_functions(name, text, problems);
}

/// Lines before the file's own test module.
fn production_lines(text: &str) -> usize {
    let tests = text.find("\n#[cfg(test)]\nmod tests");
    text[..tests.unwrap_or(text.len())].lines().count()
}

fn check_line(place: &str, line: &str, problems: &mut Vec<Problem>) {
    let leftovers = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    for word in leftovers {
        if line.contains(word) {
            problems.push(Problem::error(place, format!("leftover {word}")));
        }
    }
    let columns = line.chars().count();
    // rustfmt leaves long literals alone; only those may stick out.
    if columns > COLUMNS_MAX && !line.contains('"') {
        problems.push(Problem::error(place, format!("{columns} columns, at most {COLUMNS_MAX}")));
    }
    let trimmed = line.trim_start();
    let silences = trimmed.starts_with("#[allow(") || trimmed.starts_with("#![allow(");
    if silences && !line.contains("reason =") {
        problems.push(Problem::error(place, "a lint is silenced without a reason"));
    }
}

/// Functions by indentation: from a line that declares one to the brace that closes it.
fn check_functions(name: &str, text: &str, problems: &mut Vec<Problem>) {
    let mut open: Option<(usize, usize, &str)> = None;
    for (i, line) in text.lines().enumerate() {
        let indent = line.len() - line.trim_start().len();
        match open {
            None if is_function(line) && !line.trim_end().ends_with('}') => {
                open = Some((i, indent, line.trim()));
            }
            Some((start, depth, head)) if indent == depth && line.trim() == "}" => {
                let lines = i - start + 1;
                if lines > FUNCTION_LINES_MAX {
                    let text = format!("{lines} lines, at most {FUNCTION_LINES_MAX}: {head}");
                    problems.push(Problem::error(format!("{name}:{}", start + 1), text));
                }
                open = None;
            }
            // A declaration without a body.
            Some((_, depth, _)) if indent == depth && line.trim_end().ends_with(';') => open = None,
            _ => {}
        }
    }
}

fn is_function(line: &str) -> bool {
    let mut words = line.trim_start().split(' ');
    let qualifiers = ["pub", "pub(crate)", "pub(super)", "async", "unsafe", "const", "extern"];
    // What `dispatch!` declares has its body elsewhere.
    words.find(|w| !qualifiers.contains(w)).is_some_and(|w| w == "fn") && !line.contains(" => ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        let mut out = Vec::new();
        check_file("crates/x/src/a.rs", text, &mut out);
        out.into_iter().map(|p| p.text).collect()
    }

    #[test]
    fn long_functions_and_leftovers_are_found() {
        let body = "    let x = 1;\n".repeat(70);
        let long = format!("//! x\nfn f() {{\n{body}}}\n");
        assert!(problems(&long)[0].contains("72 lines"));
        let short = format!("//! x\nfn f() {{\n{}}}\n", "    let x = 1;\n".repeat(68));
        assert!(problems(&short).is_empty());
        let leftover = format!("//! x\n// {}: later\n", concat!("TO", "DO"));
        assert!(problems(&leftover)[0].contains("leftover"));
        assert!(problems("fn f() {}\n")[0].contains("header"));
        assert!(problems("//! x\n#[allow(dead_code)]\nfn f() {}\n")[0].contains("reason"));
    }
}
