//! Who may depend on whom: every edge of the crate graph against one list.

use std::path::Path;

use anyhow::Context;

use crate::Problem;

/// The allowed edges, by directory. ARCHITECTURE.md draws the same list.
const EDGES: &[(&str, &[&str])] = &[
    ("crates/types", &[]),
    ("crates/actors", &[]),
    ("crates/config", &["types"]),
    ("crates/sys", &["types"]),
    ("crates/format", &["types"]),
    ("crates/kernels", &["types"]),
    ("crates/api", &["types"]),
    ("crates/telemetry", &["types", "sys"]),
    ("crates/ring", &["types", "sys"]),
    ("crates/store", &["types", "format", "sys"]),
    ("crates/model", &["types", "kernels", "sys"]),
    ("crates/retrieve", &["types", "kernels", "model", "store"]),
    (
        "crates/loader",
        &[
            "types",
            "actors",
            "config",
            "sys",
            "ring",
            "format",
            "store",
            "kernels",
            "model",
            "retrieve",
            "api",
            "telemetry",
        ],
    ),
    ("crates/decoder", &["types", "actors", "config", "sys", "ring", "model", "telemetry"]),
    (
        "crates/simulation",
        &["types", "sys", "ring", "format", "model", "loader-core", "decoder-core"],
    ),
    ("crates/testkit", &["types", "model"]),
    ("bin/matkv", &["types", "actors", "config", "api", "loader-core", "telemetry"]),
    ("bin/matkv-loader", &["types", "config", "loader-core", "telemetry"]),
    ("bin/matkv-decoder", &["types", "config", "decoder-core", "telemetry"]),
];

/// Checks the manifests under `crates/` and `bin/`.
pub fn check(root: &Path, problems: &mut Vec<Problem>) -> anyhow::Result<()> {
    for group in ["crates", "bin"] {
        for entry in std::fs::read_dir(root.join(group))? {
            let path = entry?.path();
            let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
            let manifest = path.join("Cargo.toml");
            if manifest.exists() {
                check_manifest(&name, &manifest, problems)?;
            }
        }
    }
    Ok(())
}

fn check_manifest(name: &str, path: &Path, problems: &mut Vec<Problem>) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(path)?;
    let table: toml::Table = text.parse().with_context(|| path.display().to_string())?;
    let Some((_, allowed)) = EDGES.iter().find(|e| e.0 == name) else {
        problems
            .push(Problem::error(name, "is not in the list of allowed edges (xtask/src/edges.rs)"));
        return Ok(());
    };
    let dependencies = table.get("dependencies").and_then(toml::Value::as_table);
    for dependency in dependencies.into_iter().flat_map(toml::Table::keys) {
        let Some(target) = dependency.strip_prefix("matkv-") else { continue };
        if !allowed.contains(&target) {
            problems.push(Problem::error(name, format!("may not depend on {dependency}")));
        }
        if target == "testkit" {
            problems.push(Problem::error(name, "testkit is a dev-dependency only"));
        }
    }
    Ok(())
}
