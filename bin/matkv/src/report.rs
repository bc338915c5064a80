//! `matkv bench report`: results as one page with plots, or as a table; and latency by phase beside
//! what was published.
//!
//! The page needs nothing from elsewhere: plots are inline SVG, the style is its own.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use crate::args::ReportOptions;
use crate::out::{say, say_part};
use crate::render::table;

/// A result file: what `--format json` prints.
#[derive(Deserialize)]
struct Report {
    bench: String,
    commit: String,
    #[serde(default)]
    command: String,
    #[serde(default)]
    machine: Machine,
    #[serde(default)]
    notes: Vec<String>,
    figures: Vec<Bar>,
}

#[derive(Default, Deserialize)]
struct Machine {
    #[serde(default)]
    cpu: String,
    #[serde(default)]
    threads: usize,
}

/// A figure as a bar. JSON has no NaN: what was not a number is absent.
#[derive(Clone, Deserialize)]
struct Bar {
    name: String,
    value: Option<f64>,
    unit: String,
    low: Option<f64>,
    high: Option<f64>,
    target: Option<String>,
    met: Option<bool>,
}

/// Width of the names, of the longest bar, and of what follows it; height of a bar's line.
const NAMES: f64 = 330.0;
const LONGEST: f64 = 430.0;
const VALUES: f64 = 210.0;
const LINE: f64 = 22.0;

pub fn run(o: &ReportOptions) -> anyhow::Result<ExitCode> {
    ensure!(!o.files.is_empty(), "name result files, or --paper with a corpus");
    let reports = o.files.iter().map(|f| read(f)).collect::<anyhow::Result<Vec<_>>>()?;
    match &o.html {
        Some(path) => {
            std::fs::write(path, page(&reports))
                .with_context(|| format!("cannot write {}", path.display()))?;
            say!("{}", path.display());
        }
        None => reports.iter().for_each(|r| say_part!("{}", as_text(r))),
    }
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> anyhow::Result<Report> {
    let name = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
    match serde_json::from_str(&text) {
        Ok(report) => Ok(report),
        Err(e) => bail!("{name} is not a result of `matkv bench … --format json`: {e}"),
    }
}

fn number(value: Option<f64>) -> String {
    match value {
        Some(v) if v.abs() >= 100.0 => format!("{v:.0}"),
        Some(v) => format!("{v:.3}"),
        None => "–".into(),
    }
}

fn as_text(report: &Report) -> String {
    let row = |b: &Bar| {
        let quartiles = format!("{} … {}", number(b.low), number(b.high));
        let target = b.target.clone().unwrap_or_default();
        let met = b.met.map_or("", crate::render::yes_no).to_owned();
        vec![b.name.clone(), number(b.value), b.unit.clone(), quartiles, target, met]
    };
    let rows: Vec<_> = report.figures.iter().map(row).collect();
    let head = ["figure", "value", "unit", "quartiles", "target", "met"];
    format!("{} at {}\n{}", report.bench, report.commit, table(&head, &rows))
}

fn escape(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&quot;")
}

fn page(reports: &[Report]) -> String {
    let mut out = String::from(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>MatKV</title>\n\
         <style>body{font:15px sans-serif;max-width:1000px;margin:2em auto;color:#222}\
         text{font:13px sans-serif}code{font-size:13px}li{margin:.2em 0}</style></head><body>\n",
    );
    for report in reports {
        let _ = writeln!(
            out,
            "<h1>{}</h1>\n<p>Commit {}; {}, {} threads.<br><code>{}</code></p>",
            escape(&report.bench),
            escape(&report.commit),
            escape(&report.machine.cpu),
            report.machine.threads,
            escape(&report.command)
        );
        for (unit, bars) in by_unit(&report.figures) {
            let _ = writeln!(out, "<h2>{}</h2>\n{}", escape(&unit), plot(&bars));
        }
        if !report.notes.is_empty() {
            out.push_str("<h2>Notes</h2>\n<ul>\n");
            for note in &report.notes {
                let _ = writeln!(out, "<li>{}</li>", escape(note).replace('\n', "<br>"));
            }
            out.push_str("</ul>\n");
        }
    }
    out.push_str("</body></html>\n");
    out
}

/// Figures of one unit share a scale; units in the order they first appear.
fn by_unit(bars: &[Bar]) -> Vec<(String, Vec<Bar>)> {
    let mut groups: Vec<(String, Vec<Bar>)> = Vec::new();
    for bar in bars {
        match groups.iter_mut().find(|g| g.0 == bar.unit) {
            Some((_, group)) => group.push(bar.clone()),
            None => groups.push((bar.unit.clone(), vec![bar.clone()])),
        }
    }
    groups
}

/// The number in "at least 1.5" and "under 2".
fn limit(target: &str) -> Option<f64> {
    target.rsplit(' ').next()?.parse().ok()
}

/// Bars from zero, whiskers from quartile to quartile, a mark at the target.
fn plot(bars: &[Bar]) -> String {
    let extent = |b: &Bar| {
        let target = b.target.as_deref().and_then(limit);
        [b.value, b.high, target].into_iter().flatten().fold(0.0, f64::max)
    };
    let most = bars.iter().map(extent).fold(0.0, f64::max);
    let at = |v: f64| NAMES + if most > 0.0 { v.max(0.0) / most * LONGEST } else { 0.0 };
    let (width, height) = (NAMES + LONGEST + VALUES, LINE * bars.len() as f64 + 4.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">\n"
    );
    for (i, bar) in bars.iter().enumerate() {
        let top = LINE * i as f64 + 3.0;
        let (middle, text) = (top + 8.0, top + 13.0);
        let value = bar.value.unwrap_or(0.0);
        let color = match bar.met {
            Some(false) => "#c0504d",
            Some(true) => "#4f9153",
            None => "#5b7fa6",
        };
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{text}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{NAMES}\" y=\"{top}\" width=\"{:.1}\" height=\"16\" fill=\"{color}\"/>",
            NAMES - 8.0,
            escape(&bar.name),
            at(value) - NAMES
        );
        let (low, high) = (at(bar.low.unwrap_or(value)), at(bar.high.unwrap_or(value)));
        if high > low {
            let _ = writeln!(
                out,
                "<path d=\"M{low:.1} {middle}H{high:.1}M{low:.1} {}v8M{high:.1} {}v8\" \
                 stroke=\"#222\" fill=\"none\"/>",
                middle - 4.0,
                middle - 4.0
            );
        }
        let target = bar.target.as_deref().unwrap_or_default();
        if let Some(limit) = limit(target) {
            let x = at(limit);
            let _ = writeln!(
                out,
                "<path d=\"M{x:.1} {}v20\" stroke=\"#222\" stroke-dasharray=\"3 2\"/>",
                top - 2.0
            );
        }
        let said = if target.is_empty() { String::new() } else { format!(" ({target})") };
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{text}\">{}{}</text>",
            at(value).max(high).max(at(limit(target).unwrap_or(0.0))) + 6.0,
            number(bar.value),
            escape(&said)
        );
    }
    out.push_str("</svg>");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(json: serde_json::Value) -> Report {
        serde_json::from_value(json).unwrap()
    }

    fn sample() -> Report {
        report(serde_json::json!({
            "bench": "peers", "commit": "abc", "version": "0", "command": "matkv bench <peers>",
            "machine": {"cpu": "x", "cores": 2, "threads": 2, "kernel": "k", "memory_kb": 1},
            "notes": ["a & b"],
            "figures": [
                {"name": "r", "value": 2.0, "unit": "ratio", "low": 1.0, "high": 4.0,
                 "target": "at least 1.5", "met": true},
                {"name": "t", "value": 5.0, "unit": "ms", "low": 5.0, "high": 5.0},
                {"name": "s", "value": 1.0, "unit": "ratio", "low": 1.0, "high": 1.0,
                 "target": "under 1", "met": false},
                {"name": "n", "value": null, "unit": "ratio", "low": null, "high": null},
            ],
        }))
    }

    #[test]
    fn bars_are_to_scale() {
        let groups = by_unit(&sample().figures);
        assert_eq!(groups.iter().map(|g| g.0.as_str()).collect::<Vec<_>>(), ["ratio", "ms"]);
        let svg = plot(&groups[0].1);
        // 4 is the longest whisker: a bar of 2 is half of it, the whisker goes from a quarter on.
        assert!(svg.contains("width=\"215.0\" height=\"16\" fill=\"#4f9153\""), "{svg}");
        assert!(svg.contains("M437.5 11H760.0"), "{svg}");
        assert!(svg.contains("width=\"107.5\" height=\"16\" fill=\"#c0504d\""), "{svg}");
        assert!(svg.contains(">2.000 (at least 1.5)<"), "{svg}");
        assert!(!plot(&[]).contains("NaN") && !svg.contains("NaN"));
    }

    #[test]
    fn the_page_needs_nothing_from_elsewhere() {
        let page = page(&[sample()]);
        assert!(page.contains("matkv bench &lt;peers&gt;") && page.contains("a &amp; b"));
        let names = page.replace("http://www.w3.org/2000/svg", "");
        for outside in ["http:", "https:", "<script", "<link", "src=", "url("] {
            assert!(!names.contains(outside), "{outside}");
        }
    }

    #[test]
    fn the_table_has_every_figure() {
        let text = as_text(&sample());
        assert_eq!(text.lines().count(), 6);
        assert!(text.contains("under 1"));
    }
}
