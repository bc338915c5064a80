//! `matkv ingest`: sends documents, shows progress, names what was skipped.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use indicatif::{ProgressBar, ProgressStyle};
use matkv_api::v1::{IngestPart, IngestSummary, Progress, ingest_event::Event};
use matkv_api::{Client, PART_BYTES};
use matkv_config::{Config, format_bytes};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::args::{Format, IngestOptions};
use crate::out::say;
use crate::sources::{Skipped, Source, collect};

/// Exit status when something was skipped: what could be ingested was.
const SKIPPED: u8 = 2;

pub async fn run(
    config: &Config,
    options: &IngestOptions,
    format: Format,
) -> anyhow::Result<ExitCode> {
    let (sources, mut skipped) = collect(&options.sources)?;
    let client = matkv_api::connect(&config.socket()).await?;
    let summary = if sources.is_empty() {
        IngestSummary::default()
    } else {
        let (summary, more) =
            ingest(client, sources, &options.name, format == Format::Text).await?;
        skipped.extend(more);
        summary
    };
    for s in &skipped {
        eprintln!("skipped {}: {}", s.name, s.reason);
    }
    match format {
        Format::Json => say!("{}", json(&summary, &skipped)),
        Format::Text => print_summary(&summary, skipped.len()),
    }
    Ok(if skipped.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(SKIPPED) })
}

fn json(s: &IngestSummary, skipped: &[Skipped]) -> serde_json::Value {
    let skipped: Vec<_> =
        skipped.iter().map(|s| serde_json::json!({"name": s.name, "reason": s.reason})).collect();
    serde_json::json!({
        "documents": s.documents, "unchanged": s.unchanged, "skipped": skipped,
        "chunks_computed": s.chunks_computed, "chunks_reused": s.chunks_reused,
        "tokens_computed": s.tokens_computed, "bytes_written": s.bytes_written,
        "seconds": s.seconds,
    })
}

fn print_summary(s: &IngestSummary, skipped: usize) {
    let rate = s.tokens_computed as f64 / s.seconds.max(1e-9);
    say!(
        "{} documents ({} unchanged, {skipped} skipped), {} chunks computed, {} already there",
        s.documents,
        s.unchanged,
        s.chunks_computed,
        s.chunks_reused
    );
    if s.chunks_computed > 0 {
        say!(
            "{} tokens in {:.1} s = {rate:.0} tokens/s, {} written",
            s.tokens_computed,
            s.seconds,
            format_bytes(s.bytes_written)
        );
    }
}

/// Sends documents and follows the ingest to its end.
pub async fn ingest(
    mut client: Client,
    sources: Vec<Source>,
    stdin_name: &str,
    show: bool,
) -> anyhow::Result<(IngestSummary, Vec<Skipped>)> {
    let (parts, receiver) = mpsc::channel(4);
    let name = stdin_name.to_owned();
    let sender = tokio::spawn(send(sources, name, parts));
    let mut events = client.ingest(ReceiverStream::new(receiver)).await?.into_inner();
    let mut display = Display::new(show);
    let mut skipped = Vec::new();
    let mut summary = None;
    while let Some(event) = events.message().await.context("the ingest was interrupted")? {
        match event.event {
            Some(Event::Progress(p)) => display.update(&p),
            Some(Event::Document(d)) if !d.error.is_empty() => {
                skipped.push(Skipped { name: d.document_id, reason: d.error });
            }
            Some(Event::Document(_)) | None => {}
            Some(Event::Summary(s)) => summary = Some(s),
        }
    }
    display.finish();
    skipped.extend(sender.await?);
    let summary = summary.context("the server ended the ingest without a summary; run it again")?;
    Ok((summary, skipped))
}

async fn send(
    sources: Vec<Source>,
    stdin_name: String,
    parts: mpsc::Sender<IngestPart>,
) -> Vec<Skipped> {
    let mut skipped = Vec::new();
    for source in sources {
        let name = source.name(&stdin_name);
        let read = tokio::task::spawn_blocking(move || source.read()).await;
        let text = match read.unwrap_or_else(|e| Err(e.to_string())) {
            Ok(text) => text,
            Err(reason) => {
                skipped.push(Skipped { name, reason });
                continue;
            }
        };
        let bytes = text.into_bytes();
        let pieces: Vec<&[u8]> = bytes.chunks(PART_BYTES).collect();
        for (i, piece) in pieces.iter().enumerate() {
            let document_id = if i == 0 { name.clone() } else { String::new() };
            let last = i + 1 == pieces.len();
            if parts.send(IngestPart { document_id, text: piece.to_vec(), last }).await.is_err() {
                return skipped;
            }
        }
    }
    skipped
}

/// A bar on a terminal, a line now and then elsewhere.
struct Display {
    bar: Option<ProgressBar>,
    lines: bool,
    started: Instant,
    last_line: Instant,
}

const LINE_EVERY: Duration = Duration::from_secs(5);

impl Display {
    fn new(show: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = (show && terminal).then(|| {
            let bar = ProgressBar::new(0);
            let style = ProgressStyle::with_template("{bar:12} {pos}/{len} {wide_msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        let now = Instant::now();
        Self { bar, lines: show && !terminal, started: now, last_line: now }
    }

    fn update(&mut self, p: &Progress) {
        let seconds = self.started.elapsed().as_secs_f64().max(1e-9);
        let tokens = p.tokens_done as f64 / seconds;
        let left = (p.tokens_known - p.tokens_done.min(p.tokens_known)) as f64 / tokens.max(1e-9);
        let eta = if p.tokens_done == 0 { "–".into() } else { format!("{left:.0} s") };
        let text = format!(
            "{:.2} chunks/s, {tokens:.0} tokens/s, {}, ETA {eta}",
            p.chunks_done as f64 / seconds,
            format_bytes(p.bytes_written)
        );
        if let Some(bar) = &self.bar {
            bar.set_length(p.chunks_known);
            bar.set_position(p.chunks_done);
            bar.set_message(text);
        } else if self.lines && self.last_line.elapsed() > LINE_EVERY {
            self.last_line = Instant::now();
            eprintln!("{}/{} chunks, {text}", p.chunks_done, p.chunks_known);
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
