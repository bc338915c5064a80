//! `matkv trace`: what both processes do, as a timeline.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use matkv_api::v1::{Span, TraceRequest};
use matkv_config::Config;
use serde_json::{Value, json};

#[derive(clap::Args)]
pub struct TraceOptions {
    /// How long to record
    #[arg(long, default_value_t = 10.0)]
    pub seconds: f64,
    /// Where the trace goes: JSON for ui.perfetto.dev or chrome://tracing
    #[arg(long, default_value = "matkv-trace.json")]
    pub out: PathBuf,
    /// Also draw it
    #[arg(long)]
    pub svg: Option<PathBuf>,
}

pub async fn run(config: &Config, options: TraceOptions) -> anyhow::Result<ExitCode> {
    let mut client = matkv_api::connect(&config.socket()).await?;
    eprintln!("recording for {} s; Ctrl-C ends it earlier", options.seconds);
    let request = TraceRequest { seconds: options.seconds };
    let mut other = client.clone();
    let recorded = client.trace(request);
    tokio::pin!(recorded);
    let reply = tokio::select! {
        reply = &mut recorded => reply,
        _ = tokio::signal::ctrl_c() => {
            other.trace(TraceRequest { seconds: 0.0 }).await?;
            tokio::select! {
                reply = &mut recorded => reply,
                _ = tokio::signal::ctrl_c() => bail!("interrupted; nothing has been written"),
            }
        }
    };
    let spans = reply?.into_inner().spans;
    if spans.is_empty() {
        bail!("nothing happened; ask something while the trace is recorded");
    }
    let write = |path: &PathBuf, text: String| {
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    write(&options.out, chrome(&spans).to_string())?;
    println!("{} spans in {}", spans.len(), options.out.display());
    if let Some(path) = &options.svg {
        write(path, svg(&spans))?;
        println!("drawn in {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// Chrome's trace-event format: one process each, one row for each request.
fn chrome(spans: &[Span]) -> Value {
    let first = spans.iter().map(|s| s.start_ns).min().unwrap_or(0);
    let mut events = Vec::new();
    let mut rows: BTreeMap<(u32, u64), &str> = BTreeMap::new();
    for s in spans {
        rows.insert((s.pid, s.request), &s.process);
        events.push(json!({
            "ph": "X", "name": s.name, "cat": s.track, "pid": s.pid, "tid": s.request,
            "ts": (s.start_ns - first) as f64 / 1e3,
            "dur": (s.end_ns - s.start_ns) as f64 / 1e3,
            "args": { "request": s.request, "thread": s.track },
        }));
    }
    for ((pid, request), process) in rows {
        let row = if request == 0 { "ingest".into() } else { format!("request {request}") };
        let name = |what: &str, name: String| json!({ "ph": "M", "name": what, "pid": pid, "tid": request, "args": { "name": name } });
        events.push(name("process_name", format!("matkv-{process}")));
        events.push(name("thread_name", row));
    }
    json!({ "traceEvents": events, "displayTimeUnit": "ms" })
}

const COLORS: [(&str, &str); 5] = [
    ("retrieve", "#7f7f7f"),
    ("load", "#2ca02c"),
    ("sub-prefill", "#ff7f0e"),
    ("materialize", "#bcbd22"),
    ("decode", "#1f77b4"),
];
const WIDTH: f64 = 1000.0;
const LEFT: f64 = 90.0;
const ROW: f64 = 22.0;
const TOP: f64 = 40.0;

/// One row for each request, both processes in it; steps of decoding run together.
fn svg(spans: &[Span]) -> String {
    let first = spans.iter().map(|s| s.start_ns).min().unwrap_or(0);
    let last = spans.iter().map(|s| s.end_ns).max().unwrap_or(1);
    let scale = (WIDTH - LEFT - 10.0) / (last - first).max(1) as f64;
    let mut bars: BTreeMap<(u64, &str), (u64, u64)> = BTreeMap::new();
    for s in spans {
        let bar = bars.entry((s.request, &s.name)).or_insert((s.start_ns, s.end_ns));
        *bar = (bar.0.min(s.start_ns), bar.1.max(s.end_ns));
    }
    let mut requests: Vec<(u64, u64)> = bars.iter().map(|((r, _), b)| (b.0, *r)).collect();
    requests.sort_unstable();
    let mut seen = BTreeSet::new();
    requests.retain(|(_, r)| seen.insert(*r));
    let height = TOP + ROW * requests.len() as f64 + 30.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    let drawn = COLORS.iter().filter(|c| bars.keys().any(|(_, name)| *name == c.0));
    for (i, (name, color)) in drawn.enumerate() {
        let x = LEFT + 120.0 * i as f64;
        let side = if *name == "decode" { "B" } else { "A" };
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"10\" width=\"12\" height=\"12\" fill=\"{color}\"/>\
             <text x=\"{}\" y=\"20\">{side}: {name}</text>",
            x + 16.0
        );
    }
    for (row, (_, request)) in requests.iter().enumerate() {
        let y = TOP + ROW * row as f64;
        let label = if *request == 0 { "ingest".into() } else { format!("request {}", row + 1) };
        let _ = writeln!(out, "<text x=\"4\" y=\"{}\">{label}</text>", y + 14.0);
        for (name, color) in COLORS {
            let Some((start, end)) = bars.get(&(*request, name)) else { continue };
            let x = LEFT + (start - first) as f64 * scale;
            let width = ((end - start) as f64 * scale).max(1.0);
            let _ = writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{}\" width=\"{width:.1}\" height=\"{}\" \
                 fill=\"{color}\"><title>{name}: {:.1} ms</title></rect>",
                y + 2.0,
                ROW - 6.0,
                (end - start) as f64 / 1e6
            );
        }
    }
    let seconds = (last - first) as f64 / 1e9;
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{0}\">0 s</text>\
         <text x=\"{1}\" y=\"{0}\" text-anchor=\"end\">{seconds:.2} s</text>\n</svg>",
        height - 8.0,
        WIDTH - 10.0
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(process: &str, name: &str, request: u64, time: (u64, u64)) -> Span {
        let (process, name, track) = (process.into(), name.into(), "t".into());
        Span { process, pid: 7, track, name, request, start_ns: time.0, end_ns: time.1 }
    }

    #[test]
    fn events_are_microseconds_from_the_first() {
        let spans = [
            span("loader", "load", 3, (5_000, 9_000)),
            span("decoder", "decode", 3, (9_500, 11_500)),
        ];
        let value = chrome(&spans);
        let events = value["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 4, "two spans, a process and a row");
        assert_eq!((&events[1]["ts"], &events[1]["dur"]), (&json!(4.5), &json!(2.0)));
        let drawn = svg(&spans);
        assert!(drawn.contains("A: load") && drawn.contains("B: decode"), "{drawn}");
        assert_eq!(drawn.matches("<title>").count(), 2);
    }
}
