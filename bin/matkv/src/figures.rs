//! The JSON every benchmark prints: commit, machine, command and named figures.

use std::process::Command;

use serde_json::{Value, json};

/// What a figure should be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    AtLeast(f64),
    Under(f64),
}

impl Target {
    pub fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::Under(most) => value < most,
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtLeast(least) => write!(f, "at least {least}"),
            Self::Under(most) => write!(f, "under {most}"),
        }
    }
}

/// One named figure with its spread.
#[derive(Clone, Debug)]
pub struct Figure {
    pub name: String,
    pub value: f64,
    pub unit: &'static str,
    pub low: f64,
    pub high: f64,
    pub target: Option<Target>,
}

impl Figure {
    /// A figure without spread: a count or a size.
    pub fn exact(name: impl Into<String>, value: f64, unit: &'static str) -> Self {
        Self { name: name.into(), value, unit, low: value, high: value, target: None }
    }

    /// The median of samples, with the first and third quartile; not a number without samples.
    pub fn median(name: impl Into<String>, samples: &[f64], unit: &'static str) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |q: f64| {
            let last = sorted.len().saturating_sub(1);
            sorted.get((q * last as f64).round() as usize).copied().unwrap_or(f64::NAN)
        };
        let value = crate::demo::median(sorted.clone());
        Self { name: name.into(), value, unit, low: at(0.25), high: at(0.75), target: None }
    }
}

/// What was measured, and whether that was all.
pub struct Outcome {
    pub figures: Vec<Figure>,
    pub complete: bool,
}

impl Outcome {
    pub fn complete(figures: Vec<Figure>) -> Self {
        Self { figures, complete: true }
    }

    /// What was measured until something ended it: its end, a Ctrl-C, or an error, which the notes
    /// say, and which is all there is if nothing was measured.
    pub fn until(
        ended: anyhow::Result<()>,
        mut figures: Vec<Figure>,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<Self> {
        let Err(e) = ended else { return Ok(Self::complete(figures)) };
        figures.retain(|f| !f.value.is_nan());
        if figures.is_empty() {
            return Err(e);
        }
        notes.push(format!("not all of it: {e:#}"));
        Ok(Self { figures, complete: false })
    }
}

/// The value that this share of a sorted list does not exceed.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let at = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(at.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// Milliseconds that these shares of some requests do not exceed.
pub fn percentiles(
    mut all: Vec<f64>,
    shares: &[(&str, f64)],
    named: impl Fn(&str) -> String,
) -> Vec<Figure> {
    all.sort_by(f64::total_cmp);
    let figure =
        |(label, share): &(&str, f64)| Figure::exact(named(label), percentile(&all, *share), "ms");
    shares.iter().map(figure).collect()
}

/// Everything a report must say besides its figures.
pub fn report(bench: &str, threads: usize, figures: &[Figure], notes: &[String]) -> Value {
    let list: Vec<Value> = figures
        .iter()
        .map(|f| {
            let mut json = json!({
                "name": f.name, "value": f.value, "unit": f.unit, "low": f.low, "high": f.high,
            });
            if let Some(target) = f.target {
                json["target"] = target.to_string().into();
                json["met"] = target.is_met(f.value).into();
            }
            json
        })
        .collect();
    json!({
        "bench": bench,
        "commit": commit(),
        "version": env!("CARGO_PKG_VERSION"),
        "versions": { "rust": env!("CARGO_PKG_RUST_VERSION"), "fio": crate::fio::version() },
        "machine": {
            "cpu": cpu(), "cores": threads_of_machine(), "threads": threads,
            "kernel": read("/proc/sys/kernel/osrelease"), "memory_kb": memory_kb(),
        },
        "command": command(),
        "notes": notes,
        "figures": list,
    })
}

fn command() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}

/// Where figures come from, in a line, for those that people read.
pub fn origin(threads: usize) -> String {
    let kernel = read("/proc/sys/kernel/osrelease");
    let fio = crate::fio::version().unwrap_or_else(|| "no fio".into());
    format!(
        "matkv {}, commit {}, Rust {}, {fio}, Linux {kernel}; {}, {} cores, {threads} threads; {}",
        env!("CARGO_PKG_VERSION"),
        commit(),
        env!("CARGO_PKG_RUST_VERSION"),
        cpu(),
        threads_of_machine(),
        command()
    )
}

/// The same, for people.
pub fn text(figures: &[Figure]) -> String {
    let with_targets = figures.iter().any(|f| f.target.is_some());
    let row = |f: &Figure| {
        let digits = if f.value.abs() >= 100.0 { 0 } else { 3 };
        let mut cells = vec![
            f.name.clone(),
            format!("{:.digits$}", f.value),
            f.unit.to_owned(),
            format!("{:.digits$} … {:.digits$}", f.low, f.high),
        ];
        if with_targets {
            cells.push(f.target.map_or_else(String::new, |t| t.to_string()));
            cells.push(f.target.map_or("", |t| verdict(t.is_met(f.value))).to_owned());
        }
        cells
    };
    let rows: Vec<_> = figures.iter().map(row).collect();
    let head = ["figure", "value", "unit", "quartiles", "target", "met"];
    crate::render::table(if with_targets { &head } else { &head[..4] }, &rows)
}

fn verdict(met: bool) -> &'static str {
    crate::render::yes_no(met)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn cpu() -> String {
    let text = read("/proc/cpuinfo");
    let line = text.lines().find(|l| l.starts_with("model name"));
    line.and_then(|l| l.split_once(':')).map_or_else(String::new, |(_, v)| v.trim().to_owned())
}

fn memory_kb() -> u64 {
    let text = read("/proc/meminfo");
    let line = text.lines().find(|l| l.starts_with("MemTotal"));
    line.and_then(|l| l.split_whitespace().nth(1)).and_then(|n| n.parse().ok()).unwrap_or(0)
}

fn threads_of_machine() -> usize {
    std::thread::available_parallelism().map_or(0, usize::from)
}

fn commit() -> String {
    let git = Command::new("git").args(["describe", "--always", "--dirty"]).output();
    match git {
        Ok(out) if out.status.success() => String::from_utf8_lossy(&out.stdout).trim().to_owned(),
        _ => "unknown".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_quartiles() {
        let f = Figure::median("x", &[5.0, 1.0, 4.0, 2.0, 3.0], "ms");
        assert_eq!((f.value, f.low, f.high), (3.0, 2.0, 4.0));
        assert!(Figure::median("x", &[], "ms").value.is_nan());
    }

    #[test]
    fn percentiles_are_values_of_the_list() {
        let all: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!([0.5, 0.9, 0.99].map(|p| percentile(&all, p)), [50.0, 90.0, 99.0]);
        assert_eq!(percentile(&[3.0], 0.99), 3.0);
        assert!(percentile(&[], 0.5).is_nan());
    }

    #[test]
    fn targets_are_shown_and_judged() {
        let target = Some(Target::AtLeast(1.5));
        let met = Figure { target, ..Figure::exact("x", 1.5, "ratio") };
        let missed = Figure { target: Some(Target::Under(2.0)), ..Figure::exact("y", 2.0, "MB") };
        let figures = [met, missed, Figure::exact("z", 1.0, "s")];
        let report = report("b", 1, &figures, &[]);
        assert_eq!(report["figures"][0]["target"], "at least 1.5");
        assert_eq!(report["figures"][0]["met"], true);
        assert_eq!(report["figures"][1]["met"], false);
        assert!(report["figures"][2].get("met").is_none());
        let table = text(&figures);
        assert!(table.lines().nth(2).is_some_and(|l| l.ends_with("under 2   no")), "{table}");
        assert!(!text(&figures[2..]).contains("target"));
    }
}
