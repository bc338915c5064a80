//! `matkv doctor`: what this machine allows, how fast its device is, and what to change.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use matkv_config::{Config, Resolved, format_bytes};
use matkv_loader_core::measure::device::{Point, Probe};
use matkv_loader_core::models::packed_files;
use matkv_loader_core::offline;
use matkv_loader_core::process::{free_bytes, shared_memory_pages};
use serde_json::{Value, json};

use crate::args::Format;
use crate::out::say;
use crate::{fio, render};

#[derive(clap::Args, Clone)]
pub struct DoctorOptions {
    /// Measure every engine, depth and block size, and write the best to the configuration file
    #[arg(long)]
    pub tune: bool,
    /// Rounds of --tune; the median of each point counts
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
}

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grade {
    Fine,
    /// It works, and could be better.
    Advice,
    /// It does not work.
    Bad,
}

struct Check {
    name: &'static str,
    grade: Grade,
    found: String,
    advice: String,
}

fn check(name: &'static str, found: impl Into<String>) -> Check {
    Check { name, grade: Grade::Fine, found: found.into(), advice: String::new() }
}

impl Check {
    fn or(mut self, fine: bool, grade: Grade, advice: impl Into<String>) -> Self {
        if !fine {
            (self.grade, self.advice) = (grade, advice.into());
        }
        self
    }
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// The soft limit of a resource, from the kernel's list for this process.
fn limit(name: &str) -> Option<u64> {
    let text = read("/proc/self/limits");
    let line = text.lines().find(|l| l.starts_with(name))?;
    let rest = line[name.len()..].trim_start();
    let soft = rest.split_whitespace().next()?;
    if soft == "unlimited" { Some(u64::MAX) } else { soft.parse().ok() }
}

fn shown(bytes: u64) -> String {
    if bytes == u64::MAX { "unlimited".into() } else { format_bytes(bytes) }
}

/// Whether limits on locked memory do not apply: `CAP_IPC_LOCK`, capability 14.
fn may_lock() -> bool {
    let text = read("/proc/self/status");
    let line = text.lines().find_map(|l| l.strip_prefix("CapEff:"));
    let caps = line.and_then(|l| u64::from_str_radix(l.trim(), 16).ok());
    caps.is_some_and(|c| c & (1 << 14) != 0)
}

/// Bytes of memory by their name in `/proc/meminfo`.
fn memory(name: &str) -> u64 {
    let text = read("/proc/meminfo");
    let line = text.lines().find(|l| l.starts_with(name));
    let kb = line.and_then(|l| l.split_whitespace().nth(1)).and_then(|n| n.parse::<u64>().ok());
    kb.unwrap_or(0) << 10
}

fn machine(config: &Config) -> Vec<Check> {
    let arena = config.arena_bytes;
    let available = memory("MemAvailable:");
    let shm = free_bytes(Path::new("/dev/shm")).unwrap_or(0);
    let (pages, huge) = shared_memory_pages();
    let locked = limit("Max locked memory").unwrap_or(0);
    let free = may_lock();
    let files = limit("Max open files").unwrap_or(0);
    vec![
        check("memory", format!("{} available", format_bytes(available))).or(
            available > 2 * arena,
            Grade::Advice,
            format!("the arena takes {}; lower arena.size", format_bytes(arena)),
        ),
        check("shared memory", format!("{} free in /dev/shm", format_bytes(shm))).or(
            shm > arena + (64 << 20),
            Grade::Bad,
            format!("the arena needs {}: mount -o remount,size=… /dev/shm", format_bytes(arena)),
        ),
        check("huge pages", if pages.is_empty() { "not known here".into() } else { pages.clone() })
            .or(
                huge,
                Grade::Advice,
                "the arena's huge pages are collapsed from small ones at every start, up to a \
                 second a GiB; faster, as root: echo advise > \
                 /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            ),
        check("locked memory", if free { "no limit (CAP_IPC_LOCK)".into() } else { shown(locked) })
            .or(
                free || locked >= arena,
                Grade::Advice,
                "the arena is not registered with io_uring; raise LimitMEMLOCK (ulimit -l)",
            ),
        check("open files", files.to_string()).or(
            files >= 4096,
            Grade::Advice,
            "raise LimitNOFILE (ulimit -n) to 4096 or more",
        ),
    ]
}

/// Where the weights are that both processes map.
fn weights(config: &Config) -> Check {
    let packed = packed_files(&config.cache_dir);
    let (bytes, dir) = (format_bytes(packed.bytes), packed.dir.display());
    let found = match packed.files {
        0 => format!("none yet; the first start writes them to {dir}"),
        n => format!("{n} files, {bytes} in {dir}"),
    };
    // As much as the dense weights of a small model take.
    let free = free_bytes(&config.cache_dir).unwrap_or(u64::MAX);
    check("packed weights", found).or(
        packed.files > 0 || free > 1 << 30,
        Grade::Advice,
        "there is no room for them, so each process keeps its own copy; set paths.cache_dir",
    )
}

fn directories(config: &Config) -> Vec<PathBuf> {
    if config.storage_dirs.is_empty() {
        vec![config.store_dir.clone()]
    } else {
        config.storage_dirs.clone()
    }
}

fn device(config: &Config, dir: &Path) -> anyhow::Result<Vec<Check>> {
    let probe = Probe::new(dir).map_err(|e| anyhow!("{e}"))?;
    let found = probe.directory().map_err(|e| anyhow!("{e}"))?;
    let rate = probe.rate(offline::engine_options(config)).map_err(|e| anyhow!("{e}"))?;
    let reserve = config.storage_reserve;
    Ok(vec![
        check("directory", dir.display().to_string()),
        check("free space", format_bytes(found.free)).or(
            found.free > reserve + (1 << 30),
            Grade::Advice,
            format!("storage.reserve keeps {}; free some space", format_bytes(reserve)),
        ),
        check("O_DIRECT", if found.direct { "works" } else { "refused" }).or(
            found.direct,
            Grade::Advice,
            "this file system reads through the page cache; use ext4 or xfs on the device itself",
        ),
        match &found.uring {
            Ok(how) => check("io_uring", how.clone()),
            Err(e) => check("io_uring", e.clone()).or(
                false,
                Grade::Advice,
                "reads use threads; allow io_uring (kernel.io_uring_disabled=0, seccomp profile)",
            ),
        },
        check("reads", format!("{:.2} GB/s as configured", rate / 1e9)),
    ])
}

fn print(checks: &[Check], format: Format) -> Vec<Value> {
    let mut out = Vec::new();
    for c in checks {
        let grade = match c.grade {
            Grade::Fine => "ok",
            Grade::Advice => "advice",
            Grade::Bad => "bad",
        };
        if format == Format::Json {
            out.push(json!({
                "check": c.name, "grade": grade, "found": c.found, "advice": c.advice,
            }));
            continue;
        }
        say!("{grade:<6} {:<14} {}", c.name, c.found);
        if !c.advice.is_empty() {
            say!("       {:<14} → {}", "", c.advice);
        }
    }
    out
}

pub fn run(resolved: &Resolved, o: &DoctorOptions, format: Format) -> anyhow::Result<ExitCode> {
    let config = &resolved.config;
    let mut checks = machine(config);
    checks.push(weights(config));
    for dir in directories(config) {
        checks.extend(device(config, &dir)?);
    }
    let list = print(&checks, format);
    let tuned = if o.tune { Some(tune(resolved, o, format)?) } else { None };
    if format == Format::Json {
        say!("{}", json!({"checks": list, "tuned": tuned}));
    }
    let bad = checks.iter().any(|c| c.grade == Grade::Bad);
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn tune(resolved: &Resolved, o: &DoctorOptions, format: Format) -> anyhow::Result<Value> {
    let config = &resolved.config;
    let dir = directories(config).remove(0);
    let probe = Probe::new(&dir).map_err(|e| anyhow!("{e}"))?;
    let bar = indicatif::ProgressBar::new(0);
    let mut progress = |step: usize, total: usize| {
        bar.set_length(total as u64);
        bar.set_position(step as u64);
    };
    let points = probe.tune(o.rounds.max(1), &mut progress).map_err(|e| anyhow!("{e}"))?;
    bar.finish_and_clear();
    let best = points.first().context("nothing was measured")?;
    let fio = fio::is_installed().then(|| fio::probe_rate(probe.path())).transpose()?;
    let written = write_best(resolved, best)?;
    let as_json = |p: &Point| {
        json!({
            "engine": p.engine, "depth": p.depth, "block": p.block, "bytes_per_second": p.rate,
        })
    };
    if format == Format::Text {
        let row = |p: &Point| {
            vec![
                p.engine.to_owned(),
                p.depth.to_string(),
                format!("{} KiB", p.block >> 10),
                format!("{:.2}", p.rate / 1e9),
            ]
        };
        let rows: Vec<_> = points.iter().take(8).map(row).collect();
        say!();
        crate::out::write(format_args!(
            "{}",
            render::table(&["engine", "depth", "block", "GB/s"], &rows)
        ));
        if let Some(rate) = fio {
            say!(
                "fio reads {:.2} GB/s; the best here is {:.2} of that",
                rate / 1e9,
                best.rate / rate
            );
        }
        match &written {
            Some(path) => say!("written to {}", path.display()),
            None => say!(
                "no configuration file is in use; put this into one:\n[io]\nengine = {:?}\ndepth = \
                 {}\nblock = \"{}KiB\"",
                best.engine,
                best.depth,
                best.block >> 10
            ),
        }
    }
    Ok(json!({
        "points": points.iter().map(as_json).collect::<Vec<_>>(), "best": as_json(best),
        "fio_bytes_per_second": fio, "written": written.map(|p| p.display().to_string()),
    }))
}

/// Writes the best point into the configuration file that is in use, and leaves the rest of it as
/// it is.
fn write_best(resolved: &Resolved, best: &Point) -> anyhow::Result<Option<PathBuf>> {
    let Some(path) = resolved.file() else { return Ok(None) };
    let text = std::fs::read_to_string(path)?;
    let mut document: toml_edit::DocumentMut =
        text.parse().with_context(|| format!("{} is not TOML", path.display()))?;
    let io = document.entry("io").or_insert(toml_edit::table());
    io["engine"] = toml_edit::value(best.engine);
    io["depth"] = toml_edit::value(i64::from(best.depth));
    io["block"] = toml_edit::value(format!("{}KiB", best.block >> 10));
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut temporary = tempfile::NamedTempFile::new_in(parent)?;
    std::io::Write::write_all(&mut temporary, document.to_string().as_bytes())?;
    temporary.persist(path).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(Some(path.to_owned()))
}
